//! The folder in which prepared files are kept between runs.
//!
//! Kernels, templates and the nested host share it.

use std::env;
use std::path::PathBuf;

/// Returns `$XDG_CACHE_HOME/pvmm`, or `~/.cache/pvmm`.
pub fn dir() -> PathBuf {
    let base = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    base.unwrap_or_else(|| {
        PathBuf::from(env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache")
    })
    .join("pvmm")
}
