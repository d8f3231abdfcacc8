//! A descriptor chain, read once from guest memory and checked before anything uses it.
//!
//! The guest may rewrite its descriptors at any time. The worker uses only the copy made here, so a
//! second read can never disagree with the first.

use vm_memory::{Bytes, GuestAddress, GuestMemory as _, Permissions};

use crate::GuestMemory;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const DESCRIPTOR_SIZE: u64 = 16;
/// The maximum length of a chain and of an indirect table.
pub const MAX_DESCRIPTORS: u16 = 1024;

/// Why a descriptor chain is malformed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ChainFault {
    #[error("descriptor index {index} is outside a table of {size}")]
    Index { index: u16, size: u16 },
    #[error("chain is longer than its table or loops")]
    TooLong,
    #[error("descriptor table cannot be read")]
    Table,
    #[error("indirect descriptor is nested, has a successor or a bad length {len}")]
    Indirect { len: u32 },
    #[error("buffer {address:#x}+{len:#x} is outside memory")]
    Buffer { address: u64, len: u32 },
    #[error("readable buffer follows a writable one")]
    Order,
}

/// One buffer of a descriptor chain. It lies in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub address: GuestAddress,
    pub len: u32,
}

/// A descriptor chain read from guest memory: buffers that the device reads, then buffers that it
/// writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    // Index of the first writable segment.
    writable_from: usize,
    // Position in the avail ring.
    position: u16,
}

impl Chain {
    /// Returns the descriptor index that identifies this chain to the driver.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Returns the value of the avail ring's index at which this chain was found.
    pub(super) fn position(&self) -> u16 {
        self.position
    }

    pub(super) fn at(mut self, position: u16) -> Self {
        self.position = position;
        self
    }

    /// Returns the buffers that the driver filled, in order.
    pub fn readable(&self) -> &[Segment] {
        &self.segments[..self.writable_from]
    }

    /// Returns the buffers that the device may fill, in order.
    pub fn writable(&self) -> &[Segment] {
        &self.segments[self.writable_from..]
    }
}

/// Returns the sum of the lengths. It cannot overflow, because a chain has at most 1,024 segments.
pub fn total_len(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// Copies guest bytes from `offset` into `buf`. Returns the number of bytes copied, less than
/// `buf.len()` if the segments end first.
pub fn read_at(memory: &GuestMemory, segments: &[Segment], offset: u64, buf: &mut [u8]) -> usize {
    let mut done = 0;
    for part in slice(segments, offset, buf.len() as u64) {
        let len = part.len as usize;
        // The range was checked when the chain was walked, and guest memory never shrinks.
        if memory.read_slice(&mut buf[done..done + len], part.address).is_err() {
            break;
        }
        done += len;
    }
    done
}

/// Copies `buf` into guest buffers from `offset`. Returns how many bytes fitted.
pub fn write_at(memory: &GuestMemory, segments: &[Segment], offset: u64, buf: &[u8]) -> usize {
    let mut done = 0;
    for part in slice(segments, offset, buf.len() as u64) {
        let len = part.len as usize;
        if memory.write_slice(&buf[done..done + len], part.address).is_err() {
            break;
        }
        done += len;
    }
    done
}

/// Returns the parts of `segments` that cover `len` bytes from `offset`, or fewer where the
/// segments end.
pub fn slice(segments: &[Segment], offset: u64, len: u64) -> impl Iterator<Item = Segment> {
    let (mut skip, mut left) = (offset, len);
    segments.iter().filter_map(move |segment| {
        let skipped = skip.min(u64::from(segment.len));
        skip -= skipped;
        let taken = left.min(u64::from(segment.len) - skipped);
        left -= taken;
        let address = GuestAddress(segment.address.0 + skipped);
        (taken > 0).then_some(Segment { address, len: taken as u32 })
    })
}

/// Reads and checks the descriptor chain that starts at `head`.
pub(super) fn walk(
    memory: &GuestMemory,
    table: GuestAddress,
    size: u16,
    head: u16,
) -> Result<Chain, ChainFault> {
    let mut chain = Chain { head, segments: Vec::new(), writable_from: 0, position: 0 };
    let mut seen_writable = false;
    let (mut table, mut size, mut index, mut indirect) = (table, size, head, false);
    let mut steps = 0;
    loop {
        if index >= size {
            return Err(ChainFault::Index { index, size });
        }
        steps += 1;
        if steps > size || chain.segments.len() >= usize::from(MAX_DESCRIPTORS) {
            return Err(ChainFault::TooLong);
        }
        let descriptor = read_descriptor(memory, table, index)?;
        if descriptor.flags & INDIRECT != 0 {
            let len = descriptor.len;
            let entries = u64::from(len) / DESCRIPTOR_SIZE;
            let whole = entries * DESCRIPTOR_SIZE == u64::from(len);
            // Direct descriptors may precede an indirect one; nothing may follow it or nest in it.
            let last = !indirect && descriptor.flags & NEXT == 0;
            if !last || !whole || entries == 0 || entries > u64::from(MAX_DESCRIPTORS) {
                return Err(ChainFault::Indirect { len });
            }
            (table, size, index, indirect) = (descriptor.address, entries as u16, 0, true);
            steps = 0;
            continue;
        }
        let writable = descriptor.flags & WRITE != 0;
        if seen_writable && !writable {
            return Err(ChainFault::Order);
        }
        seen_writable |= writable;
        let (address, len) = (descriptor.address, descriptor.len);
        if !memory.check_range(address, len as usize, Permissions::ReadWrite) {
            return Err(ChainFault::Buffer { address: address.0, len });
        }
        if !writable {
            chain.writable_from += 1;
        }
        chain.segments.push(Segment { address, len });
        if descriptor.flags & NEXT == 0 {
            return Ok(chain);
        }
        index = descriptor.next;
    }
}

struct Descriptor {
    address: GuestAddress,
    len: u32,
    flags: u16,
    next: u16,
}

fn read_descriptor(
    memory: &GuestMemory,
    table: GuestAddress,
    index: u16,
) -> Result<Descriptor, ChainFault> {
    let offset = u64::from(index) * DESCRIPTOR_SIZE;
    let address = table.0.checked_add(offset).ok_or(ChainFault::Table)?;
    let mut raw = [0; DESCRIPTOR_SIZE as usize];
    memory.read_slice(&mut raw, GuestAddress(address)).map_err(|_| ChainFault::Table)?;
    let raw = u128::from_le_bytes(raw);
    Ok(Descriptor {
        address: GuestAddress(raw as u64),
        len: (raw >> 64) as u32,
        flags: (raw >> 96) as u16,
        next: (raw >> 112) as u16,
    })
}
