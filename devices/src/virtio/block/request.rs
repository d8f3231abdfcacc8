//! Carries out one request: from the latched chain to a status.
//!
//! Apart from the worker so that the worker is about rings and this is about disks. Everything is
//! checked before the first byte moves, so a refused write changes nothing.

use std::io;

use vm_memory::{GuestMemory as _, Permissions, VolatileSlice};

use super::super::chain::{self, Chain, Segment};
use super::config::{CacheMode, DISCARD_SECTORS_MAX, RANGES_MAX, ZERO_SECTORS_MAX};
use super::device::Block;
use super::io::{Clear, read_full, write_full};
use super::wire::{self, HEADER_LEN, Header, Kind, RANGE_LEN, Range, RangeLimits, Status};
use crate::GuestMemory;

// For a file system that cannot zero a range by itself.
const ZEROES_LEN: usize = 64 << 10;

/// How a request ended.
pub struct Outcome {
    pub status: Status,
    /// Bytes put into the driver's buffers, without the status.
    pub written: u32,
    /// Bytes moved between guest and host, for fairness among devices.
    pub moved: u64,
}

enum Refusal {
    Status(Status),
    Host(io::Error),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

const BAD: Refusal = Refusal::Status(Status::IoError);
const UNSUPPORTED: Refusal = Refusal::Status(Status::Unsupported);

/// Serves `chain`, which has room for `room` bytes before its status.
pub fn serve(block: &mut Block, memory: &GuestMemory, chain: &Chain, room: u64) -> Outcome {
    match try_serve(block, memory, chain, room) {
        Ok((written, moved)) => Outcome { status: Status::Ok, written, moved },
        Err(Refusal::Status(status)) => Outcome { status, written: 0, moved: 0 },
        Err(Refusal::Host(error)) => {
            block.host_errors += 1;
            if block.host_errors.is_power_of_two() {
                let count = block.host_errors;
                log::warn!("block {:?}: host error {count}: {error}", block.facts.id);
            }
            Outcome { status: Status::IoError, written: 0, moved: 0 }
        }
    }
}

fn try_serve(
    block: &mut Block,
    memory: &GuestMemory,
    chain: &Chain,
    room: u64,
) -> Result<(u32, u64), Refusal> {
    let mut raw = [0; HEADER_LEN];
    if chain::read_at(memory, chain.readable(), 0, &mut raw) < HEADER_LEN {
        return Err(BAD);
    }
    let header = Header::parse(raw).ok_or(UNSUPPORTED)?;
    let payload = chain::total_len(chain.readable()) - HEADER_LEN as u64;
    let changes = matches!(header.kind, Kind::Write | Kind::Discard | Kind::WriteZeroes);
    if changes && block.facts.read_only {
        // Whether or not the driver accepted that the disk is read-only.
        return Err(BAD);
    }
    let capacity = block.facts.capacity_sectors;
    match header.kind {
        Kind::Read => {
            let offset = wire::transfer_offset(header.sector, room, capacity).ok_or(BAD)?;
            let buffers = buffers(memory, chain.writable(), 0, room)?;
            read_full(&*block.disk, &buffers, offset)?;
            Ok((room as u32, room))
        }
        Kind::Write => {
            let offset = wire::transfer_offset(header.sector, payload, capacity).ok_or(BAD)?;
            let buffers = buffers(memory, chain.readable(), HEADER_LEN as u64, payload)?;
            write_full(&*block.disk, &buffers, offset)?;
            Ok((0, payload))
        }
        Kind::Flush => flush(block).map(|()| (0, 0)),
        Kind::GetId => {
            let id = wire::id_bytes(&block.facts.id);
            let len = id.len().min(usize::try_from(room).unwrap_or(usize::MAX));
            let written =
                chain::write_at(memory, chain.writable(), 0, id.get(..len).unwrap_or(&id));
            Ok((written as u32, 0))
        }
        Kind::Discard => {
            let limits = limits(capacity, DISCARD_SECTORS_MAX, false);
            for range in ranges(memory, chain, payload, limits)? {
                discard(block, range)?;
            }
            Ok((0, 0))
        }
        Kind::WriteZeroes => {
            let limits = limits(capacity, ZERO_SECTORS_MAX, true);
            let ranges = ranges(memory, chain, payload, limits)?;
            let moved = ranges.iter().map(|range| range.len).sum();
            for range in ranges {
                write_zeroes(block, range)?;
            }
            Ok((0, moved))
        }
    }
}

fn flush(block: &mut Block) -> Result<(), Refusal> {
    if block.facts.cache == CacheMode::Unsafe {
        return Ok(());
    }
    if block.flush_failed {
        // The kernel reports a lost write once and then forgets it: no later flush can be believed.
        return Err(BAD);
    }
    block.disk.sync().map_err(|error| {
        block.flush_failed = true;
        Refusal::Host(error)
    })
}

fn limits(capacity_sectors: u64, sectors_max: u32, may_unmap: bool) -> RangeLimits {
    RangeLimits { capacity_sectors, sectors_max, may_unmap }
}

/// All ranges of a request, checked before the first is acted on.
fn ranges(
    memory: &GuestMemory,
    chain: &Chain,
    payload: u64,
    limits: RangeLimits,
) -> Result<Vec<Range>, Refusal> {
    let count = payload / RANGE_LEN as u64;
    let whole = payload.is_multiple_of(RANGE_LEN as u64);
    if !whole || count == 0 || count > u64::from(RANGES_MAX) {
        return Err(BAD);
    }
    let parse = |index: u64| {
        let mut raw = [0; RANGE_LEN];
        let offset = HEADER_LEN as u64 + index * RANGE_LEN as u64;
        if chain::read_at(memory, chain.readable(), offset, &mut raw) < RANGE_LEN {
            return Err(BAD);
        }
        Ok(Range::parse(raw, limits)?)
    };
    (0..count).map(parse).collect()
}

fn discard(block: &Block, range: Range) -> Result<(), Refusal> {
    match clear(block, Clear::Punch, range) {
        Err(error) if is_unsupported(&error) => Err(UNSUPPORTED),
        result => Ok(result?),
    }
}

fn write_zeroes(block: &Block, range: Range) -> Result<(), Refusal> {
    let ways: &[Clear] = if range.unmap { &[Clear::Punch, Clear::Zero] } else { &[Clear::Zero] };
    for way in ways {
        match clear(block, *way, range) {
            Err(error) if is_unsupported(&error) => {}
            result => return Ok(result?),
        }
    }
    let mut zeroes = vec![0; ZEROES_LEN];
    let mut done = 0;
    while done < range.len {
        let len = (range.len - done).min(ZEROES_LEN as u64) as usize;
        let part = VolatileSlice::from(zeroes.get_mut(..len).unwrap_or_default());
        write_full(&*block.disk, &[part], range.offset + done)?;
        done += len as u64;
    }
    Ok(())
}

fn clear(block: &Block, how: Clear, range: Range) -> io::Result<()> {
    // The kernel takes an empty range for a mistake; to the guest it is nothing to do.
    if range.len == 0 {
        return Ok(());
    }
    loop {
        match block.disk.clear(how, range.offset, range.len) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EOPNOTSUPP)
}

/// Host views of `len` bytes from `offset` of guest buffers.
fn buffers<'a>(
    memory: &'a GuestMemory,
    segments: &[Segment],
    offset: u64,
    len: u64,
) -> Result<Vec<VolatileSlice<'a>>, Refusal> {
    let mut buffers = Vec::with_capacity(segments.len());
    for part in chain::slice(segments, offset, len) {
        let slices = memory.get_slices(part.address, part.len as usize, Permissions::ReadWrite);
        for slice in slices.map_err(|_| BAD)? {
            buffers.push(slice.map_err(|_| BAD)?);
        }
    }
    Ok(buffers)
}
