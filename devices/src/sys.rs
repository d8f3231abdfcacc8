//! The system calls that the standard library does not offer and that several devices share; unsafe
//! code.
//!
//! Each function takes owned or borrowed types, so that the reasons why a call is sound are next to
//! it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use vm_memory::VolatileSlice;

// The maximum number of buffers of one call on Linux.
pub const IOV_MAX: usize = 1024;

/// Reads from `offset` of a file straight into guest memory. May be short.
pub fn preadv(fd: BorrowedFd, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize> {
    let guards: Vec<_> = buffers.iter().take(IOV_MAX).map(VolatileSlice::ptr_guard_mut).collect();
    let iov: Vec<_> = guards.iter().map(|guard| iovec(guard.as_ptr(), guard.len())).collect();
    // SAFETY: every iovec describes guest memory that its guard keeps mapped and writable during
    // the call, and `iov` outlives it. Guest memory is only ever accessed as volatile bytes, so the
    // kernel writing there breaks no reference.
    let done =
        unsafe { libc::preadv(fd.as_raw_fd(), iov.as_ptr(), iov.len() as i32, to_offset(offset)?) };
    let done = length(done)?;
    let mut left = done;
    for buffer in buffers {
        let here = left.min(buffer.len());
        // The kernel wrote without the dirty bitmap.
        vm_memory::bitmap::Bitmap::mark_dirty(buffer.bitmap(), 0, here);
        left -= here;
    }
    Ok(done)
}

/// Writes guest memory straight to `offset` of a file. May be short.
pub fn pwritev(fd: BorrowedFd, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize> {
    let guards: Vec<_> = buffers.iter().take(IOV_MAX).map(VolatileSlice::ptr_guard).collect();
    let iov: Vec<_> =
        guards.iter().map(|guard| iovec(guard.as_ptr().cast_mut(), guard.len())).collect();
    // SAFETY: every iovec describes guest memory that its guard keeps mapped during the call, the
    // kernel only reads it, and `iov` outlives the call.
    let done = unsafe {
        libc::pwritev(fd.as_raw_fd(), iov.as_ptr(), iov.len() as i32, to_offset(offset)?)
    };
    length(done)
}

/// How to clear a range of a file. The size of the file does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// Deallocates the blocks; they read as zeros.
    Punch,
    /// Keeps the blocks, zeroed.
    Zero,
}

/// Clears `len` bytes at `offset`.
pub fn fallocate(fd: BorrowedFd, how: Clear, offset: u64, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_KEEP_SIZE
        | match how {
            Clear::Punch => libc::FALLOC_FL_PUNCH_HOLE,
            Clear::Zero => libc::FALLOC_FL_ZERO_RANGE,
        };
    // SAFETY: no memory is passed; the descriptor is borrowed for the call.
    let done =
        unsafe { libc::fallocate(fd.as_raw_fd(), mode, to_offset(offset)?, to_offset(len)?) };
    length(done as isize).map(drop)
}

/// Returns where the next data at or after `offset` begins, if there is any.
pub fn seek_data(fd: BorrowedFd, offset: u64) -> io::Result<Option<u64>> {
    match seek(fd, offset, libc::SEEK_DATA) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        result => result.map(Some),
    }
}

/// Returns where the data around `offset` ends.
pub fn seek_hole(fd: BorrowedFd, offset: u64) -> io::Result<u64> {
    seek(fd, offset, libc::SEEK_HOLE)
}

fn seek(fd: BorrowedFd, offset: u64, whence: i32) -> io::Result<u64> {
    // SAFETY: no memory is passed; all other I/O on these files is positioned.
    let at = unsafe { libc::lseek(fd.as_raw_fd(), to_offset(offset)?, whence) };
    length(at as isize).map(|at| at as u64)
}

/// Returns whether the file system reports holes reliably. Some network file systems report
/// everything as a hole.
pub fn knows_holes(fd: BorrowedFd) -> io::Result<bool> {
    const XFS: i64 = 0x5846_5342;
    const KNOWN: [i64; 4] =
        [libc::EXT4_SUPER_MAGIC, libc::TMPFS_MAGIC, libc::BTRFS_SUPER_MAGIC, XFS];
    // SAFETY: the structure is plain data that the kernel fills.
    let mut facts: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one structure, which is borrowed exclusively.
    let done = unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut facts) };
    length(done as isize)?;
    Ok(KNOWN.contains(&facts.f_type))
}

