//! Transfers files with holes to and from the guest: bytes are sent, holes are only announced.
//!
//! A guest may announce any hole; it costs the host nothing but a length.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Instant;

use pvmm_guest_agent::message::{Answer, Metadata, Outcome, ReadFile, Request};
use pvmm_guest_agent::sparse::{Piece, Segment, SegmentDecoder};

use super::error::{AgentError, Lost};
use super::files::{guest_path, next_event};
use super::pace::Pace;
use super::stream::{Event, StreamRef};
use super::{ANSWER_TIME, Agent, FileWriteOptions, FileWriter};
use crate::sys::{next_data, next_hole};

/// Bytes copied at once.
const CHUNK: usize = 256 << 10;

impl Agent {
    /// Opens a file for reading, with its holes reported separately.
    pub fn open_read_sparse(&self, path: impl AsRef<Path>) -> Result<SparseReader, AgentError> {
        let path = guest_path("path", path.as_ref())?;
        let request = ReadFile { path, offset: 0, len: None, sparse: true };
        let stream = self.open(&Request::ReadFile(request))?;
        let started = stream.started(Some(Instant::now() + ANSWER_TIME))?;
        let metadata = started.and_then(|started| started.metadata);
        stream.expect_much();
        let decoder = SegmentDecoder::default();
        let (received, pace) = (0, Pace::default());
        let mut reader = SparseReader { stream, metadata, decoder, received, pace, ended: false };
        if reader.metadata.is_none() {
            // The stream ended before it began: its outcome says why.
            reader.next_bytes()?;
            return Err(AgentError::WrongAnswer);
        }
        Ok(reader)
    }

    /// Opens a file for writing in which holes can be left. The file appears whole when `finish`
    /// returns.
    pub fn open_write_sparse(
        &self,
        path: impl AsRef<Path>,
        options: &FileWriteOptions,
    ) -> Result<SparseWriter, AgentError> {
        if options.in_place {
            let why = "leaves no holes in a file that is there";
            return Err(AgentError::InvalidRequest { field: "in_place", why });
        }
        let writer = self.open_write_as(path.as_ref(), options, true)?;
        Ok(SparseWriter { writer, segment: Vec::new(), total: 0, data_until: 0 })
    }
}

/// A file of the guest that is being read, with its holes.
pub struct SparseReader {
    stream: StreamRef,
    metadata: Option<Metadata>,
    decoder: SegmentDecoder,
    received: u64,
    pace: Pace,
    ended: bool,
}

impl SparseReader {
    /// Returns the metadata of the file when it was opened.
    pub fn metadata(&self) -> Option<&Metadata> {
        self.metadata.as_ref()
    }

    /// Returns the number of bytes received from the guest; a hole counts only by its announcement.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Writes the next piece into `file` at offset `at` and returns its length in the file, or 0 at
    /// the end. At the end the file has its full length.
    pub fn copy_some(&mut self, file: &File, at: u64) -> Result<u64, SparseError> {
        let Some(bytes) = self.next_bytes()? else {
            file.set_len(at).map_err(SparseError::Here)?;
            return Ok(0);
        };
        let (mut rest, mut done) = (&bytes[..], 0);
        const BAD: AgentError = AgentError::Lost(Lost::Protocol("malformed segments"));
        while let Some(piece) = self.decoder.next(&mut rest).map_err(|_| BAD)? {
            done += match piece {
                Piece::Data(data) => {
                    file.write_all_at(data, at + done).map_err(SparseError::Here)?;
                    data.len() as u64
                }
                Piece::Hole(len) => len,
            };
        }
        if done == 0 {
            // Only a part of a segment's head was received.
            return self.copy_some(file, at);
        }
        Ok(done)
    }

    fn next_bytes(&mut self) -> Result<Option<Vec<u8>>, AgentError> {
        if self.ended {
            return Ok(None);
        }
        match next_event(&self.stream, &mut self.pace)? {
            Some(Event::Data(_, bytes)) => {
                self.received += bytes.len() as u64;
                Ok(Some(bytes))
            }
            Some(Event::Done(Outcome::Ok(Answer::Transferred(total))))
                if self.decoder.finish() == Ok(total) =>
            {
                self.ended = true;
                Ok(None)
            }
            Some(Event::Done(Outcome::Ok(_))) => Err(AgentError::WrongAnswer),
            Some(Event::Done(Outcome::Failed(failure))) => Err(failure.into()),
            None => {
                self.stream.cancel();
                Err(AgentError::Overdue)
            }
        }
    }
}

impl Drop for SparseReader {
    fn drop(&mut self) {
        self.stream.cancel();
    }
}

/// The reason why a copy failed, in the guest or on the host.
#[derive(Debug, thiserror::Error)]
pub enum SparseError {
    /// The agent or the connection to it failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The file on the host cannot be read or written.
    #[error("cannot use the file here")]
    Here(#[source] io::Error),
}

/// A file of the guest that is being written, in which holes can be left.
pub struct SparseWriter {
    writer: FileWriter,
    /// A segment head and its bytes, which are sent together.
    segment: Vec<u8>,
    total: u64,
    /// The end of the current data range of the copied file.
    data_until: u64,
}

impl SparseWriter {
    /// Appends bytes.
    pub fn data(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        for chunk in bytes.chunks(CHUNK) {
            self.segment.clear();
            self.segment.extend_from_slice(&Segment::Data(chunk.len() as u64).head());
            self.segment.extend_from_slice(chunk);
            self.writer.send_all(&self.segment)?;
            self.total += chunk.len() as u64;
        }
        Ok(())
    }

    /// Appends a hole.
    pub fn hole(&mut self, len: u64) -> Result<(), AgentError> {
        if len > 0 {
            self.writer.send_all(&Segment::Hole(len).head())?;
            self.total += len;
        }
        Ok(())
    }

    /// Copies the hole or the bytes of `file` that begin at `at` and returns their length, or 0 at
    /// the end.
    pub fn copy_some(&mut self, file: &File, at: u64) -> Result<u64, SparseError> {
        let facts = file.metadata().map_err(SparseError::Here)?;
        let end = facts.len();
        if at >= self.data_until {
            if at >= end {
                return Ok(0);
            }
            // A file with all its blocks allocated has no holes to search for.
            let has_holes = facts.blocks().saturating_mul(512) < end;
            let found = |seek: io::Result<Option<u64>>| seek.ok().filter(|_| has_holes);
            let data = found(next_data(file, at)).map_or(at, |data| data.unwrap_or(end).min(end));
            if data > at {
                self.hole(data - at)?;
                return Ok(data - at);
            }
            let hole = found(next_hole(file, at)).map_or(end, |hole| hole.unwrap_or(end));
            self.data_until = hole.max(at + 1);
        }
        let mut buffer = vec![0; (self.data_until - at).min(CHUNK as u64) as usize];
        let count = loop {
            match file.read_at(&mut buffer, at) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                read => break read.map_err(SparseError::Here)?,
            }
        };
        self.data(&buffer[..count])?;
        Ok(count as u64)
    }

    /// Completes the file and returns its length.
    pub fn finish(self) -> Result<u64, AgentError> {
        self.writer.finish_with(self.total)
    }
}
