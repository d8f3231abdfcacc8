//! Identifiers for what the event loop waits on, as the 64 bits that epoll returns.
//!
//! Numbers are never reused, so an event that comes too late finds nothing.

/// The subject of an event or deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Token {
    Listener,
    /// The listener of the control port.
    Control,
    Signals,
    Workers,
    Connection(u64),
    Input(u64),
    Output(u64),
    Error(u64),
    /// The job as a whole; only for deadlines.
    Job(u64),
}

impl Token {
    pub fn bits(self) -> u64 {
        match self {
            Self::Listener => 0,
            Self::Control => 1 << 3,
            Self::Signals => 1,
            Self::Workers => 2,
            Self::Connection(id) => id << 3 | 3,
            Self::Input(id) => id << 3 | 4,
            Self::Output(id) => id << 3 | 5,
            Self::Error(id) => id << 3 | 6,
            Self::Job(id) => id << 3 | 7,
        }
    }

    pub fn from_bits(bits: u64) -> Self {
        let id = bits >> 3;
        match bits & 7 {
            0 if id == 1 => Self::Control,
            0 => Self::Listener,
            1 => Self::Signals,
            2 => Self::Workers,
            3 => Self::Connection(id),
            4 => Self::Input(id),
            5 => Self::Output(id),
            6 => Self::Error(id),
            _ => Self::Job(id),
        }
    }
}
