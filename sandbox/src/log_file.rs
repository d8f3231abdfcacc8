//! Log files of bounded size for a VM's console and the output of its main command.
//!
//! A guest can print without end, so a full file is renamed to become the older half and a new one
//! is started; readers follow from one to the other.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The largest size of one half: a VM keeps at most twice this of each log.
pub const HALF_CAP: u64 = 16 << 20;
/// The header of a piece of output: the stream, and the length of the piece.
const HEADER: usize = 5;
/// The longest piece; a larger length means that the file is damaged.
const MAX_PIECE: usize = 1 << 20;

/// The stream that a piece of output was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// The writer of a log.
pub struct LogWriter {
    path: PathBuf,
    file: File,
    length: u64,
    cap: u64,
}

fn older(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

impl LogWriter {
    /// Creates an empty log at `path`, which must end in `.log`.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::with_cap(path, HALF_CAP)
    }

    fn with_cap(path: &Path, cap: u64) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), file: new_file(path)?, length: 0, cap })
    }

    /// Appends bytes, all to one file.
    pub fn append(&mut self, data: &[u8]) -> io::Result<()> {
        if self.length > 0 && self.length + data.len() as u64 > self.cap {
            fs::rename(&self.path, older(&self.path))?;
            self.file = new_file(&self.path)?;
            self.length = 0;
        }
        self.file.write_all(data)?;
        self.length += data.len() as u64;
        Ok(())
    }

    /// Appends a piece of a command's output.
    pub fn append_piece(&mut self, stream: Stream, data: &[u8]) -> io::Result<()> {
        for data in data.chunks(MAX_PIECE) {
            let mut piece = Vec::with_capacity(HEADER + data.len());
            piece.push(stream as u8);
            piece.extend_from_slice(&(data.len() as u32).to_le_bytes());
            piece.extend_from_slice(data);
            self.append(&piece)?;
        }
        Ok(())
    }
}

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(path)
}

/// Opens a log that another process has written, which may have put anything in its place.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// The reader of a log, older half first, which may still grow.
pub struct LogReader {
    path: PathBuf,
    file: Option<File>,
}

impl LogReader {
    pub fn open(path: &Path) -> io::Result<Self> {
        let half = match open(&older(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => open(path),
            half => half,
        };
        match half {
            Ok(file) => Ok(Self { path: path.to_owned(), file: Some(file) }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Self { path: path.to_owned(), file: None })
            }
            Err(error) => Err(error),
        }
    }

    /// Moves on to the newer half; returns false if there is none.
    fn advance(&mut self) -> io::Result<bool> {
        let newest = match open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            newest => newest?,
        };
        if let Some(file) = &self.file
            && file.metadata()?.ino() == newest.metadata()?.ino()
        {
            return Ok(false);
        }
        self.file = Some(newest);
        Ok(true)
    }
}

/// Zero bytes read mean that there is no more for now.
impl Read for LogReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(file) = &mut self.file {
                let count = file.read(buffer)?;
                if count > 0 {
                    return Ok(count);
                }
            }
            if !self.advance()? {
                return Ok(0);
            }
        }
    }
}

/// Splits a log into its pieces as it is read; a piece may arrive in parts.
#[derive(Default)]
pub struct Pieces {
    pending: Vec<u8>,
}

impl Pieces {
    /// Takes more bytes and passes every complete piece to `each`.
    pub fn feed(
        &mut self,
        data: &[u8],
        mut each: impl FnMut(Stream, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.pending.extend_from_slice(data);
        let mut rest = self.pending.as_slice();
        while let Some((header, body)) = rest.split_first_chunk::<HEADER>() {
            let length = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
            let stream = match header[0] {
                _ if length > MAX_PIECE => return Err(io::ErrorKind::InvalidData.into()),
                0 => Stream::Stdout,
                1 => Stream::Stderr,
                _ => return Err(io::ErrorKind::InvalidData.into()),
            };
            let Some((piece, after)) = body.split_at_checked(length) else { break };
            each(stream, piece)?;
            rest = after;
        }
        self.pending = rest.to_vec();
        Ok(())
    }
}

/// Returns the last lines of a log, for an error message.
pub fn tail(path: &Path, lines: usize) -> String {
    const TAIL: usize = 16 << 10;
    let mut text = Vec::new();
    if let Ok(reader) = LogReader::open(path) {
        // The log is bounded; the limit here protects against a file of another process.
        let _ = reader.take(4 * HALF_CAP).read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(TAIL)..]).into_owned();
    let kept: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    kept[kept.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        (dir, path)
    }

    fn read(reader: &mut LogReader) -> String {
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn writer_past_the_cap_keeps_the_newest_part() {
        let (_dir, path) = log();
        let mut writer = LogWriter::with_cap(&path, 10).unwrap();
        for word in ["aaaa ", "bbbb ", "cccc ", "dddd ", "eeee "] {
            writer.append(word.as_bytes()).unwrap();
        }
        assert_eq!(read(&mut LogReader::open(&path).unwrap()), "cccc dddd eeee ");
    }

    #[test]
    fn reader_of_growing_log_follows_it_into_the_next_half() {
        let (_dir, path) = log();
        assert_eq!(read(&mut LogReader::open(&path).unwrap()), "");
        let mut writer = LogWriter::with_cap(&path, 10).unwrap();
        let mut reader = LogReader::open(&path).unwrap();
        writer.append(b"one ").unwrap();
        assert_eq!(read(&mut reader), "one ");
        writer.append(b"two ").unwrap();
        writer.append(b"three ").unwrap();
        assert_eq!(read(&mut reader), "two three ");
    }

    #[test]
    fn pieces_fed_in_parts_come_out_whole_and_in_order() {
        let (_dir, path) = log();
        let mut writer = LogWriter::create(&path).unwrap();
        writer.append_piece(Stream::Stdout, b"out").unwrap();
        writer.append_piece(Stream::Stderr, b"err").unwrap();
        let (mut pieces, mut seen) = (Pieces::default(), Vec::new());
        for byte in fs::read(&path).unwrap() {
            let each = |stream, data: &[u8]| {
                seen.push((stream, data.to_vec()));
                Ok(())
            };
            pieces.feed(&[byte], each).unwrap();
        }
        assert_eq!(seen, [(Stream::Stdout, b"out".to_vec()), (Stream::Stderr, b"err".to_vec())]);
    }

    #[test]
    fn pieces_of_damaged_log_are_refused() {
        for header in [[9, 0, 0, 0, 0], [0, 0xff, 0xff, 0xff, 0xff]] {
            assert!(Pieces::default().feed(&header, |_, _| Ok(())).is_err());
        }
    }

    #[test]
    fn tail_of_long_log_is_its_last_lines() {
        let (_dir, path) = log();
        let mut writer = LogWriter::create(&path).unwrap();
        for n in 0..10_000 {
            writer.append(format!("line {n}\r\n").as_bytes()).unwrap();
        }
        assert_eq!(tail(&path, 2), "line 9998\nline 9999");
        assert_eq!(tail(Path::new("/nonexistent.log"), 2), "");
    }
}
