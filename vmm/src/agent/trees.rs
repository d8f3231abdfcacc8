//! Transfers whole trees to and from the guest as tar archives: one request for a tree, however
//! many files it has.
//!
//! An archive from the guest is untrusted; `unpack` extracts it safely.

use std::io;
use std::path::Path;
use std::time::Instant;

use pvmm_guest_agent::archive::{self, Holes};
pub use pvmm_guest_agent::archive::{ArchiveError, MAX_ENTRIES, Unpack};
use pvmm_guest_agent::message::{ReadTar, Request, WriteTar};

use super::error::AgentError;
use super::files::guest_path;
use super::{ANSWER_TIME, Agent, FileReader, FileWriter};
use crate::sys::{next_data, next_hole};

impl Agent {
    /// Opens the tree at a directory of the guest as a tar archive for reading, with names relative
    /// to the directory.
    pub fn open_read_tar(&self, path: impl AsRef<Path>) -> Result<FileReader, AgentError> {
        let path = guest_path("path", path.as_ref())?;
        let stream = self.open(&Request::ReadTar(ReadTar { path }))?;
        let started = stream.started(Some(Instant::now() + ANSWER_TIME))?;
        FileReader::begin(stream, started)
    }

    /// Opens a directory of the guest, created if it is missing, to unpack a tar archive into. Each
    /// file appears whole; all files are there when `finish` returns.
    pub fn open_write_tar(
        &self,
        path: impl AsRef<Path>,
        owners: bool,
    ) -> Result<FileWriter, AgentError> {
        let path = guest_path("path", path.as_ref())?;
        Ok(FileWriter::begin(self.open(&Request::WriteTar(WriteTar { path, owners }))?))
    }
}

/// Packs the directory `root` of this host, with names relative to it, and returns the number of
/// entries. Calls `left_out` for everything that is neither file nor folder nor link.
pub fn pack(
    root: &Path,
    out: impl io::Write,
    left_out: &mut dyn FnMut(&Path),
) -> Result<u64, ArchiveError> {
    archive::pack(root, out, Holes { next_data, next_hole }, Some(left_out))
}

/// Unpacks an archive, which a guest may have made, into the directory `target` of this host.
/// Nothing outside of `target` is written: no name leads out of it and no link below it is
/// followed.
pub fn unpack(
    archive: impl io::Read,
    target: &Path,
    options: Unpack,
    left_out: &mut dyn FnMut(&Path),
) -> Result<u64, ArchiveError> {
    archive::unpack(archive, target, options, left_out)
}
