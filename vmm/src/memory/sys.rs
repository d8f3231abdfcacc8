//! The system calls of guest memory, each with the reason why it is sound.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_iowr_nr;

ioctl_iowr_nr!(PAGEMAP_SCAN, b'f' as u32, 16, ScanArgument);

// Categories of pages in `PAGEMAP_SCAN`.
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;

#[repr(C)]
#[derive(Default)]
pub struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// A range of pages as the kernel reports it, in host addresses.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct PageRegion {
    pub start: u64,
    pub end: u64,
    categories: u64,
}

/// The state of a page in a guest's mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Anonymous: written since it was mapped, and private to the mapping.
    Private,
    /// Private, and written since [`reset_write_tracking`].
    PrivateWritten,
    /// A page of the file below that has an entry in the page tables.
    FileMapped,
}

/// The masks that select private pages: categories to invert, categories that must all be set after
/// that, categories of which one must be set.
const PRIVATE: (u64, u64, u64) = (
    PAGE_IS_FILE | PAGE_IS_PFNZERO,
    PAGE_IS_FILE | PAGE_IS_PFNZERO,
    PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
);
/// Write-protects the pages that match, and fails if the range is not registered for that.
const PM_SCAN_WP_MATCHING: u64 = 1;
const PM_SCAN_CHECK_WPASYNC: u64 = 2;