/// Copies a range to the equal range of another file inside the kernel. Returns how far it got,
/// which is the start of the range where the kernel cannot copy.
pub fn copy_range(
    from: BorrowedFd,
    to: BorrowedFd,
    range: std::ops::Range<u64>,
) -> io::Result<u64> {
    let mut at = range.start;
    while at < range.end {
        let (mut source, mut target) = (to_offset(at)?, to_offset(at)?);
        let len = usize::try_from(range.end - at).unwrap_or(usize::MAX);
        // SAFETY: the kernel reads and writes the two offsets, which are local.
        let done = unsafe {
            libc::copy_file_range(
                from.as_raw_fd(),
                &raw mut source,
                to.as_raw_fd(),
                &raw mut target,
                len,
                0,
            )
        };
        match length(done) {
            Ok(0) => break,
            Ok(done) => at += done as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => match error.raw_os_error() {
                Some(libc::EXDEV | libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP) => break,
                _ => return Err(error),
            },
        }
    }
    Ok(at)
}

/// Makes `to` share all blocks of `from`.
pub fn clone_file(from: BorrowedFd, to: BorrowedFd) -> io::Result<()> {
    // SAFETY: the argument is a descriptor that is borrowed for the call.
    let done = unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) };
    length(done as isize).map(drop)
}

/// Locks the whole file, exclusively or shared with other readers, for as long as its open file
/// description exists. Does not block.
pub fn lock(file: &File, exclusive: bool) -> io::Result<()> {
    let kind = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    let range = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the kernel reads one flock structure, which outlives the call.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    length(done as isize).map(drop)
}

/// Turns direct I/O on or off. Other modes of the file, such as appending, are turned off.
pub fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    // SAFETY: no memory is passed; the descriptor is borrowed for the call.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) };
    length(done as isize).map(drop)
}

/// Returns the alignment that direct I/O on the file requires, if the host reports it.
pub fn direct_alignment(file: &File) -> Option<u32> {
    let mut facts = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let (fd, empty, flags) = (file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH);
    // SAFETY: the kernel reads an empty string and fills one statx structure, which outlives the
    // call.
    let done = unsafe { libc::statx(fd, empty, flags, libc::STATX_DIOALIGN, facts.as_mut_ptr()) };
    // SAFETY: zeroed bytes are a valid statx, and the kernel writes whole fields.
    let facts = unsafe { facts.assume_init() };
    let known = done == 0 && facts.stx_mask & libc::STATX_DIOALIGN != 0;
    let align = facts.stx_dio_mem_align.max(facts.stx_dio_offset_align);
    (known && align > 0).then_some(align)
}

/// Fills `buf` with random bytes of the host, without blocking. Returns how many it filled.
pub fn random(buf: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most `buf.len()` bytes to a buffer that is borrowed exclusively.
    let done = unsafe { libc::getrandom(buf.as_mut_ptr().cast(), buf.len(), libc::GRND_NONBLOCK) };
    length(done)
}

/// Creates a file without a name, as large as memory file systems allow.
#[cfg(test)]
pub fn memory_file(name: &str) -> io::Result<File> {
    use std::os::fd::{FromRawFd, OwnedFd};
    let name = std::ffi::CString::new(name)?;
    // SAFETY: the kernel reads a string that ends in NUL and outlives the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    length(fd as isize)?;
    // SAFETY: the descriptor was just created and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) }.into())
}

fn iovec(base: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base.cast(), iov_len: len }
}

fn to_offset(value: u64) -> io::Result<i64> {
    i64::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
}

fn length(done: isize) -> io::Result<usize> {
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

/// Listens at a path that does not exist yet. Only this user can connect, whatever the umask: the
/// socket has that mode before it has a name.
pub fn listen_privately(path: &Path) -> io::Result<UnixListener> {
    const OWNER_ONLY: libc::mode_t = 0o600;
    // SAFETY: the arguments are numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zeros is a valid address of no family.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    // The last byte stays zero, as the kernel requires; with an empty name the kernel would pick
    // one.
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let len = mem::size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the descriptor is the socket created above; `address` is a complete Unix socket
    // address of length `len`.
    let failed = unsafe {
        libc::fchmod(socket.as_raw_fd(), OWNER_ONLY) < 0
            || libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) < 0
            || libc::listen(socket.as_raw_fd(), libc::SOMAXCONN) < 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(UnixListener::from(socket)) }
}

#[cfg(test)]
mod listener_tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn socket_that_is_private_has_mode_0600_and_takes_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = listen_privately(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
        let _client = UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        assert_eq!(listen_privately(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let long = dir.path().join("x".repeat(120));
        assert_eq!(listen_privately(&long).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
