//! Page ranges, the scan for a guest's dirty pages, and operations on ranges of guest memory.
//!
//! A page that is written in a private mapping becomes anonymous, whoever writes it: the guest or a
//! device. The scan asks the page tables which pages are, so no dirty log of KVM is needed, and the
//! guest pays nothing while it runs.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use pvmm_devices::GuestMemory;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::PAGE;
use super::sys::{self, PageState};

/// The list of this process's pages and their states.
pub const PAGEMAP: &str = "/proc/self/pagemap";
/// Runs taken from the kernel in one call.
const BATCH: usize = 1024;
/// Bits of an entry in `/proc/self/pagemap`, for kernels without a scan.
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_FILE: u64 = 1 << 61;

/// Ascending ranges of bytes, in whole pages, that do not touch each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageRanges(Vec<Range<u64>>);

impl PageRanges {
    /// One run of everything.
    pub fn all(size: u64) -> Self {
        Self::one(0..size)
    }

    pub fn one(run: Range<u64>) -> Self {
        let mut runs = Self::default();
        runs.push(run);
        runs
    }

    /// No ranges yet, with room for `count`.
    pub fn with_capacity(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    /// Returns the parts that lie in `range`.
    #[must_use]
    pub fn clip(&self, range: &Range<u64>) -> Self {
        let first = self.0.partition_point(|run| run.end <= range.start);
        let near = self.0.iter().skip(first).take_while(|run| run.start < range.end);
        Self(near.map(|run| run.start.max(range.start)..run.end.min(range.end)).collect())
    }

    /// Makes ranges of parts in any order, which may overlap.
    pub fn merged(mut parts: Vec<Range<u64>>) -> Self {
        parts.sort_by_key(|part| part.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for part in parts.into_iter().filter(|part| part.start < part.end) {
            match joined.last_mut() {
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => joined.push(part),
            }
        }
        Self(joined)
    }

    /// Appends a run that begins at or after the end of the last one.
    pub fn push(&mut self, run: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ if run.is_empty() => {}
            _ => self.0.push(run),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    /// Returns the pages that are in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self::merged(self.iter().chain(other.iter()).collect())
    }

    /// Returns the pages that are in these ranges and not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut rest = Self::default();
        let mut holes = other.0.iter().peekable();
        for run in &self.0 {
            let mut at = run.start;
            while let Some(hole) = holes.next_if(|hole| hole.end <= run.end) {
                if hole.start > at {
                    rest.push(at..hole.start);
                }
                at = at.max(hole.end);
            }
            let end = holes.peek().map_or(run.end, |hole| hole.start.min(run.end));
            if end > at {
                rest.push(at..end);
            }
        }
        rest
    }

    /// Returns the pages that are in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.difference(&self.difference(other))
    }

    /// Splits the ranges into the shortest, which have at most `budget` bytes together, and the
    /// others.
    pub fn shortest(&self, budget: u64) -> (Self, Self) {
        let mut by_length: Vec<_> = self.0.clone();
        by_length.sort_unstable_by_key(|run| run.end - run.start);
        let mut taken = 0;
        let fits = |run: &&Range<u64>| {
            taken += run.end - run.start;
            taken <= budget
        };
        let count = by_length.iter().take_while(fits).count();
        let longer = by_length.split_off(count);
        (Self::merged(by_length), Self::merged(longer))
    }

    /// Returns the number of ranges.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|run| run.end - run.start).sum()
    }

    /// Returns the whole blocks of `size` bytes that contain any page of these.
    #[must_use]
    pub fn blocks(&self, size: u64) -> Self {
        let block = |run: Range<u64>| run.start / size * size..run.end.next_multiple_of(size);
        Self::merged(self.iter().map(block).collect())
    }

    /// Joins ranges that are at most `gap` bytes apart.
    #[must_use]
    pub fn joined(&self, gap: u64) -> Self {
        let mut joined: Vec<Range<u64>> = Vec::with_capacity(self.0.len());
        for run in &self.0 {
            match joined.last_mut() {
                Some(last) if run.start - last.end <= gap => last.end = run.end,
                _ => joined.push(run.clone()),
            }
        }
        Self(joined)
    }

    /// Closes the smallest gaps until there are at most `max` ranges.
    #[must_use]
    pub fn at_most(&self, max: usize) -> Self {
        if self.0.len() <= max {
            return self.clone();
        }
        let mut gaps: Vec<u64> = self.0.windows(2).map(|two| two[1].start - two[0].end).collect();
        gaps.sort_unstable();
        let must_go = self.0.len() - max;
        self.joined(gaps.get(must_go.saturating_sub(1)).copied().unwrap_or(u64::MAX))
    }
}

