//! Collected output: the first bytes, the last bytes, and the total number.
//!
//! However much a guest writes, what is kept stays within the cap.

use pvmm_guest_agent::message::OutputCount;
use pvmm_guest_agent::output::Tail;

use super::{ExitStatus, OutputCap};

/// The collected bytes of one output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// The head, directly followed by the tail.
    pub bytes: Vec<u8>,
    /// The number of bytes the process wrote.
    pub total: u64,
    /// The number of bytes missing between head and tail.
    pub dropped: u64,
}

impl Captured {
    /// Returns whether bytes are missing.
    pub fn truncated(&self) -> bool {
        self.dropped > 0
    }
}

/// The result of `exec`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How the process ended.
    pub status: ExitStatus,
    /// The standard output.
    pub stdout: Captured,
    /// The standard error.
    pub stderr: Captured,
}

/// Keeps the head and the tail of an output.
pub(super) struct Capture {
    head: Vec<u8>,
    cap: usize,
    tail: Tail,
    received: u64,
}

impl Capture {
    pub(super) fn new(cap: OutputCap) -> Self {
        Self { head: Vec::new(), cap: cap.head, tail: Tail::new(cap.tail), received: 0 }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.received += bytes.len() as u64;
        let (head, rest) = bytes.split_at(bytes.len().min(self.cap - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.push(rest);
    }

    pub(super) fn finish(self, count: OutputCount) -> Captured {
        // The agent's count is untrusted and may be any number.
        let dropped = count.dropped.saturating_add(self.tail.forgotten());
        let mut bytes = self.head;
        bytes.extend_from_slice(&self.tail.into_bytes());
        // The total is what was received plus what the agent reports as dropped; its own total is
        // ignored.
        Captured { bytes, total: self.received.saturating_add(count.dropped), dropped }
    }
}
