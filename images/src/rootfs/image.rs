//! Converts a tree to an ext4 image: mke2fs copies the files, debugfs then sets owners and modes.
//!
//! That needs neither root nor a user namespace, and gives one result with and without them.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::RootfsError;
use super::tree::Tree;
use crate::progress::Progress;
use crate::tool::{self, ToolError};

const BLOCK: u64 = 4096;
const INODE: u64 = 256;
/// Room for the filesystem's own tables; the image is never written.
const SLACK: u64 = 4 << 20;
/// mke2fs reserves the first inodes.
const RESERVED_INODES: u64 = 32;
const DEADLINE: Duration = Duration::from_secs(10 * 60);

const MODE_MASK: u32 = 0o7777;

pub(super) fn write(
    tree: &Tree,
    image: &Path,
    progress: &mut dyn Progress,
) -> Result<(), RootfsError> {
    let entries = walk(tree.root())?;
    let content: u64 = entries.iter().map(|entry| entry.blocks * BLOCK).sum();
    let inodes = entries.len() as u64 + RESERVED_INODES;
    let size = content + content / 50 + inodes * INODE + SLACK;
    // The estimate ignores extent trees, so an unusual tree may need more.
    match make(tree.root(), image, inodes, size, progress) {
        Err(ToolError::Failed { .. }) => {
            make(tree.root(), image, inodes, size + size / 2, progress)
        }
        result => result,
    }
    .map_err(|source| RootfsError::Image { source })?;
    set_owners(tree, &entries, image, progress)
}

fn make(
    root: &Path,
    image: &Path,
    inodes: u64,
    size: u64,
    progress: &mut dyn Progress,
) -> Result<(), ToolError> {
    let mut command = Command::new("mke2fs");
    command
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0"])
        // Always read-only: no journal to replay, no room to grow.
        .args(["-O", "^has_journal,^resize_inode", "-E", "root_owner=0:0"])
        .args(["-N", &inodes.to_string(), "-d"])
        .arg(root)
        .arg(image)
        .arg(format!("{}k", size.div_ceil(1024)));
    tool::run(command, "e2fsprogs", DEADLINE, progress, |_| None).map(drop)
}

struct ImageEntry {
    inner: PathBuf,
    blocks: u64,
    file_type: u32,
}

/// Lists everything below `root`, with the most blocks that each entry takes.
fn walk(root: &Path) -> Result<Vec<ImageEntry>, RootfsError> {
    let mut entries = Vec::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(directory) = todo.pop() {
        let path = root.join(&directory);
        let failed = |source| RootfsError::Unpack { path: path.clone(), source };
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let meta = entry.metadata().map_err(failed)?;
            let inner = directory.join(entry.file_name());
            if meta.is_dir() {
                todo.push(inner.clone());
            }
            let blocks = if meta.is_symlink() { 1 } else { meta.len().div_ceil(BLOCK) };
            entries.push(ImageEntry { inner, blocks, file_type: meta.mode() & !MODE_MASK });
        }
    }
    Ok(entries)
}

fn set_owners(
    tree: &Tree,
    entries: &[ImageEntry],
    image: &Path,
    progress: &mut dyn Progress,
) -> Result<(), RootfsError> {
    let mut script = String::from("sif / uid 0\nsif / gid 0\n");
    for entry in entries {
        let path = quoted(&entry.inner)?;
        let meta = tree.meta(&entry.inner);
        // Writing to a string cannot fail.
        let _ = writeln!(script, "sif {path} uid {}\nsif {path} gid {}", meta.uid, meta.gid);
        if let Some(mode) = meta.mode {
            let _ = writeln!(script, "sif {path} mode 0{:o}", entry.file_type | mode);
        }
    }
    let values = image.with_extension("attributes");
    write_attributes(tree, &values, &mut script)?;
    let script_path = image.with_extension("owners");
    let wrote = fs::write(&script_path, script);
    wrote.map_err(|source| RootfsError::Write { path: script_path.clone(), source })?;
    let mut command = Command::new("debugfs");
    command.arg("-w").arg("-f").arg(&script_path).arg(image);
    let said = tool::run(command, "e2fsprogs", DEADLINE, progress, |_| None)
        .map_err(|source| RootfsError::Image { source })?;
    let _ = fs::remove_file(&script_path);
    let _ = fs::remove_dir_all(&values);
    // debugfs exits with 0 even if a command fails; only its messages tell. The first is its
    // version.
    match said.err.iter().find(|line| !line.starts_with("debugfs ")) {
        Some(line) => Err(RootfsError::Owners { said: line.clone() }),
        None => Ok(()),
    }
}

/// Adds the extended attributes to a script for debugfs, which reads each value from a file.
fn write_attributes(tree: &Tree, values: &Path, script: &mut String) -> Result<(), RootfsError> {
    for (number, (path, (name, value))) in tree.attributes().enumerate() {
        let file = values.join(number.to_string());
        let wrote = fs::create_dir_all(values).and_then(|()| fs::write(&file, value));
        wrote.map_err(|source| RootfsError::Write { path: file.clone(), source })?;
        let from = file.to_str().filter(|text| !text.contains(['\n', '"']));
        let from = from.ok_or_else(|| RootfsError::LineBreak { path: file.clone() })?;
        let _ = writeln!(script, "ea_set -f \"{from}\" {} {name}", quoted(path)?);
    }
    Ok(())
}

/// Quotes a path for debugfs: absolute, in quotes, with quotes doubled.
fn quoted(inner: &Path) -> Result<String, RootfsError> {
    match inner.to_str() {
        Some(text) if !text.contains('\n') => Ok(format!("\"/{}\"", text.replace('"', "\"\""))),
        _ => Err(RootfsError::LineBreak { path: inner.to_owned() }),
    }
}
