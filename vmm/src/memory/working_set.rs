//! The pages that a machine's first use touches, recorded once and made ready in every machine
//! after it.
//!
//! A page that is not there yet costs a fault in the guest, one in KVM and one here, in the middle
//! of the first command. Asked for in runs beforehand, they cost a fraction of that.

use pvmm_devices::GuestMemory;

use super::{MAX_RUNS, PageRanges, REWRITTEN_MAX, pages};

/// The most that is made ready: a list that claims more is a mistake or a trap.
const PREFAULT_MAX: u64 = 128 << 20;
/// Pages between two that are read, which are mapped with them: as many as the kernel maps around
/// a page that is read, so leaving them out would only cost calls.
const FAULT_AROUND: u64 = 16 * super::PAGE;

/// Pages by how they are touched, as ranges of the image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    pub written: PageRanges,
    pub read: PageRanges,
}

impl WorkingSet {
    pub fn new(written: &PageRanges, read: &PageRanges) -> Self {
        Self {
            written: written.at_most(MAX_RUNS),
            read: read.joined(FAULT_AROUND).at_most(MAX_RUNS),
        }
    }

    /// What the children of a machine will touch first, as far as one can know it: what its own
    /// first use touched, and of the pages that it has `written` the short runs, which its kernel
    /// and its agent write again and again.
    pub fn guess(written: &PageRanges, own: Option<&Self>) -> Self {
        let (again, _) = written.shortest(REWRITTEN_MAX);
        // A fork's own set is a guess too: without a bound every generation would add to it.
        let (own_again, _) = own.map(|own| own.written.shortest(REWRITTEN_MAX)).unwrap_or_default();
        let written = again.union(&own_again);
        let own = own.into_iter().flat_map(|own| own.written.iter().chain(own.read.iter()));
        let read = PageRanges::merged(own.collect()).difference(&written);
        Self::new(&written, &read)
    }

    /// Makes the pages ready: those that are written get their copy, the others their place in the
    /// page tables. Only a help: what cannot be made ready is when it is touched.
    pub fn prefault(&self, guest: &GuestMemory) {
        let mut left = PREFAULT_MAX;
        let wishes =
            [(&self.written, libc::MADV_POPULATE_WRITE), (&self.read, libc::MADV_POPULATE_READ)];
        for (runs, advice) in wishes {
            for run in runs.iter() {
                let len = run.end - run.start;
                if len > left || pages::advise(guest, run, advice).is_err() {
                    return;
                }
                left -= len;
            }
        }
    }

    /// Returns all pages as guest addresses and lengths, with small gaps between them closed.
    pub fn guest_ranges(&self, guest: &GuestMemory) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        let mut left = PREFAULT_MAX;
        for run in self.written.union(&self.read).joined(FAULT_AROUND).iter() {
            for (address, part) in pages::guest_parts(guest, run) {
                let len = part.end - part.start;
                if len > left {
                    return ranges;
                }
                left -= len;
                ranges.push((address, len));
            }
        }
        ranges
    }
}
