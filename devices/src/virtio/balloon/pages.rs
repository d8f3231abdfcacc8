//! Checks, joins and releases the pages that the guest gives away, however it names them.

use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

use super::super::chain::{self, Chain, Segment};
use super::config::PAGE_SIZE;
use super::device::Balloon;
use super::sys;
use crate::GuestMemory;

/// The maximum number of pages that one chain may name. Linux names 256.
pub const PAGES_MAX: usize = 4096;

/// Returns the page numbers of a chain, ascending and without duplicates, and whether some of them
/// could not be used.
pub fn numbers(memory: &GuestMemory, chain: &Chain) -> (Vec<u32>, bool) {
    let offered = chain::total_len(chain.readable());
    let wanted = offered.min(PAGES_MAX as u64 * 4) as usize;
    let mut bytes = vec![0; wanted];
    let got = chain::read_at(memory, chain.readable(), 0, &mut bytes);
    bytes.truncate(got);
    let words = bytes.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_le_bytes));
    let in_memory = |number: &u32| {
        let address = GuestAddress(u64::from(*number) * PAGE_SIZE);
        memory.check_range(address, PAGE_SIZE as usize, Permissions::ReadWrite)
    };
    let all: Vec<u32> = words.collect();
    let mut numbers: Vec<u32> = all.iter().copied().filter(in_memory).collect();
    let bad = numbers.len() != all.len() || wanted as u64 != offered || !offered.is_multiple_of(4);
    numbers.sort_unstable();
    numbers.dedup();
    (numbers, bad || offered == 0)
}

/// Releases pages, with one call for each contiguous run.
pub fn release_numbers(balloon: &mut Balloon, memory: &GuestMemory, numbers: &[u32]) {
    for run in numbers.chunk_by(|one, next| one.checked_add(1) == Some(*next)) {
        let address = run.first().map_or(0, |first| u64::from(*first) * PAGE_SIZE);
        release(balloon, memory, address, run.len() as u64 * PAGE_SIZE);
    }
}

/// Releases the whole pages of these buffers. Returns how many bytes were released.
pub fn release_buffers(balloon: &mut Balloon, memory: &GuestMemory, buffers: &[Segment]) -> u64 {
    let mut released = 0;
    for buffer in buffers {
        // The buffer is in guest memory, so its end does not overflow.
        let start = buffer.address.0.next_multiple_of(PAGE_SIZE);
        let end = (buffer.address.0 + u64::from(buffer.len)) / PAGE_SIZE * PAGE_SIZE;
        if start < end && release(balloon, memory, start, end - start) {
            released += end - start;
        }
    }
    released
}

fn release(balloon: &mut Balloon, memory: &GuestMemory, address: u64, len: u64) -> bool {
    match sys::release(memory, GuestAddress(address), len) {
        Ok(()) => true,
        Err(error) => {
            // The host then keeps the page, which does the guest no harm.
            if balloon.add_host_error() {
                log::warn!("balloon: cannot release {len:#x} bytes at {address:#x}: {error}");
            }
            false
        }
    }
}
