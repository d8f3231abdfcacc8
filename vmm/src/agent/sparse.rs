//! Files with holes, in and out of the guest: bytes travel, holes are only named.
//! A guest may name any hole; it costs the host nothing but a length.

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
use super::{ANSWER_TIME, Agent, FileWriter, WriteOptions};
use crate::sys::{next_data, next_hole};

/// What is copied at once.
const CHUNK: usize = 256 << 10;

impl Agent {
    /// Opens a file for reading with its holes told apart.
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
            // It is over without having begun: the outcome says why.
            reader.next_bytes()?;
            return Err(AgentError::WrongAnswer);
        }
        Ok(reader)
    }

    /// Opens a file for writing in which holes can be left. It appears whole, when `finish` returns.
    pub fn open_write_sparse(
        &self,
        path: impl AsRef<Path>,
        options: &WriteOptions,
    ) -> Result<SparseWriter, AgentError> {
        if options.in_place {
            let why = "leaves no holes in a file that is there";
            return Err(AgentError::InvalidRequest { field: "in_place", why });
        }
        let writer = self.open_write_as(path.as_ref(), options, true)?;
        Ok(SparseWriter { writer, segment: Vec::new(), total: 0, data_until: 0 })
    }
}

/// A file of the guest being read, holes and all.
pub struct SparseReader {
    stream: StreamRef,
    metadata: Option<Metadata>,
    decoder: SegmentDecoder,
    received: u64,
    pace: Pace,
    ended: bool,
}

impl SparseReader {
    /// What the file was when it was opened.
    pub fn metadata(&self) -> Option<&Metadata> {
        self.metadata.as_ref()
    }

    /// Bytes that came from the guest, in which holes are only named.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Writes the next piece into `file`; how many bytes of the file it was, none at the end. The
    /// file has its full length when the end has come.
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
            // Only a part of a segment's head came.
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

/// A copy that failed on one side or the other.
#[derive(Debug, thiserror::Error)]
pub enum SparseError {
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error("cannot use the file here")]
    Here(#[source] io::Error),
}

/// A file of the guest being written, in which holes can be left.
pub struct SparseWriter {
    writer: FileWriter,
    /// A head and its bytes, which are sent together.
    segment: Vec<u8>,
    total: u64,
    /// Of the file that is copied: there is data up to here.
    data_until: u64,
}

impl SparseWriter {
    /// Adds bytes.
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

    /// Leaves a hole.
    pub fn hole(&mut self, len: u64) -> Result<(), AgentError> {
        if len > 0 {
            self.writer.send_all(&Segment::Hole(len).head())?;
            self.total += len;
        }
        Ok(())
    }

    /// Copies the next hole or bytes of `file`, which begin at `at`; how many, none at the end.
    pub fn copy_some(&mut self, file: &File, at: u64) -> Result<u64, SparseError> {
        let facts = file.metadata().map_err(SparseError::Here)?;
        let end = facts.len();
        if at >= self.data_until {
            if at >= end {
                return Ok(0);
            }
            // Where every byte has its place on the disk, nobody needs to be asked for holes.
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

    /// Completes the file; how long it is.
    pub fn finish(self) -> Result<u64, AgentError> {
        self.writer.finish_with(self.total)
    }
}
