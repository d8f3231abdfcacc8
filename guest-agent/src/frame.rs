//! Frames: a fixed header of twelve bytes, then a payload whose size the header bounds.
//!
//! All checks that need no state are made here, before a byte of payload is stored.

use crate::limits::{MAX_CONTROL, MAX_DATA, MAX_SMALL};

/// The length of a frame's header in bytes.
pub const HEADER_LEN: usize = 12;
/// Flag of `Data`: nothing follows on this channel. Of `Credit`: the receiver accepts no more.
pub const END: u8 = 0x80;
const CHANNEL_MASK: u8 = 0x03;
/// Kinds from here on are extensions, which a peer that does not know them skips.
const FIRST_EXTENSION: u8 = 0x80;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Client: the first frame of a connection.
    Hello,
    /// Agent: the answer to `Hello`, and the one frame of a ready dial.
    Welcome,
    /// Client: begins a stream with a request.
    Open,
    /// Agent: the request is under way.
    Started,
    /// Both: bytes of a channel.
    Data,
    /// Both: more bytes may be sent on a channel.
    Credit,
    /// Client: a signal for the stream's processes.
    Signal,
    /// Client: end the stream's work now.
    Cancel,
    /// Agent: the stream's outcome, its last frame.
    Done,
    /// Both: why the connection is being closed.
    Goodbye,
    /// Client: the new size of the stream's terminal.
    Resize,
    /// A kind from a later version that may be skipped.
    Extension(u8),
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Open,
            4 => Self::Started,
            5 => Self::Data,
            6 => Self::Credit,
            7 => Self::Signal,
            8 => Self::Cancel,
            9 => Self::Done,
            10 => Self::Goodbye,
            11 => Self::Resize,
            FIRST_EXTENSION.. => Self::Extension(byte),
            _ => return None,
        })
    }

    fn byte(self) -> u8 {
        match self {
            Self::Hello => 1,
            Self::Welcome => 2,
            Self::Open => 3,
            Self::Started => 4,
            Self::Data => 5,
            Self::Credit => 6,
            Self::Signal => 7,
            Self::Cancel => 8,
            Self::Done => 9,
            Self::Goodbye => 10,
            Self::Resize => 11,
            Self::Extension(byte) => byte,
        }
    }

    fn belongs_to_connection(self) -> bool {
        matches!(self, Self::Hello | Self::Welcome | Self::Goodbye)
    }

    /// The payload sizes this kind allows.
    pub fn payload_bounds(self) -> (usize, usize) {
        match self {
            Self::Data => (0, MAX_DATA),
            Self::Credit => (4, 4),
            Self::Cancel => (0, 0),
            Self::Open | Self::Done => (1, MAX_CONTROL),
            Self::Extension(_) => (0, MAX_SMALL),
            _ => (1, MAX_SMALL),
        }
    }
}

/// The byte channel of a stream that a `Data` or `Credit` frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    /// Client to agent: standard input, or the contents of a file being written.
    Input,
    /// Agent to client: standard output, a file being read, or directory entries.
    Output,
    /// Agent to client: standard error.
    Error,
}

impl Channel {
    /// The channel's bits in a frame's flags.
    pub fn bits(self) -> u8 {
        match self {
            Self::Input => 0,
            Self::Output => 1,
            Self::Error => 2,
        }
    }

    fn from_flags(flags: u8) -> Option<Self> {
        Some(match flags & CHANNEL_MASK {
            0 => Self::Input,
            1 => Self::Output,
            2 => Self::Error,
            _ => return None,
        })
    }
}

/// Errors of a frame. Each of them ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("frame kind {0} is unknown")]
    UnknownKind(u8),
    #[error("flags {flags:#04x} are not defined for frame kind {kind:?}")]
    UnknownFlags { kind: Kind, flags: u8 },
    #[error("reserved header bytes are {0:#06x}, not zero")]
    Reserved(u16),
    #[error("a payload of {len} bytes is not allowed for frame kind {kind:?}")]
    BadLength { kind: Kind, len: u32 },
    #[error("frame kind {kind:?} is not allowed on stream {stream}")]
    BadStream { kind: Kind, stream: u32 },
    #[error("a data frame is empty and does not end its channel")]
    EmptyData,
}

/// A checked frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub len: u32,
    pub stream: u32,
    pub kind: Kind,
    pub flags: u8,
}

