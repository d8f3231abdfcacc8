//! The frames that carry the streams of one command between the outer machine and the nested host.
//!
//! Both ends are this program, so the format need not be compatible with older versions. A frame is
//! five bytes of header (payload length, kind) and the payload. Frames keep the streams separate
//! and binary-clean on a channel that never closes.

use std::io::{self, Read};

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The version of the format. A background host with another version is not used.
pub const VERSION: u32 = 2;

/// The maximum length of a payload; a longer one is an error of the peer. Arguments and environment
/// are in one frame.
pub const MAX_PAYLOAD: usize = 2 << 20;

/// The maximum length of a data frame, small so that a signal does not wait behind it.
pub const DATA_CHUNK: usize = 32 << 10;

/// How many bytes of stdin may be sent before the command has read them.
pub const STDIN_WINDOW: usize = 256 << 10;

const HEADER: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// To the host: a [`Request`], which starts a command.
    Open = 1,
    /// To the host: bytes for the command's stdin.
    Stdin,
    /// To the host: the end of stdin.
    StdinEnd,
    /// To the host: one byte, a signal for the command's process group.
    Signal,
    /// To the host: one byte, 1 or 2: the client no longer reads this output.
    CloseOutput,
    /// To the host: the client is gone, and the command is ended.
    HangUp,
    /// To the host: rows and columns of the client's terminal, two bytes each.
    Resize,
    /// From the host: bytes of the command's stdout.
    Stdout,
    /// From the host: bytes of the command's stderr.
    Stderr,
    /// From the host: four bytes, how much stdin the command has taken since the last credit.
    Credit,
    /// From the host: an [`Outcome`], the last frame of a command.
    Exit,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        use Kind::*;
        [Open, Stdin, StdinEnd, Signal, CloseOutput, HangUp, Resize, Stdout, Stderr, Credit, Exit]
            .into_iter()
            .find(|&kind| kind as u8 == byte)
    }
}

/// The command to run. Arguments and paths are bytes, because they need not be UTF-8.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    pub cwd: Vec<u8>,
    /// The time of the outer machine. The clock of a host that was paused is late.
    pub time_since_epoch: Duration,
    /// Rows and columns of the client's terminal, if the command gets a terminal.
    pub terminal: Option<(u16, u16)>,
}

/// How the command ended, with the exit code that a shell would report.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    pub code: u8,
    /// Why the command could not be started.
    pub message: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: Kind,
    pub payload: Vec<u8>,
}

/// Appends one frame to `out`.
pub fn encode(out: &mut Vec<u8>, kind: Kind, payload: &[u8]) {
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.push(kind as u8);
    out.extend_from_slice(payload);
}

/// Removes the first complete frame from `buffer` and returns it. Returns `None` if the frame is
/// incomplete. Fails if the header is invalid.
pub fn decode(buffer: &mut Vec<u8>) -> io::Result<Option<Frame>> {
    let Some(header) = buffer.first_chunk::<HEADER>() else { return Ok(None) };
    let (len, kind) = parse_header(header)?;
    if buffer.len() < HEADER + len {
        return Ok(None);
    }
    let payload = buffer[HEADER..HEADER + len].to_vec();
    buffer.drain(..HEADER + len);
    Ok(Some(Frame { kind, payload }))
}

/// Waits for one frame and returns it, or `None` at the end of the stream.
pub fn read(from: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut header = [0; HEADER];
    match from.read_exact(&mut header) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e),
    }
    let (len, kind) = parse_header(&header)?;
    let mut payload = vec![0; len];
    from.read_exact(&mut payload)?;
    Ok(Some(Frame { kind, payload }))
}

fn parse_header(header: &[u8; HEADER]) -> io::Result<(usize, Kind)> {
    let [a, b, c, d, kind] = *header;
    let len = u32::from_le_bytes([a, b, c, d]) as usize;
    match Kind::from_byte(kind) {
        Some(kind) if len <= MAX_PAYLOAD => Ok((len, kind)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "broken frame")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_half_a_frame_waits_for_the_rest() {
        let mut wire = Vec::new();
        encode(&mut wire, Kind::Stdout, b"hello");
        let mut buffer = wire[..7].to_vec();
        assert_eq!(decode(&mut buffer).unwrap(), None);
        buffer.extend_from_slice(&wire[7..]);
        let frame = decode(&mut buffer).unwrap();
        assert_eq!(frame, Some(Frame { kind: Kind::Stdout, payload: b"hello".to_vec() }));
        assert!(buffer.is_empty());
    }

    #[test]
    fn decode_oversized_length_is_refused() {
        let mut buffer = u32::MAX.to_le_bytes().to_vec();
        buffer.push(Kind::Stdin as u8);
        assert_eq!(decode(&mut buffer).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn read_at_the_end_of_the_stream_is_none() {
        assert_eq!(read(&mut io::empty()).unwrap(), None);
    }

    #[test]
    fn kinds_survive_their_byte() {
        for byte in 1..=11 {
            assert_eq!(Kind::from_byte(byte).map(|kind| kind as u8), Some(byte));
        }
        assert_eq!(Kind::from_byte(0), None);
        assert_eq!(Kind::from_byte(12), None);
    }
}