/// Returns the regions of guest memory: offset in the image, host address, length.
pub fn host_regions(guest: &GuestMemory) -> Vec<(u64, *mut u8, u64)> {
    let mut offset = 0;
    let mut places = Vec::new();
    for region in guest.iter() {
        places.push((offset, region.as_ptr(), region.len()));
        offset += region.len();
    }
    places
}

/// Lists the pages in state `wanted`, as ranges of the image. `pagemap` is this process's, if it is
/// already open.
pub fn scan(
    guest: &GuestMemory,
    pagemap: Option<&File>,
    wanted: PageState,
) -> io::Result<PageRanges> {
    let Some(pagemap) = pagemap else {
        return match File::open(PAGEMAP) {
            Ok(pagemap) => scan(guest, Some(&pagemap), wanted),
            // In a jail without /proc every page may be private.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound && wanted != PageState::FileMapped =>
            {
                Ok(PageRanges::all(host_regions(guest).iter().map(|(_, _, len)| len).sum()))
            }
            Err(error) => Err(error),
        };
    };
    let mut runs = PageRanges::default();
    for (offset, address, len) in host_regions(guest) {
        let (start, end) = (address as u64, address as u64 + len);
        let mut take = |from: u64, to: u64| runs.push(from - start + offset..to - start + offset);
        match scan_by_ioctl(pagemap, wanted, start, end, &mut take) {
            // A kernel before 6.7, or one that hides the call.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                scan_by_reading(pagemap, wanted, start, end, &mut take)?;
            }
            result => result?,
        }
    }
    Ok(runs)
}

fn scan_by_ioctl(
    pagemap: &File,
    wanted: PageState,
    start: u64,
    end: u64,
    take: &mut impl FnMut(u64, u64),
) -> io::Result<()> {
    let mut found = vec![sys::PageRegion::default(); BATCH];
    let mut from = start;
    while from < end {
        let (count, next) = sys::scan(pagemap, wanted, (from, end), &mut found)?;
        let found = found.get(..count).unwrap_or(&found);
        found.iter().for_each(|region| take(region.start, region.end));
        // Kernels list in rounds of 512 and may say where an earlier round of this call stopped.
        let next = found.last().map_or(next, |last| next.max(last.end));
        if next <= from {
            return Err(io::Error::other("the page scan does not advance"));
        }
        from = next;
    }
    Ok(())
}

fn scan_by_reading(
    pagemap: &File,
    wanted: PageState,
    start: u64,
    end: u64,
    take: &mut impl FnMut(u64, u64),
) -> io::Result<()> {
    let mut entries = vec![0; BATCH * 8];
    let mut from = start;
    while from < end {
        let pages = ((end - from) / PAGE).min(BATCH as u64);
        let bytes = entries.get_mut(..pages as usize * 8).unwrap_or_default();
        pagemap.read_exact_at(bytes, from / PAGE * 8)?;
        for (index, entry) in bytes.chunks_exact(8).enumerate() {
            let entry = u64::from_ne_bytes(entry.try_into().unwrap_or_default());
            let (present, of_file) = (entry & ENTRY_PRESENT != 0, entry & ENTRY_FILE != 0);
            let is_wanted = match wanted {
                PageState::Private | PageState::PrivateWritten => {
                    (present || entry & ENTRY_SWAPPED != 0) && !of_file
                }
                PageState::FileMapped => present && of_file,
            };
            if is_wanted {
                let page = from + index as u64 * PAGE;
                take(page, page + PAGE);
            }
        }
        from += pages * PAGE;
    }
    Ok(())
}

