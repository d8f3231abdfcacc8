//! The paths of this checkout and its scratch folder.
//!
//! The tool is built in the tree that it works on, so the path of the tree is known at build time.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the folder that contains the Cargo.toml of the workspace.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.ancestors().nth(2).unwrap_or(xtask).to_path_buf()
}

/// Returns the command that copies this checkout, without build results, into a folder. The copies
/// are as new as the command, so that what was built of an earlier copy there is older.
pub fn copy_to(place: &Path) -> Command {
    let script = "tar -C \"$0\" --exclude=./target --exclude=./.git -cf - . | tar -C \"$1\" -xmf -";
    let mut tar = Command::new("sh");
    tar.args(["-c", script]).arg(root()).arg(place);
    tar
}

/// Returns a folder that is writable here and, under the same path, in the nested host.
pub fn scratch() -> PathBuf {
    root().join("target/nested-out")
}

/// Returns the path of this program, also if it was rebuilt since this process started.
pub fn program() -> io::Result<PathBuf> {
    let path = env::current_exe()?;
    // The kernel appends this suffix to the name of a file that was replaced.
    let replaced = path.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    Ok(replaced.map_or_else(|| path.clone(), |name| PathBuf::from(OsStr::from_bytes(name))))
}