/// Marks the private pages between two host addresses as not written, up to where this call came.
pub fn reset_write_tracking(pagemap: &File, (start, end): (u64, u64)) -> io::Result<u64> {
    let (category_inverted, category_mask, category_anyof_mask) = PRIVATE;
    let mut argument = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
        start,
        end,
        category_inverted,
        category_mask,
        category_anyof_mask,
        ..Default::default()
    };
    // SAFETY: the kernel has no list to fill; it writes `walk_end` into the argument.
    match unsafe { ioctl_with_mut_ref(pagemap, PAGEMAP_SCAN(), &mut argument) } {
        0.. => Ok(argument.walk_end),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lists pages between two host addresses, as many runs as fit; returns how many there are and
/// where to go on.
pub fn scan(
    pagemap: &File,
    wanted: PageState,
    (start, end): (u64, u64),
    found: &mut [PageRegion],
) -> io::Result<(usize, u64)> {
    let (inverted, mask, any) = match wanted {
        PageState::Private => PRIVATE,
        PageState::PrivateWritten => (PRIVATE.0, PRIVATE.1 | PAGE_IS_WRITTEN, PRIVATE.2),
        PageState::FileMapped => (0, PAGE_IS_FILE | PAGE_IS_PRESENT, 0),
    };
    let mut argument = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        start,
        end,
        vec: found.as_mut_ptr() as u64,
        vec_len: found.len() as u64,
        category_inverted: inverted,
        category_mask: mask,
        category_anyof_mask: any,
        return_mask: PAGE_IS_PRESENT,
        ..Default::default()
    };
    // SAFETY: the kernel writes at most `vec_len` regions to `found`, and `walk_end` into the
    // argument.
    match unsafe { ioctl_with_mut_ref(pagemap, PAGEMAP_SCAN(), &mut argument) } {
        count if count >= 0 => Ok((count as usize, argument.walk_end)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Maps a file's range at `address`, in place of what is there. A page that is written becomes
/// private to the mapping; the file stays as it is.
///
/// # Safety
/// `len` bytes at `address` must be a mapping that the caller owns and through which nobody holds a
/// reference.
pub unsafe fn map_over(
    address: *mut u8,
    len: usize,
    (file, offset): (&File, u64),
) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: replaces only what the caller owns; accesses through volatile pointers stay valid.
    let mapped =
        unsafe { libc::mmap(address.cast(), len, protection, flags, file.as_raw_fd(), offset) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Puts private memory that reads as zero at `address`, in place of what is there.
///
/// # Safety
/// As for [`map_over`].
pub unsafe fn map_zeros(address: *mut u8, len: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: replaces only what the caller owns; accesses through volatile pointers stay valid.
    let mapped = unsafe { libc::mmap(address.cast(), len, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives advice about a range of a mapping.
///
/// # Safety
/// The range must be guest memory that the caller owns: some advice changes what is read there.
pub unsafe fn advise(address: *mut u8, len: usize, advice: i32) -> io::Result<()> {
    // SAFETY: as the caller promised.
    match unsafe { libc::madvise(address.cast(), len, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An unnamed file in memory that can be sealed.
pub fn memfd(name: &std::ffi::CStr, size: u64) -> io::Result<File> {
    // The kernel would end the process.
    if size > largest_file()? {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let create = |more: libc::c_uint| {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | more;
        // SAFETY: `name` is a C string; the result is checked before it becomes an owner.
        let fd: RawFd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
    };
    // Nobody shall run what a guest has written. Kernels before 6.3 do not know the flag.
    let fd = match create(libc::MFD_NOEXEC_SEAL) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => create(0)?,
        made => made?,
    };
    // SAFETY: a fresh descriptor that nobody else has.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size)?;
    Ok(file)
}

/// How large a file may become that this process makes.
fn largest_file() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills `limit`, which outlives the call.
    match unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } {
        0 => Ok(limit.rlim_cur),
        _ => Err(io::Error::last_os_error()),
    }
}

/// From now on nobody can write, grow or shrink the file, whoever holds it. Views from before are
/// not looked for, which would mean to look at every page: nobody may write through one any more.
pub fn seal(file: &File) -> io::Result<()> {
    let seals =
        libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: adds seals to a descriptor that `file` keeps open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Writes `len` bytes of guest memory at `address` to a file, however often the kernel takes less.
///
/// # Safety
/// The range must be mapped for the whole call.
pub unsafe fn write_from(
    file: &File,
    address: *const u8,
    len: usize,
    offset: u64,
) -> io::Result<()> {
    in_parts(len, offset, io::ErrorKind::WriteZero, |done, at| {
        // SAFETY: the kernel only reads, from the range that the caller keeps mapped.
        unsafe { libc::pwrite(file.as_raw_fd(), address.add(done).cast(), len - done, at) }
    })
}

/// Reads `len` bytes of a file to guest memory at `address`; the file must have them.
///
/// # Safety
/// The range must be mapped for the whole call, and nobody may hold a reference into it.
pub unsafe fn read_to(file: &File, address: *mut u8, len: usize, offset: u64) -> io::Result<()> {
    in_parts(len, offset, io::ErrorKind::UnexpectedEof, |done, at| {
        // SAFETY: the kernel writes to the range that the caller keeps mapped.
        unsafe { libc::pread(file.as_raw_fd(), address.add(done).cast(), len - done, at) }
    })
}

/// Calls `part` with how much is done and where in the file to go on, until `len` bytes are.
fn in_parts(
    len: usize,
    offset: u64,
    nothing: io::ErrorKind,
    part: impl Fn(usize, libc::off_t) -> isize,
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let at = libc::off_t::try_from(offset + done as u64).map_err(io::Error::other)?;
        match part(done, at) {
            0 => return Err(nothing.into()),
            count @ 1.. => done += count as usize,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Whether a page of guest memory holds nothing but zeros.
///
/// # Safety
/// A whole page must be mapped at `address`, aligned to eight bytes.
pub unsafe fn is_zero_page(address: *const u8) -> bool {
    let words = address.cast::<u64>();
    // SAFETY: within the page; volatile, for a guest may own it.
    let word = |index: usize| unsafe { words.add(index).read_volatile() };
    // Most pages with anything in them show it in the first words. The rest goes in strides,
    // without a branch for each word.
    (0..super::PAGE as usize / 8)
        .step_by(8)
        .all(|at| (at..at + 8).fold(0, |or, i| or | word(i)) == 0)
}