/// Splits a range of the image by regions, each part with its host address.
pub fn host_parts(guest: &GuestMemory, run: Range<u64>) -> Vec<(*mut u8, Range<u64>)> {
    let mut parts = Vec::new();
    for (offset, address, len) in host_regions(guest) {
        let part = run.start.max(offset)..run.end.min(offset + len);
        if part.start < part.end {
            parts.push((address.wrapping_add((part.start - offset) as usize), part));
        }
    }
    parts
}

/// Splits a range of the image by regions, each part with its guest address.
pub fn guest_parts(guest: &GuestMemory, run: Range<u64>) -> Vec<(u64, Range<u64>)> {
    let mut parts = Vec::new();
    let mut offset = 0;
    for region in guest.iter() {
        let part = run.start.max(offset)..run.end.min(offset + region.len());
        if part.start < part.end {
            parts.push((region.start_addr().raw_value() + part.start - offset, part));
        }
        offset += region.len();
    }
    parts
}

/// Drops private pages, so that they read as the image again. The guest must be paused.
pub fn discard(guest: &GuestMemory, runs: &PageRanges) -> io::Result<()> {
    runs.iter().try_for_each(|run| advise(guest, run, libc::MADV_DONTNEED))
}

/// Reads a range of a file to the same place of guest memory. The guest must be paused.
#[allow(unsafe_code)]
pub fn read_run(guest: &GuestMemory, run: Range<u64>, file: &File) -> io::Result<()> {
    for (address, part) in host_parts(guest, run) {
        let len = (part.end - part.start) as usize;
        // SAFETY: the range is mapped for as long as `guest` is borrowed, and nobody reads it by
        // reference.
        unsafe { sys::read_to(file, address, len, part.start)? };
    }
    Ok(())
}

/// Puts zeros into a range of guest memory. The guest must be paused.
#[allow(unsafe_code)]
pub fn zero_run(guest: &GuestMemory, run: Range<u64>) {
    for (address, part) in host_parts(guest, run) {
        // SAFETY: as above.
        unsafe { address.write_bytes(0, (part.end - part.start) as usize) };
    }
}

/// Maps a file's range, privately, in place of the same range of guest memory. The guest must be
/// paused or not have run.
#[allow(unsafe_code)]
pub fn map_file(guest: &GuestMemory, run: Range<u64>, file: &File) -> io::Result<()> {
    for (address, part) in host_parts(guest, run) {
        let len = part.end - part.start;
        debug_assert!(part.start % PAGE == 0 && len % PAGE == 0);
        // SAFETY: the range is part of a mapping that `guest` owns; nobody holds references into
        // guest memory, and no vCPU or device runs.
        unsafe { sys::map_over(address, len as usize, (file, part.start))? };
    }
    Ok(())
}

/// Maps anonymous memory in place of a range. The guest must be paused or not have run.
#[allow(unsafe_code)]
pub fn map_zeros(guest: &GuestMemory, run: Range<u64>) -> io::Result<()> {
    for (address, part) in host_parts(guest, run) {
        // SAFETY: the range is a mapping that `guest` owns, which nobody reads by reference.
        unsafe { sys::map_zeros(address, (part.end - part.start) as usize)? };
    }
    Ok(())
}

/// Gives the kernel advice about a range. The guest must be paused if the advice changes what is
/// read there.
#[allow(unsafe_code)]
pub fn advise(guest: &GuestMemory, run: Range<u64>, advice: i32) -> io::Result<()> {
    for (address, part) in host_parts(guest, run) {
        let len = (part.end - part.start) as usize;
        // SAFETY: the range is guest memory, which nobody reads by reference, and its guest is
        // paused.
        unsafe { sys::advise(address, len, advice)? };
    }
    Ok(())
}

