//! Moves templates and snapshots between hosts, through a folder or an S3-compatible store.
//!
//! A separate crate, because only the launcher needs an HTTP client and the signing of requests.
//! Files are cut into chunks of one mebibyte, which a store keeps by the SHA-256 of their content;
//! a manifest lists the chunks of each file, and a name points to a manifest. So only chunks that
//! the other side lacks are moved. Nothing that a store holds is trusted: a manifest is checked in
//! every field, and a chunk is used only if it has its digest.
//!
//! | module | contents |
//! | --- | --- |
//! | `chunk` | cutting, hashing and compressing |
//! | `manifest` | the list of files, and what is refused in one |
//! | `seal` | encryption with a key that the store does not have |
//! | `store` | a folder, or a bucket |
//! | `workers` | the threads of a transfer |
//! | `staging` | the files of an unfinished pull |
//! | `push`, `pull` | the two ways |

mod chunk;
mod error;
mod manifest;
mod pull;
mod push;
mod seal;
mod staging;
mod store;
mod workers;

pub use error::TravelError;
pub use manifest::{Kind, Manifest};
pub use pull::Pull;
pub use push::push;
pub use seal::Seal;
pub use store::{Address, Store};

use serde::Serialize;

/// The result of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    pub name: String,
    pub store: String,
    /// The SHA-256 of the manifest.
    pub digest: String,
    /// The size of all files, holes included.
    pub bytes: u64,
    /// Chunks that are not all zeros; equal ones count once.
    pub chunks: u64,
    /// Chunks that went through the network, or into or out of the folder.
    pub chunks_moved: u64,
    /// Chunks that the receiving side had already.
    pub chunks_there: u64,
    /// Bytes of the moved chunks, compressed.
    pub bytes_moved: u64,
}

#[cfg(test)]
mod tests;
