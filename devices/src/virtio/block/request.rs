//! One request: from the parsed chain through its operations to a status.
//!
//! This is separate from the worker, which handles the rings. Everything is checked before the
//! first operation, so a refused write changes nothing.

use std::io;

use super::super::chain::{self, Chain, Segment};
use super::config::{CacheMode, DISCARD_SECTORS_MAX, RANGES_MAX, ZERO_SECTORS_MAX};
use super::device::{Block, Facts};
use super::io::{Bounce, Clear, Op, Target, guest_slices};
use super::wire::{self, HEADER_LEN, Header, Kind, RANGE_LEN, Range, RangeLimits, Status};
use crate::GuestMemory;
use crate::rate_limiter::Cost;

// Bytes written at once on a file system that cannot zero a range by itself.
const ZEROES_LEN: u64 = 64 << 10;
// Bytes copied at once where direct I/O cannot use the guest's buffers.
const BOUNCE_LEN: u64 = 256 << 10;

/// A request in progress.
#[derive(Debug)]
pub struct BlockRequest {
    chain: Chain,
    // Bytes of the driver's writable buffers before the status.
    room: u64,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Refused(Status),
    Transfer(Transfer),
    Flush,
    Id,
    Clear(Clearing),
}

#[derive(Debug)]
struct Transfer {
    is_write: bool,
    // Offset in the file, offset in the chain's buffers, length, and bytes done so far.
    offset: u64,
    skip: u64,
    len: u64,
    done: u64,
}

#[derive(Debug)]
struct Clearing {
    is_discard: bool,
    ranges: Vec<Range>,
    // The current range, the method that is tried, and the bytes overwritten so far.
    index: usize,
    way: usize,
    done: u64,
}

/// The next step of a request.
pub enum Next {
    Op(Op),
    Done {
        status: Status,
        /// Bytes written to the driver's buffers, without the status.
        written: u32,
    },
}

impl Next {
    fn done(status: Status) -> Self {
        Self::Done { status, written: 0 }
    }
}

impl BlockRequest {
    /// Reads a request from a chain. Returns None if the chain has no room for a status.
    pub fn parse(facts: &Facts, memory: &GuestMemory, chain: Chain) -> Option<Self> {
        let writable = chain.writable();
        if writable.last().is_none_or(|last| last.len == 0) {
            return None;
        }
        let room = chain::total_len(writable) - 1;
        let work = parse(facts, memory, &chain, room).unwrap_or_else(Work::Refused);
        Some(Self { chain, room, work })
    }

    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    pub fn into_chain(self) -> Chain {
        self.chain
    }

    /// Returns the cost of the request for the disk's rate limits.
    pub fn cost(&self) -> Cost {
        Cost::op(match &self.work {
            Work::Transfer(transfer) => transfer.len,
            Work::Clear(clearing) if !clearing.is_discard => {
                clearing.ranges.iter().map(|range| range.len).sum()
            }
            _ => 0,
        })
    }

    /// Returns the bytes that the request counts against the limit of one turn. A discard moves no
    /// bytes and has no rate limit, but freeing a range takes time in proportion to its length.
    pub fn turn_bytes(&self) -> u64 {
        match &self.work {
            Work::Clear(clearing) => clearing.ranges.iter().map(|range| range.len).sum(),
            _ => self.cost().bytes,
        }
    }

    /// Writes the status to the last byte of the buffers. Returns false if that is not possible.
    pub fn write_status(&self, memory: &GuestMemory, status: Status) -> bool {
        chain::write_at(memory, self.chain.writable(), self.room, &[status as u8]) == 1
    }

    /// Returns the first operation, or the next one after `last` has completed.
    pub fn next(
        &mut self,
        block: &mut Block,
        memory: &GuestMemory,
        last: Option<(Op, io::Result<usize>)>,
    ) -> Next {
        // An interrupted operation is repeated.
        let last = match last {
            Some((op, Err(error))) if is_temporary(&error) => return Next::Op(op),
            last => last,
        };
        match &mut self.work {
            Work::Refused(status) => Next::done(*status),
            Work::Id => {
                let id = wire::id_bytes(&block.facts.id);
                let len = id.len().min(usize::try_from(self.room).unwrap_or(usize::MAX));
                let id = id.get(..len).unwrap_or_default();
                let written = chain::write_at(memory, self.chain.writable(), 0, id) as u32;
                Next::Done { status: Status::Ok, written }
            }
            Work::Flush => flush(block, last),
            Work::Transfer(transfer) => transfer.next(block, memory, &self.chain, last),
            Work::Clear(clearing) => clearing.next(block, last),
        }
    }
}

