//! Builds a root filesystem image from Debian packages, without root and without running them, or
//! from a root filesystem that is there already (`import`).
//!
//! `configure` does what maintainer scripts would have done; the rest is unpacking and mke2fs.

mod alternatives;
mod bytecode;
mod configure;
mod image;
mod import;
mod layer;
#[cfg(test)]
mod tests;
mod tree;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::deb::DebError;
use crate::progress::Progress;
use crate::tool::ToolError;

pub use import::{Import, ImportError};
use tree::Tree;

#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    #[error(transparent)]
    Deb(#[from] DebError),
    #[error("cannot read package {}", path.display())]
    ReadPackage { path: PathBuf, source: io::Error },
    #[error("package {} has the path {entry:?}, which leaves the root", path.display())]
    Escapes { path: PathBuf, entry: PathBuf },
    #[error("cannot unpack {}", path.display())]
    Unpack { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("the packages hold no {}", path.display())]
    Incomplete { path: PathBuf },
    #[error("interrupted while unpacking")]
    Interrupted,
    #[error("cannot make the filesystem image")]
    Image { source: ToolError },
    #[error("cannot set owners in the filesystem image: {said}")]
    Owners { said: String },
    #[error("the path {path:?} has a line break, which debugfs cannot take")]
    LineBreak { path: PathBuf },
}

/// The result of a build.
#[derive(Debug)]
pub(crate) struct Rootfs {
    /// `PRETTY_NAME` of `/etc/os-release`.
    pub(crate) release: String,
}

/// Unpacks `debs` below `dir` and converts the tree to the ext4 file `image`.
pub(crate) fn build(
    debs: &[PathBuf],
    dir: &Path,
    image: &Path,
    progress: &mut dyn Progress,
) -> Result<Rootfs, RootfsError> {
    let root = dir.join("tree");
    progress.step(&format!("Unpacking {} Debian packages", debs.len()));
    let mut tree = Tree::create(&root)?;
    for deb in debs {
        if let Some(name) = deb.file_stem().and_then(|name| name.to_str()) {
            progress.detail(name.split('_').next().unwrap_or(name));
        }
        if progress.interrupted() {
            return Err(RootfsError::Interrupted);
        }
        tree.unpack(deb)?;
    }
    progress.done();
    progress.step("Setting up the root filesystem");
    alternatives::link(&tree, debs)?;
    configure::configure(&mut tree)?;
    progress.done();
    progress.step("Compiling Python's library");
    bytecode::compile(&root);
    progress.done();
    progress.step("Writing the ext4 image");
    image::write(&tree, image, progress)?;
    let release = configure::release(&tree);
    fs::remove_dir_all(&root).map_err(|source| RootfsError::Write { path: root, source })?;
    progress.done();
    Ok(Rootfs { release })
}
