//! Reasons why a transfer fails, each in one line.

use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum TravelError {
    #[error("{0}")]
    Address(String),
    #[error("the store {store} has no {what}")]
    Missing { store: String, what: String },
    #[error("the store {store} refuses the credentials for {what}")]
    Denied { store: String, what: String },
    #[error("the store {store} answered {status} for {what}")]
    Status { store: String, what: String, status: u16 },
    #[error("cannot reach the store {store}")]
    Reach { store: String, source: Box<ureq::Error> },
    #[error("cannot use {what} of the store {store}")]
    Store { store: String, what: String, source: io::Error },
    #[error(
        "{what} is damaged in the store {store}; send it again with --force from where it is whole"
    )]
    Damaged { store: String, what: String },
    #[error("{what} of the store {store} was sent with a key, or is damaged: give its --key")]
    Unclear { store: String, what: String },
    #[error("the manifest of {name} is refused: {why}")]
    Manifest { name: String, why: String },
    #[error("{what} was not made with this key")]
    Key { what: String },
    #[error("the key {}: {why}", path.display())]
    KeyFile { path: PathBuf, why: String },
    #[error("cannot read {what}")]
    Read { what: String, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("interrupted")]
    Interrupted,
    #[error("a thread of the transfer has ended")]
    Thread,
}

impl TravelError {
    /// Whether the input, and not this host, is at fault.
    pub fn is_users(&self) -> bool {
        let own = matches!(self, Self::Write { .. } | Self::Read { .. } | Self::Thread);
        !own && !self.is_full_disk()
    }

    /// Whether a disk of this host is full.
    pub fn is_full_disk(&self) -> bool {
        let (Self::Write { source, .. } | Self::Store { source, .. }) = self else { return false };
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Write { path, source }
    }
}