fn parse(facts: &Facts, memory: &GuestMemory, chain: &Chain, room: u64) -> Result<Work, Status> {
    let mut raw = [0; HEADER_LEN];
    if chain::read_at(memory, chain.readable(), 0, &mut raw) < HEADER_LEN {
        return Err(Status::IoError);
    }
    let header = Header::parse(raw).ok_or(Status::Unsupported)?;
    let payload = chain::total_len(chain.readable()) - HEADER_LEN as u64;
    let changes = matches!(header.kind, Kind::Write | Kind::Discard | Kind::WriteZeroes);
    if changes && facts.read_only {
        // Whether or not the driver accepted VIRTIO_BLK_F_RO.
        return Err(Status::IoError);
    }
    let capacity_sectors = facts.capacity_sectors;
    let transfer = |is_write, skip, len| {
        let offset = wire::transfer_offset(header.sector, len, capacity_sectors);
        let offset = offset.ok_or(Status::IoError)?;
        let block_size = u64::from(facts.block_size);
        if !offset.is_multiple_of(block_size) || !len.is_multiple_of(block_size) {
            return Err(Status::IoError);
        }
        Ok(Work::Transfer(Transfer { is_write, offset, skip, len, done: 0 }))
    };
    let clear = |is_discard: bool, sectors_max| {
        let limits = RangeLimits { capacity_sectors, sectors_max, may_unmap: !is_discard };
        let ranges = ranges(memory, chain, payload, limits)?;
        Ok(Work::Clear(Clearing { is_discard, ranges, index: 0, way: 0, done: 0 }))
    };
    match header.kind {
        Kind::Read => transfer(false, 0, room),
        Kind::Write => transfer(true, HEADER_LEN as u64, payload),
        Kind::Flush => Ok(Work::Flush),
        Kind::GetId => Ok(Work::Id),
        Kind::Discard => clear(true, DISCARD_SECTORS_MAX),
        Kind::WriteZeroes => clear(false, ZERO_SECTORS_MAX),
    }
}

/// Reads all ranges of a request, and checks them before the first is acted on.
fn ranges(
    memory: &GuestMemory,
    chain: &Chain,
    payload: u64,
    limits: RangeLimits,
) -> Result<Vec<Range>, Status> {
    let count = payload / RANGE_LEN as u64;
    let whole = payload.is_multiple_of(RANGE_LEN as u64);
    if !whole || count == 0 || count > u64::from(RANGES_MAX) {
        return Err(Status::IoError);
    }
    let parse = |index: u64| {
        let mut raw = [0; RANGE_LEN];
        let offset = HEADER_LEN as u64 + index * RANGE_LEN as u64;
        if chain::read_at(memory, chain.readable(), offset, &mut raw) < RANGE_LEN {
            return Err(Status::IoError);
        }
        Range::parse(raw, limits)
    };
    (0..count).map(parse).collect()
}

fn flush(block: &mut Block, last: Option<(Op, io::Result<usize>)>) -> Next {
    match last {
        Some((_, Ok(_))) => Next::done(Status::Ok),
        Some((_, Err(error))) => {
            block.flush_failed = true;
            failed(block, &error)
        }
        None if block.facts.cache == CacheMode::Unsafe => Next::done(Status::Ok),
        // The kernel reports a lost write once and then forgets it: no later flush can be trusted.
        None if block.flush_failed => Next::done(Status::IoError),
        None => Next::Op(Op::Sync),
    }
}

fn failed(block: &mut Block, error: &io::Error) -> Next {
    block.host_error(error);
    Next::done(Status::IoError)
}

