//! Where this checkout and its scratch directory are.
//!
//! The tool is built inside the tree it works on, so the tree's place is known when it is built.

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
