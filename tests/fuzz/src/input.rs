//! Bytes as a source of choices; zeros when there are no more.
//!
//! Choices are bytes as they are, so that a fuzzer's small change to its input is a small change to
//! the run.

/// The rest of an input.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let len = N.min(self.0.len());
        let (taken, rest) = self.0.split_at(len);
        bytes[..len].copy_from_slice(taken);
        self.0 = rest;
        bytes
    }

    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.bytes())
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// One of the first `count` numbers.
    pub fn below(&mut self, count: u8) -> u8 {
        self.u8() % count
    }

    /// A number that is telling: small, around a power of two, or any.
    pub fn number(&mut self) -> u64 {
        match self.below(4) {
            0 | 1 => self.u8().into(),
            2 => (1u64 << self.below(64)).wrapping_add(u64::from(self.u8())).wrapping_sub(128),
            _ => self.u64(),
        }
    }
}