impl Header {
    /// Builds the header of a frame to be sent.
    pub fn new(kind: Kind, stream: u32, flags: u8, len: usize) -> Self {
        debug_assert!(len <= kind.payload_bounds().1);
        Self { len: len as u32, stream, kind, flags }
    }

    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..4].copy_from_slice(&self.len.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.stream.to_le_bytes());
        bytes[8] = self.kind.byte();
        bytes[9] = self.flags;
        bytes
    }

    /// Decodes and checks a header.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Self, FrameError> {
        let len = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let stream = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let reserved = u16::from_le_bytes([bytes[10], bytes[11]]);
        let kind = Kind::from_byte(bytes[8]).ok_or(FrameError::UnknownKind(bytes[8]))?;
        let header = Self { len, stream, kind, flags: bytes[9] };
        header.check(reserved)?;
        Ok(header)
    }

    fn check(&self, reserved: u16) -> Result<(), FrameError> {
        let Self { len, stream, kind, flags } = *self;
        let (least, most) = kind.payload_bounds();
        if (len as usize) < least || len as usize > most {
            return Err(FrameError::BadLength { kind, len });
        }
        if matches!(kind, Kind::Extension(_)) {
            return Ok(());
        }
        if reserved != 0 {
            return Err(FrameError::Reserved(reserved));
        }
        if kind.belongs_to_connection() != (stream == 0) {
            return Err(FrameError::BadStream { kind, stream });
        }
        let known = match kind {
            Kind::Data | Kind::Credit => {
                flags & !(END | CHANNEL_MASK) == 0 && Channel::from_flags(flags).is_some()
            }
            _ => flags == 0,
        };
        if !known {
            return Err(FrameError::UnknownFlags { kind, flags });
        }
        if kind == Kind::Data && len == 0 && flags & END == 0 {
            return Err(FrameError::EmptyData);
        }
        Ok(())
    }

    /// Returns the channel of a `Data` or `Credit` frame.
    pub fn channel(&self) -> Channel {
        // `check` has refused the one value that is no channel.
        Channel::from_flags(self.flags).unwrap_or(Channel::Input)
    }

    /// Returns whether the END flag is set.
    pub fn ends(&self) -> bool {
        self.flags & END != 0
    }
}

/// One whole frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub header: Header,
    pub payload: &'a [u8],
}

impl Frame<'_> {
    /// Returns the bytes granted by a `Credit` frame.
    pub fn credit(&self) -> u32 {
        self.payload.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }
}

/// Encodes a `Credit` frame.
pub fn credit_frame(stream: u32, channel: Channel, bytes: u32, end: bool) -> [u8; HEADER_LEN + 4] {
    let flags = channel.bits() | if end { END } else { 0 };
    let mut frame = [0; HEADER_LEN + 4];
    frame[..HEADER_LEN].copy_from_slice(&Header::new(Kind::Credit, stream, flags, 4).to_bytes());
    frame[HEADER_LEN..].copy_from_slice(&bytes.to_le_bytes());
    frame
}

/// Splits a byte stream into frames.
///
/// Frames that lie whole in the input are borrowed from it; only a frame cut by the end of the
/// input is copied, and the copy grows with the received bytes, not with the announced length.
#[derive(Debug, Default)]
pub struct Decoder {
    stash: Vec<u8>,
    /// The stash was lent out as a frame by the last call; the next call clears it.
    lent: bool,
}

impl Decoder {
    /// Takes the next frame off the front of `input`. Returns `None` when more bytes are needed;
    /// `input` is then empty.
    pub fn next<'f, 'i: 'f>(
        &'f mut self,
        input: &mut &'i [u8],
    ) -> Result<Option<Frame<'f>>, FrameError> {
        if self.lent {
            self.stash.clear();
            self.stash.shrink_to(HEADER_LEN + MAX_DATA);
            self.lent = false;
        }
        if self.stash.is_empty() {
            if let Some((frame, rest)) = split(input)? {
                *input = rest;
                return Ok(Some(frame));
            }
            self.stash.extend_from_slice(input);
            *input = &[];
            return Ok(None);
        }
        self.fill(HEADER_LEN, input);
        let Some(header) = self.stash.first_chunk() else { return Ok(None) };
        let header = Header::parse(header)?;
        let whole = HEADER_LEN + header.len as usize;
        self.fill(whole, input);
        if self.stash.len() < whole {
            return Ok(None);
        }
        self.lent = true;
        Ok(Some(Frame { header, payload: &self.stash[HEADER_LEN..whole] }))
    }

    /// Returns whether a frame is partly received.
    pub fn in_frame(&self) -> bool {
        !self.lent && !self.stash.is_empty()
    }

    /// Returns how many bytes a partly received frame still needs, as far as is known.
    pub fn missing(&self) -> usize {
        if !self.in_frame() {
            return 0;
        }
        // A header is used only once all of it was checked.
        let header = self.stash.first_chunk().and_then(|header| Header::parse(header).ok());
        let whole = HEADER_LEN + header.map_or(0, |header| header.len as usize);
        whole.saturating_sub(self.stash.len())
    }

    /// Returns the bytes held for a partly received frame.
    pub fn held(&self) -> usize {
        if self.lent { 0 } else { self.stash.len() }
    }

    fn fill(&mut self, target: usize, input: &mut &[u8]) {
        let wanted = target.saturating_sub(self.stash.len()).min(input.len());
        let (taken, rest) = input.split_at(wanted);
        self.stash.extend_from_slice(taken);
        *input = rest;
    }
}

fn split(input: &[u8]) -> Result<Option<(Frame<'_>, &[u8])>, FrameError> {
    let Some((header, rest)) = input.split_first_chunk() else { return Ok(None) };
    let header = Header::parse(header)?;
    let len = header.len as usize;
    if rest.len() < len {
        return Ok(None);
    }
    let (payload, rest) = rest.split_at(len);
    Ok(Some((Frame { header, payload }, rest)))
}
