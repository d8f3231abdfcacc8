//! Files in the guest: read and write as streams or whole, stat, list, remove, mkdir, rename.
//!
//! Names and sizes come from the guest, so a listing is checked before a caller can build a path
//! from it.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm_guest_agent::decode;
use pvmm_guest_agent::limits::{MAX_ENTRY, MAX_PATH};
use pvmm_guest_agent::message::{
    self, Answer, ByteBuf, DirEntry, Metadata, Outcome, Owner, ReadFile, Request, Started,
};

use super::error::{AgentError, Lost};
use super::pace::Pace;
use super::stream::{Event, StreamRef};
use super::{ANSWER_TIME, Agent};

/// The time limit for removing a whole tree.
const REMOVE_TIME: Duration = Duration::from_secs(600);
/// The time limit for completing a written file once all of it was sent.
const FINISH_TIME: Duration = Duration::from_secs(60);
/// The default limit of [`Agent::list`] on the size of a listing: about a million ordinary entries.
pub const LISTING_BYTES: u64 = 256 << 20;

/// How a file is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileWriteOptions {
    /// Permission bits; by default those of the replaced file, or 0644.
    pub mode: Option<u32>,
    /// Owner; by default that of the replaced file, or root.
    pub owner: Option<Owner>,
    /// Create missing parent directories.
    pub parents: bool,
    /// Write into the existing file instead of replacing it, for example a device.
    pub in_place: bool,
    /// With `in_place`: write from this offset and keep what lies beyond.
    pub offset: Option<u64>,
    /// Wait until the contents are on the guest's disk.
    pub sync: bool,
}

impl Agent {
    /// Opens a file, or a range of it, for reading.
    pub fn open_read(
        &self,
        path: impl AsRef<Path>,
        range: Option<Range<u64>>,
    ) -> Result<FileReader, AgentError> {
        let range = range.unwrap_or(0..u64::MAX);
        let len = (range.end != u64::MAX).then(|| range.end.saturating_sub(range.start));
        let path = guest_path("path", path.as_ref())?;
        let stream = self.open(&Request::ReadFile(ReadFile {
            path,
            offset: range.start,
            len,
            sparse: false,
        }))?;
        let started = stream.started(Some(Instant::now() + ANSWER_TIME))?;
        FileReader::begin(stream, started)
    }

    /// Reads a whole file of at most `limit` bytes.
    pub fn read_file(&self, path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>, AgentError> {
        let mut reader = self.open_read(path, None)?;
        let mut bytes = Vec::new();
        while reader.fill()? {
            if (bytes.len() + reader.chunk.len()) as u64 > limit {
                return Err(AgentError::TooLarge { what: "bytes in the file", limit });
            }
            bytes.append(&mut reader.chunk);
        }
        Ok(bytes)
    }

    /// Opens a file for writing. Unless it is written in place, the file appears whole when
    /// `finish` returns.
    pub fn open_write(
        &self,
        path: impl AsRef<Path>,
        options: &FileWriteOptions,
    ) -> Result<FileWriter, AgentError> {
        self.open_write_as(path.as_ref(), options, false)
    }

    /// Opens a file for writing; with `sparse`, the sent bytes are segments.
    pub(super) fn open_write_as(
        &self,
        path: &Path,
        options: &FileWriteOptions,
        sparse: bool,
    ) -> Result<FileWriter, AgentError> {
        let request = Request::WriteFile(message::WriteFile {
            path: guest_path("path", path)?,
            mode: options.mode,
            owner: options.owner,
            parents: options.parents,
            in_place: options.in_place,
            offset: options.offset,
            sync: options.sync,
            sparse,
        });
        Ok(FileWriter::begin(self.open(&request)?))
    }

    /// Writes a whole file.
    pub fn write_file(
        &self,
        path: impl AsRef<Path>,
        bytes: &[u8],
        options: &FileWriteOptions,
    ) -> Result<(), AgentError> {
        let mut writer = self.open_write(path, options)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let count = writer.send(rest)?;
            rest = &rest[count..];
        }
        writer.finish().map(drop)
    }

