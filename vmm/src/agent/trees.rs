//! Whole trees in and out of the guest as tar archives: one request for a tree, however many files it has.
//! What comes out is a stream of the guest's making; `unpack` is how to take it.

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
    /// Opens the tree at a directory of the guest as a tar archive to be read, names relative to it.
    pub fn open_read_tar(&self, path: impl AsRef<Path>) -> Result<FileReader, AgentError> {
        let path = guest_path("path", path.as_ref())?;
        let stream = self.open(&Request::ReadTar(ReadTar { path }))?;
        let started = stream.started(Some(Instant::now() + ANSWER_TIME))?;
        FileReader::begin(stream, started)
    }

    /// Opens a directory of the guest, made if it is missing, for a tar archive to be unpacked into it. Each
    /// file appears whole; all of them are there when `finish` returns.
    pub fn open_write_tar(
        &self,
        path: impl AsRef<Path>,
        owners: bool,
    ) -> Result<FileWriter, AgentError> {
        let path = guest_path("path", path.as_ref())?;
        Ok(FileWriter::begin(self.open(&Request::WriteTar(WriteTar { path, owners }))?))
    }
}

/// Packs the directory at `root` of this host, with names relative to it; how many entries it has. Tells
/// `left_out` what is neither file nor folder nor link.
pub fn pack(
    root: &Path,
    out: impl io::Write,
    left_out: &mut dyn FnMut(&Path),
) -> Result<u64, ArchiveError> {
    archive::pack(root, out, Holes { next_data, next_hole }, Some(left_out))
}

/// Unpacks an archive that a guest may have made into the directory `target` of this host, and nowhere
/// else: no name leads out of it and no link below it is followed.
pub fn unpack(
    archive: impl io::Read,
    target: &Path,
    options: Unpack,
    left_out: &mut dyn FnMut(&Path),
) -> Result<u64, ArchiveError> {
    archive::unpack(archive, target, options, left_out)
}
