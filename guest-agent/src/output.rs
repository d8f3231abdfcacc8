//! The tail of an output whose middle is dropped: a ring that keeps the last bytes.
//!
//! Both ends cap output with it, the agent before the wire and the host after it.

/// Keeps the last `cap` bytes that are pushed.
#[derive(Debug)]
pub struct Tail {
    ring: Vec<u8>,
    next: usize,
    cap: usize,
    pushed: u64,
}

impl Tail {
    /// Makes an empty tail; memory is allocated as bytes come.
    pub fn new(cap: usize) -> Self {
        Self { ring: Vec::new(), next: 0, cap, pushed: 0 }
    }

    /// Appends bytes, dropping the oldest.
    pub fn push(&mut self, bytes: &[u8]) {
        self.pushed += bytes.len() as u64;
        let mut bytes = &bytes[bytes.len().saturating_sub(self.cap)..];
        let room = (self.cap - self.ring.len()).min(bytes.len());
        self.ring.extend_from_slice(&bytes[..room]);
        bytes = &bytes[room..];
        while !bytes.is_empty() {
            let run = (self.cap - self.next).min(bytes.len());
            self.ring[self.next..self.next + run].copy_from_slice(&bytes[..run]);
            self.next = (self.next + run) % self.cap;
            bytes = &bytes[run..];
        }
    }

    /// Returns the number of bytes that were pushed and dropped.
    pub fn forgotten(&self) -> u64 {
        self.pushed - self.ring.len() as u64
    }

    /// Returns the bytes held, oldest first.
    pub fn into_bytes(mut self) -> Vec<u8> {
        self.ring.rotate_left(self.next);
        self.ring
    }
}
