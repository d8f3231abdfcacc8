//! The guest's statistics of its memory (virtio 1.2 section 5.5.6.3): reported to the host, never
//! trusted.

use super::super::chain::{self, Chain};
use crate::GuestMemory;

const ENTRY: usize = 10;
/// More than any driver sends, even with repeated entries.
const BYTES_MAX: u64 = 64 * ENTRY as u64;

/// The guest's statistics of its memory. A value that it did not send is `None`; sizes are in
/// bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonStats {
    /// The target of the host, and the memory given up so far, as counted by the host.
    pub target_bytes: u64,
    pub actual_bytes: u64,
    pub swapped_in: Option<u64>,
    pub swapped_out: Option<u64>,
    pub major_faults: Option<u64>,
    pub minor_faults: Option<u64>,
    pub free: Option<u64>,
    pub total: Option<u64>,
    pub available: Option<u64>,
    pub disk_caches: Option<u64>,
    pub hugetlb_allocations: Option<u64>,
    pub hugetlb_failures: Option<u64>,
    pub oom_kills: Option<u64>,
}

/// Reads the entries of a chain: a tag and a value each. Unknown tags are ignored.
pub fn read(memory: &GuestMemory, chain: &Chain) -> BalloonStats {
    let len = chain::total_len(chain.readable()).min(BYTES_MAX);
    let mut bytes = vec![0; len as usize];
    let got = chain::read_at(memory, chain.readable(), 0, &mut bytes);
    bytes.truncate(got);
    let mut stats = BalloonStats::default();
    for entry in bytes.chunks_exact(ENTRY) {
        let (tag, value) = entry.split_at(2);
        let tag = tag.try_into().map_or(u16::MAX, u16::from_le_bytes);
        let value = value.try_into().map_or(0, u64::from_le_bytes);
        let field = match tag {
            0 => &mut stats.swapped_in,
            1 => &mut stats.swapped_out,
            2 => &mut stats.major_faults,
            3 => &mut stats.minor_faults,
            4 => &mut stats.free,
            5 => &mut stats.total,
            6 => &mut stats.available,
            7 => &mut stats.disk_caches,
            8 => &mut stats.hugetlb_allocations,
            9 => &mut stats.hugetlb_failures,
            10 => &mut stats.oom_kills,
            _ => continue,
        };
        *field = Some(value);
    }
    stats
}