    /// Returns the metadata of a file; of a symbolic link itself, unless `follow` is set.
    pub fn stat(&self, path: impl AsRef<Path>, follow: bool) -> Result<Metadata, AgentError> {
        let path = guest_path("path", path.as_ref())?;
        let request = Request::Stat(message::Stat { path, follow });
        match self.ask(&request, Instant::now() + ANSWER_TIME)? {
            Answer::Metadata(metadata) => Ok(metadata),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Returns the entries of a directory, sorted by name. Each name has been checked to be one
    /// path component.
    pub fn list(&self, path: impl AsRef<Path>) -> Result<Vec<DirEntry>, AgentError> {
        self.list_within(path, LISTING_BYTES)
    }

    /// Returns the entries of a directory like [`Self::list`], with a limit of the caller on what
    /// the guest may send.
    pub fn list_within(
        &self,
        path: impl AsRef<Path>,
        max_bytes: u64,
    ) -> Result<Vec<DirEntry>, AgentError> {
        let path = guest_path("path", path.as_ref())?;
        let stream = self.open(&Request::List(message::List { path }))?;
        let mut listing = Listing::within(max_bytes);
        let mut pace = Pace::default();
        while let Some(bytes) = next_chunk(&stream, &mut pace, None)? {
            if let Err(e) = listing.push(&bytes) {
                stream.cancel();
                return Err(e);
            }
        }
        listing.finish()
    }

    /// Removes a file or an empty directory; with `recursive`, a whole tree.
    pub fn remove(&self, path: impl AsRef<Path>, recursive: bool) -> Result<(), AgentError> {
        let path = guest_path("path", path.as_ref())?;
        let request = message::Remove { path, recursive, missing_ok: false };
        self.tell(&Request::Remove(request), REMOVE_TIME)
    }

    /// Creates a directory; with `parents`, missing parents too, and the directory may exist.
    pub fn mkdir(
        &self,
        path: impl AsRef<Path>,
        mode: Option<u32>,
        parents: bool,
    ) -> Result<(), AgentError> {
        let path = guest_path("path", path.as_ref())?;
        self.tell(&Request::Mkdir(message::Mkdir { path, mode, parents }), ANSWER_TIME)
    }

    /// Renames within one filesystem of the guest, replacing an existing target.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<(), AgentError> {
        let from = guest_path("from", from.as_ref())?;
        let to = guest_path("to", to.as_ref())?;
        let request = Request::Move(message::Move { from, to, no_replace: false });
        self.tell(&request, ANSWER_TIME)
    }

    /// Creates a symbolic link to `target`, replacing a file or link at `path`.
    pub fn symlink(
        &self,
        target: impl AsRef<Path>,
        path: impl AsRef<Path>,
    ) -> Result<(), AgentError> {
        let target = ByteBuf::from(target.as_ref().as_os_str().as_bytes());
        let path = guest_path("path", path.as_ref())?;
        let request = message::Symlink { path, target, owner: None };
        self.tell(&Request::Symlink(request), ANSWER_TIME)
    }

    fn tell(&self, request: &Request, patience: Duration) -> Result<(), AgentError> {
        match self.ask(request, Instant::now() + patience)? {
            Answer::Done {} => Ok(()),
            _ => Err(AgentError::WrongAnswer),
        }
    }
}

/// Refuses a path that the guest could not open.
pub(super) fn guest_path(field: &'static str, path: &Path) -> Result<ByteBuf, AgentError> {
    let bytes = path.as_os_str().as_bytes();
    let why = match bytes {
        [] => "is empty",
        bytes if bytes.contains(&0) => "contains a NUL byte",
        bytes if bytes.len() > MAX_PATH => "is longer than 4095 bytes",
        [b'/', ..] => return Ok(ByteBuf::from(bytes)),
        _ => "is not absolute: begin it with '/'",
    };
    Err(AgentError::InvalidRequest { field, why })
}

/// Returns the next bytes of a stream that only has output, or `None` at its successful end, whose
/// total must agree with `before`.
fn next_chunk(
    stream: &StreamRef,
    pace: &mut Pace,
    before: Option<u64>,
) -> Result<Option<Vec<u8>>, AgentError> {
    match next_event(stream, pace)? {
        Some(Event::Data(_, bytes)) => Ok(Some(bytes)),
        Some(Event::Done(Outcome::Ok(Answer::Transferred(total))))
            if before.is_none_or(|before| before == total) =>
        {
            Ok(None)
        }
        Some(Event::Done(Outcome::Ok(_))) => Err(AgentError::WrongAnswer),
        Some(Event::Done(Outcome::Failed(failure))) => Err(failure.into()),
        None => {
            stream.cancel();
            Err(AgentError::Overdue)
        }
    }
}

/// Waits for the next event of a stream that transfers bytes; returns `None` when the guest is too
/// slow.
pub(super) fn next_event(stream: &StreamRef, pace: &mut Pace) -> Result<Option<Event>, AgentError> {
    let bytes = |event: &Event| match event {
        Event::Data(_, bytes) => bytes.len() as u64,
        Event::Done(_) => 0,
    };
    pace.wait(|deadline| stream.next(deadline), bytes)
}

fn into_io(error: AgentError) -> io::Error {
    let kind = error.errno().map(|errno| io::Error::from_raw_os_error(errno).kind());
    match kind {
        // The standard library repeats an interrupted call. This one has failed for good.
        None | Some(io::ErrorKind::Interrupted) => io::Error::other(error),
        Some(kind) => io::Error::new(kind, error),
    }
}

/// A file of the guest that is being read.
pub struct FileReader {
    stream: StreamRef,
    metadata: Option<Metadata>,
    chunk: Vec<u8>,
    taken: usize,
    total: u64,
    pace: Pace,
    ended: bool,
}

impl FileReader {
    pub(super) fn begin(stream: StreamRef, started: Option<Started>) -> Result<Self, AgentError> {
        let metadata = started.and_then(|started| started.metadata);
        stream.expect_much();
        let (chunk, pace) = (Vec::new(), Pace::default());
        let mut reader = Self { stream, metadata, chunk, taken: 0, total: 0, pace, ended: false };
        if reader.metadata.is_none() {
            // The stream ended before it began: its outcome says why.
            reader.fill()?;
            return Err(AgentError::WrongAnswer);
        }
        Ok(reader)
    }

