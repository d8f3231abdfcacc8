//! Files that a snapshot only names: its base, and images that it did not copy.
//!
//! A snapshot may come from anybody, and the files that it names are opened with the rights of the
//! restoring user. So the caller says where such files may be, no symbolic link is followed on the
//! way, and only regular files are read.

use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};

use rustix::fs::OFlags;

use crate::sys;

/// The folders below which a snapshot may name files; `None` allows every path.
pub type Roots = Option<Vec<PathBuf>>;

/// Returns whether `path`, as it is written, lies below one of the roots. The path must then be
/// opened without following links.
pub fn is_allowed(path: &Path, roots: &Roots) -> bool {
    let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    let within = |root: &PathBuf| match fs::canonicalize(root) {
        Ok(root) => path.starts_with(root),
        Err(_) => false,
    };
    let whole = path.is_absolute() && path.components().all(plain);
    whole && roots.as_ref().is_none_or(|roots| roots.iter().any(within))
}

/// Opens a regular file for reading, without following links. Links were resolved when the snapshot
/// was written, so its path contains none.
pub fn open_file(path: &Path) -> io::Result<File> {
    let file = sys::open_without_links(path, OFlags::empty())?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("is not a regular file"))
    }
}

/// Opens a folder without following links.
pub fn open_folder(path: &Path) -> io::Result<File> {
    sys::open_without_links(path, OFlags::DIRECTORY)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn path_outside_of_every_root_or_with_steps_back_is_not_allowed() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        let roots = Some(vec![root.clone()]);
        assert!(is_allowed(&root.join("a/b"), &roots));
        for bad in ["/etc/shadow", "a", ""] {
            assert!(!is_allowed(Path::new(bad), &roots), "{bad}");
        }
        assert!(!is_allowed(&root.join("../etc"), &roots));
        assert!(!is_allowed(&PathBuf::from(format!("{}-other/a", root.display())), &roots));
        assert!(!is_allowed(&root.join("a"), &Some(vec![root.join("missing")])));
        assert!(is_allowed(Path::new("/etc/shadow"), &None));
        assert!(!is_allowed(Path::new("/etc/../etc/shadow"), &None));
    }

    /// H12: opening a pipe does not block either.
    #[test]
    fn h12_link_or_pipe_or_folder_in_place_of_a_named_file_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        fs::create_dir(root.join("folder")).unwrap();
        fs::write(root.join("folder/file"), b"x").unwrap();
        symlink(root.join("folder"), root.join("link")).unwrap();
        symlink(root.join("folder/file"), root.join("folder/link")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(root.join("pipe")).status().unwrap();
        assert!(made.success());
        open_file(&root.join("folder/file")).unwrap();
        for bad in ["folder", "link/file", "folder/link", "pipe", "missing"] {
            assert!(open_file(&root.join(bad)).is_err(), "{bad}");
        }
        open_folder(&root.join("folder")).unwrap();
        assert!(open_folder(&root.join("link")).is_err());
        assert!(open_folder(&root.join("pipe")).is_err());
    }
}