impl Transfer {
    fn next(
        &mut self,
        block: &mut Block,
        memory: &GuestMemory,
        chain: &Chain,
        last: Option<(Op, io::Result<usize>)>,
    ) -> Next {
        match last {
            None => {}
            Some((_, Err(error))) => return failed(block, &error),
            Some((_, Ok(0))) => {
                let end = if self.is_write {
                    io::ErrorKind::WriteZero
                } else {
                    io::ErrorKind::UnexpectedEof
                };
                return failed(block, &end.into());
            }
            Some((op, Ok(done))) => {
                let done = (done as u64).min(self.len - self.done);
                if let Op::Read { into: Target::Host(bounce), .. } = op {
                    let bytes = bounce.bytes().get(..done as usize).unwrap_or_default();
                    chain::write_at(memory, chain.writable(), self.done, bytes);
                }
                self.done += done;
            }
        }
        if self.done == self.len {
            let written = if self.is_write { 0 } else { self.len as u32 };
            return Next::Done { status: Status::Ok, written };
        }
        match self.target(&block.facts, memory, chain) {
            Ok(target) => {
                let offset = self.offset + self.done;
                Next::Op(if self.is_write {
                    Op::Write { from: target, offset }
                } else {
                    Op::Read { into: target, offset }
                })
            }
            Err(error) => failed(block, &error),
        }
    }

    /// Returns the rest of the guest's buffers, or a bounce buffer for some of it where direct I/O
    /// cannot use them.
    fn target(&self, facts: &Facts, memory: &GuestMemory, chain: &Chain) -> io::Result<Target> {
        let segments = if self.is_write { chain.readable() } else { chain.writable() };
        let (at, left) = (self.skip + self.done, self.len - self.done);
        let rest: Vec<Segment> = chain::slice(segments, at, left).collect();
        let align = facts.block_size as usize;
        if !facts.direct || is_aligned(memory, &rest, align)? {
            return Ok(Target::Guest { memory: memory.clone(), segments: rest });
        }
        if !(self.offset + self.done).is_multiple_of(align as u64) {
            // Direct I/O stopped in the middle of a block.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut bounce = Bounce::new(left.min(BOUNCE_LEN) as usize, align);
        if self.is_write {
            chain::read_at(memory, segments, at, bounce.bytes_mut());
        }
        Ok(Target::Host(bounce))
    }
}

/// Returns whether direct I/O can use these buffers without a copy.
fn is_aligned(memory: &GuestMemory, segments: &[Segment], align: usize) -> io::Result<bool> {
    let slices = guest_slices(memory, segments)?;
    Ok(slices.iter().all(|slice| {
        let address = slice.ptr_guard().as_ptr().addr();
        address.is_multiple_of(align) && slice.len().is_multiple_of(align)
    }))
}

impl Clearing {
    fn next(&mut self, block: &mut Block, last: Option<(Op, io::Result<usize>)>) -> Next {
        match last {
            None => {}
            Some((Op::Write { .. }, Ok(0))) => {
                return failed(block, &io::ErrorKind::WriteZero.into());
            }
            Some((Op::Write { .. }, Ok(done))) => self.done += done as u64,
            Some((_, Ok(_))) => self.next_range(),
            Some((Op::Clear { .. }, Err(error))) if is_unsupported(&error) => {
                if self.is_discard {
                    return Next::done(Status::Unsupported);
                }
                self.way += 1;
            }
            Some((_, Err(error))) => return failed(block, &error),
        }
        loop {
            let Some(range) = self.ranges.get(self.index).copied() else {
                return Next::done(Status::Ok);
            };
            // An empty range is valid for the guest, but the kernel would refuse it.
            if self.done >= range.len {
                self.next_range();
                continue;
            }
            let ways: &[Clear] = match (self.is_discard, range.unmap) {
                (true, _) => &[Clear::Punch],
                (false, true) => &[Clear::Punch, Clear::Zero],
                (false, false) => &[Clear::Zero],
            };
            return Next::Op(match ways.get(self.way) {
                Some(how) => Op::Clear { how: *how, offset: range.offset, len: range.len },
                None => {
                    let len = (range.len - self.done).min(ZEROES_LEN);
                    let bounce = Bounce::new(len as usize, block.facts.block_size as usize);
                    let offset = range.offset + self.done;
                    Op::Write { from: Target::Host(bounce), offset }
                }
            });
        }
    }

    fn next_range(&mut self) {
        (self.index, self.way, self.done) = (self.index + 1, 0, 0);
    }
}

fn is_temporary(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Interrupted
}

fn is_unsupported(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EOPNOTSUPP)
}