    /// Returns the metadata of the file when it was opened.
    pub fn metadata(&self) -> Option<&Metadata> {
        self.metadata.as_ref()
    }

    /// Gets the next chunk; returns false at the end of the file.
    fn fill(&mut self) -> Result<bool, AgentError> {
        if self.ended {
            return Ok(false);
        }
        self.taken = 0;
        let chunk = next_chunk(&self.stream, &mut self.pace, Some(self.total))?;
        self.chunk = chunk.unwrap_or_default();
        self.total += self.chunk.len() as u64;
        self.ended = self.chunk.is_empty();
        Ok(!self.ended)
    }
}

impl Read for FileReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.taken == self.chunk.len() && !self.fill().map_err(into_io)? {
            return Ok(0);
        }
        let count = buffer.len().min(self.chunk.len() - self.taken);
        buffer[..count].copy_from_slice(&self.chunk[self.taken..self.taken + count]);
        self.taken += count;
        Ok(count)
    }
}

impl Drop for FileReader {
    fn drop(&mut self) {
        self.stream.cancel();
    }
}

/// A file of the guest that is being written. If it is dropped without `finish`, the old file
/// stays.
pub struct FileWriter {
    stream: StreamRef,
    sent: u64,
    pace: Pace,
}

impl FileWriter {
    pub(super) fn begin(stream: StreamRef) -> Self {
        Self { stream, sent: 0, pace: Pace::default() }
    }

