//! The working set: pages that a first use touches, recorded or guessed, and prefaulted in later
//! VMs.
//!
//! A page that is not mapped costs a fault in the guest, in KVM and in this process, in the middle
//! of the first command. Mapped in ranges beforehand, pages cost a fraction of that.

use pvmm_devices::GuestMemory;

use super::{MAX_RUNS, PageRanges, REWRITTEN_MAX, pages};

/// The most bytes that are prefaulted: a list with more is a mistake or an attack.
const PREFAULT_MAX: u64 = 128 << 20;
/// Gaps up to this size between pages that are read are prefaulted too: the kernel maps as many
/// around a page that is read anyway, and each range is a system call.
const FAULT_AROUND: u64 = 16 * super::PAGE;

/// Pages by how a first use touches them, as ranges of the image.
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

    /// Guesses the working set of the forks of a running VM: the pages of its `own` first use, and
    /// the short ranges of its dirty pages, `written`, which its kernel and agent write all the
    /// time.
    pub fn guess(written: &PageRanges, own: Option<&Self>) -> Self {
        let (again, _) = written.shortest(REWRITTEN_MAX);
        // A fork's own set is a guess too: without a bound it would grow from fork to fork.
        let (own_again, _) = own.map(|own| own.written.shortest(REWRITTEN_MAX)).unwrap_or_default();
        let written = again.union(&own_again);
        let own = own.into_iter().flat_map(|own| own.written.iter().chain(own.read.iter()));
        let read = PageRanges::merged(own.collect()).difference(&written);
        Self::new(&written, &read)
    }

    /// Prefaults the pages: those that are written get their private copy, the others their page
    /// table entries. A page that cannot be prefaulted is mapped when it is touched.
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