/// Writes a range of guest memory to the same place of a file, without the pages that are all zero.
#[allow(unsafe_code)]
pub fn write_run(guest: &GuestMemory, run: Range<u64>, file: &File) -> io::Result<()> {
    for (address, part) in host_parts(guest, run) {
        let pages = (part.end - part.start) / PAGE;
        let at = |page: u64| address.wrapping_add((page * PAGE) as usize);
        let mut begin = 0;
        for page in 0..=pages {
            // SAFETY: pages below `pages` are mapped guest memory, and aligned.
            if page < pages && !unsafe { sys::is_zero_page(at(page)) } {
                continue;
            }
            if begin < page {
                let len = ((page - begin) * PAGE) as usize;
                // SAFETY: the range is mapped for as long as `guest` is borrowed.
                unsafe { sys::write_from(file, at(begin), len, part.start + begin * PAGE)? };
            }
            begin = page + 1;
        }
    }
    Ok(())
}

/// Writes all of a range of guest memory to the same place of a file.
#[allow(unsafe_code)]
pub fn write_all(guest: &GuestMemory, run: Range<u64>, file: &File) -> io::Result<()> {
    for (address, part) in host_parts(guest, run) {
        let len = (part.end - part.start) as usize;
        // SAFETY: the range is mapped for as long as `guest` is borrowed.
        unsafe { sys::write_from(file, address, len, part.start)? };
    }
    Ok(())
}

/// Reads guest memory at an offset of the image.
pub fn read(guest: &GuestMemory, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut left = bytes;
    let end = offset + left.len() as u64;
    for (address, part) in guest_parts(guest, offset..end) {
        let len = (part.end - part.start) as usize;
        let (part, rest) = left.split_at_mut_checked(len).ok_or(io::ErrorKind::UnexpectedEof)?;
        guest.read_slice(part, GuestAddress(address)).map_err(io::Error::other)?;
        left = rest;
    }
    if left.is_empty() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Marks all private pages as not written, for [`PageState::PrivateWritten`]. The guest must be
/// paused.
pub fn reset_write_tracking(guest: &GuestMemory, pagemap: Option<&File>) -> io::Result<()> {
    let Some(pagemap) = pagemap else {
        return reset_write_tracking(guest, Some(&File::open(PAGEMAP)?));
    };
    for (_, address, len) in host_regions(guest) {
        let (mut from, end) = (address as u64, address as u64 + len);
        while from < end {
            let next = sys::reset_write_tracking(pagemap, (from, end))?;
            if next <= from {
                return Err(io::Error::other("the page scan does not advance"));
            }
            from = next;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(parts: &[(u64, u64)]) -> PageRanges {
        let mut runs = PageRanges::default();
        parts.iter().for_each(|(start, end)| runs.push(start * PAGE..end * PAGE));
        runs
    }

    #[test]
    fn runs_that_touch_are_one() {
        assert_eq!(runs(&[(0, 1), (1, 2), (4, 4), (5, 6)]), runs(&[(0, 2), (5, 6)]));
    }

    #[test]
    fn runs_without_others_are_what_is_left() {
        let all = runs(&[(0, 10), (20, 30)]);
        assert_eq!(all.difference(&runs(&[])), all);
        assert_eq!(all.difference(&all), runs(&[]));
        let left = all.difference(&runs(&[(2, 3), (5, 6), (9, 22), (29, 40)]));
        assert_eq!(left, runs(&[(0, 2), (3, 5), (6, 9), (22, 29)]));
        assert_eq!(runs(&[(5, 6), (7, 8)]).difference(&runs(&[(0, 100)])), runs(&[]));
    }

    #[test]
    fn runs_between_two_places_are_cut_there() {
        let all = runs(&[(0, 10), (20, 30), (40, 50)]);
        assert_eq!(all.clip(&(5 * PAGE..45 * PAGE)), runs(&[(5, 10), (20, 30), (40, 45)]));
        assert_eq!(all.clip(&(10 * PAGE..20 * PAGE)), runs(&[]));
        assert_eq!(all.clip(&(22 * PAGE..23 * PAGE)), runs(&[(22, 23)]));
    }

    #[test]
    fn runs_at_most_join_the_smallest_gaps_first() {
        let many = runs(&[(0, 1), (2, 3), (10, 11), (30, 31)]);
        assert_eq!(many.at_most(4), many);
        assert_eq!(many.at_most(3), runs(&[(0, 3), (10, 11), (30, 31)]));
        assert_eq!(many.at_most(1), runs(&[(0, 31)]));
        assert_eq!(many.at_most(2).bytes(), 12 * PAGE);
    }
}
