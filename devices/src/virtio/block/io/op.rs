//! One operation on a disk, and the memory that it reads or fills.
//!
//! An operation owns its memory, so that the kernel may continue with it after every other owner
//! has released it.

use std::io;
use std::ops::Range;

use vm_memory::{GuestMemory as _, Permissions, VolatileSlice};

use super::super::super::chain::Segment;
use super::Clear;
use crate::GuestMemory;

/// One operation on storage.
#[derive(Debug)]
pub enum Op {
    Read { into: Target, offset: u64 },
    Write { from: Target, offset: u64 },
    Sync,
    Clear { how: Clear, offset: u64, len: u64 },
}

impl Op {
    /// Returns the bytes of the storage that the operation may change, if any.
    pub fn changed(&self) -> Option<Range<u64>> {
        let (offset, len) = match self {
            Self::Read { .. } | Self::Sync => return None,
            Self::Write { from, offset } => (*offset, from.len()),
            Self::Clear { offset, len, .. } => (*offset, *len),
        };
        Some(offset..offset.saturating_add(len))
    }
}

/// An operation that has completed, and how many bytes it moved.
#[derive(Debug)]
pub struct Finished {
    pub token: u16,
    pub op: Op,
    pub result: io::Result<usize>,
}

/// The memory of a transfer.
#[derive(Debug)]
pub enum Target {
    /// Buffers of the guest, which lie in its memory.
    Guest { memory: GuestMemory, segments: Vec<Segment> },
    /// A buffer of the host, for transfers that cannot use the guest's buffers.
    Host(Bounce),
}

impl Target {
    fn len(&self) -> u64 {
        match self {
            Self::Guest { segments, .. } => segments.iter().map(|part| u64::from(part.len)).sum(),
            Self::Host(bounce) => bounce.len as u64,
        }
    }

    /// Returns the memory at host addresses.
    pub fn slices(&mut self) -> io::Result<Vec<VolatileSlice<'_>>> {
        match self {
            Self::Guest { memory, segments } => guest_slices(memory, segments),
            Self::Host(bounce) => Ok(vec![VolatileSlice::from(bounce.bytes_mut())]),
        }
    }
}

/// Returns guest buffers at host addresses.
pub fn guest_slices<'a>(
    memory: &'a GuestMemory,
    segments: &[Segment],
) -> io::Result<Vec<VolatileSlice<'a>>> {
    let mut slices = Vec::with_capacity(segments.len());
    for part in segments {
        let found = memory.get_slices(part.address, part.len as usize, Permissions::ReadWrite);
        for slice in found.map_err(io::Error::other)? {
            slices.push(slice.map_err(io::Error::other)?);
        }
    }
    Ok(slices)
}

/// A heap buffer with the alignment that direct I/O requires.
#[derive(Debug)]
pub struct Bounce {
    storage: Vec<u8>,
    start: usize,
    len: usize,
}

impl Bounce {
    /// Allocates `len` zeros at an address that is a multiple of `align`, a power of two.
    pub fn new(len: usize, align: usize) -> Self {
        let storage = vec![0; len + align];
        let start = storage.as_ptr().align_offset(align).min(align);
        Self { storage, start, len }
    }

    pub fn bytes(&self) -> &[u8] {
        self.storage.get(self.start..self.start + self.len).unwrap_or_default()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.storage.get_mut(self.start..self.start + self.len).unwrap_or_default()
    }
}