    /// Completes the file and returns the number of bytes written.
    pub fn finish(self) -> Result<u64, AgentError> {
        let sent = self.sent;
        self.finish_with(sent)
    }

    /// Completes the file when its length differs from the number of bytes sent.
    pub(super) fn finish_with(self, total: u64) -> Result<u64, AgentError> {
        self.stream.end_input()?;
        self.outcome(total)
    }

    pub(super) fn send_all(&mut self, mut bytes: &[u8]) -> Result<(), AgentError> {
        while !bytes.is_empty() {
            let count = self.send(bytes)?;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) -> Result<usize, AgentError> {
        let sent = |count: &usize| *count as u64;
        match self.pace.wait(|deadline| self.stream.send_input(bytes, deadline), sent)? {
            Some(0) => match self.outcome(self.sent) {
                // The agent reports success before all bytes were sent.
                Ok(_) => Err(AgentError::WrongAnswer),
                Err(e) => Err(e),
            },
            Some(count) => {
                self.sent += count as u64;
                Ok(count)
            }
            None => Err(AgentError::Overdue),
        }
    }

    fn outcome(&self, expected: u64) -> Result<u64, AgentError> {
        let deadline = Instant::now() + FINISH_TIME;
        loop {
            match self.stream.next(Some(deadline))? {
                Some(Event::Done(Outcome::Ok(Answer::Transferred(total)))) => {
                    return if total == expected {
                        Ok(total)
                    } else {
                        Err(AgentError::WrongAnswer)
                    };
                }
                Some(Event::Done(Outcome::Ok(_))) => return Err(AgentError::WrongAnswer),
                Some(Event::Done(Outcome::Failed(failure))) => return Err(failure.into()),
                Some(Event::Data(..)) => {}
                None => return Err(AgentError::Overdue),
            }
        }
    }
}

impl Write for FileWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() { Ok(0) } else { self.send(bytes).map_err(into_io) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        self.stream.cancel();
    }
}

/// A directory listing while its bytes arrive.
struct Listing {
    bytes: Vec<u8>,
    entries: Vec<DirEntry>,
    limit: u64,
    /// The bytes received, plus the memory that their entries take.
    cost: u64,
}

impl Listing {
    fn within(limit: u64) -> Self {
        Self { bytes: Vec::new(), entries: Vec::new(), limit, cost: 0 }
    }

    /// Charges bytes to the limit. Many small entries take more memory than bytes on the wire, so
    /// both are charged.
    fn charge(&mut self, bytes: usize) -> Result<(), AgentError> {
        self.cost = self.cost.saturating_add(bytes as u64);
        if self.cost > self.limit {
            let limit = self.limit;
            return Err(AgentError::TooLarge { what: "bytes in the directory's listing", limit });
        }
        Ok(())
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        const BAD: AgentError = AgentError::Lost(Lost::Protocol("a malformed listing"));
        self.charge(bytes.len())?;
        self.bytes.extend_from_slice(bytes);
        let (mut rest, mut taken) = (&self.bytes[..], 0);
        while let Some((len, after)) = rest.split_first_chunk() {
            let len = u32::from_le_bytes(*len) as usize;
            if len > MAX_ENTRY {
                return Err(BAD);
            }
            let Some((entry, after)) = after.split_at_checked(len) else { break };
            let entry: DirEntry = decode(entry).map_err(|_| BAD)?;
            if !is_component(&entry.name) {
                return Err(BAD);
            }
            self.entries.push(entry);
            taken += 1;
            rest = after;
        }
        let used = self.bytes.len() - rest.len();
        self.bytes.drain(..used);
        self.charge(taken * size_of::<DirEntry>())
    }

    fn finish(mut self) -> Result<Vec<DirEntry>, AgentError> {
        if !self.bytes.is_empty() {
            return Err(AgentError::Lost(Lost::Protocol("a listing that is cut short")));
        }
        self.entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(self.entries)
    }
}

/// Returns whether a name is safe to join to a path: one component that cannot leave the directory.
fn is_component(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && !name.contains(&b'/') && !name.contains(&0)
}
