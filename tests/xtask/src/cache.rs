//! Where prepared things are kept between runs.
//!
//! One line of policy that kernels, templates and the nested host must share.

use std::env;
use std::path::PathBuf;

/// `$XDG_CACHE_HOME/pvmm`, or `~/.cache/pvmm`.
pub fn dir() -> PathBuf {
    let base = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    base.unwrap_or_else(|| {
        PathBuf::from(env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache")
    })
    .join("pvmm")
}
