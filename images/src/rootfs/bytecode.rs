//! Compiles Python's library ahead of time, as its package's postinst would.
//!
//! Otherwise every sandbox would compile the modules that it imports at its first start.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::tool;

const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";
const DEADLINE: Duration = Duration::from_secs(120);

/// Runs the tree's own Python on the host, through the tree's own loader: no chroot, so no root is
/// needed. A tree without Python, or a host where it does not run, only loses speed.
pub(super) fn compile(root: &Path) {
    let Ok(python) = fs::read_link(root.join("usr/bin/python3")) else { return };
    let python = root.join("usr/bin").join(python);
    let version = python.file_name().unwrap_or_default();
    let directories = [root.join("usr/lib").join(version), root.join("usr/lib/python3")];
    std::thread::scope(|scope| {
        for directory in &directories {
            let python = &python;
            scope.spawn(move || compile_directory(root, python, directory));
        }
    });
}

fn compile_directory(root: &Path, python: &Path, directory: &Path) {
    let libraries = root.join(LIBRARIES);
    let mut command = Command::new(libraries.join(LOADER));
    command
        .env_clear()
        .env("PYTHONHOME", root.join("usr"))
        .arg("--library-path")
        .arg(&libraries)
        .arg(python)
        // Without the user's or the site's packages: only what is in the tree.
        .args(["-s", "-S", "-m", "compileall", "-q"])
        // The compiled files must name the paths that the guest sees.
        .arg("-s")
        .arg(root)
        .args(["-p", "/"])
        .arg(directory);
    if let Err(err) = tool::run_quietly(command, "libc6", DEADLINE) {
        // Fails also if a single file does not compile, such as a code template.
        log::warn!("not all of {} was compiled: {err}", directory.display());
    }
}
