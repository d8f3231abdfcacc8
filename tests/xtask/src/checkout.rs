//! Where this checkout and its scratch directory are.
//!
//! The tool is built inside the tree it works on, so the tree's place is known when it is built.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The directory that holds the workspace's Cargo.toml.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.ancestors().nth(2).unwrap_or(xtask).to_path_buf()
}

/// Writable both here and, at the same path, in the nested host.
pub fn scratch() -> PathBuf {
    root().join("target/nested-out")
}

/// This program's file, also when it was rebuilt since this process started.
pub fn program() -> io::Result<PathBuf> {
    let path = env::current_exe()?;
    // That is how the kernel names a file that was replaced.
    let replaced = path.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    Ok(replaced.map_or_else(|| path.clone(), |name| PathBuf::from(OsStr::from_bytes(name))))
}
