//! A template in a folder.

pub(crate) mod state;

use std::path::PathBuf;

/// The snapshot that another one or a machine goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    pub id: String,
    pub dir: PathBuf,
}
