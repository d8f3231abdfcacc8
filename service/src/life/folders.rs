//! The folders of hibernated sandboxes: replaced as a whole, removed as a whole.
//!
//! A server that dies at any step leaves the last folder or the new one, and a start finds which.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the folder that a hibernation is written to, until it replaces the last one.
pub(super) fn new_folder(folder: &Path) -> PathBuf {
    folder.with_extension("new")
}

/// Puts a complete new folder in the place of the last one. The kernel keeps files of the last one
/// for as long as they are mapped.
pub(super) fn replace_folder(folder: &Path) -> std::io::Result<()> {
    let (new, old) = (new_folder(folder), folder.with_extension("old"));
    remove_folder(&old)?;
    if folder.exists() {
        fs::rename(folder, &old)?;
    }
    fs::rename(&new, folder)?;
    remove_folder(&old)
}

/// Removes a folder that may not exist.
pub(super) fn remove_folder(folder: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes every folder of a sandbox's hibernations.
pub(super) fn remove_folders(folder: &Path) -> std::io::Result<()> {
    remove_folder(&new_folder(folder))?;
    remove_folder(&folder.with_extension("old"))?;
    remove_folder(folder)
}
