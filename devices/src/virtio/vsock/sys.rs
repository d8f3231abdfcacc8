//! The socket calls that the standard library lacks: scattered guest memory, `MSG_NOSIGNAL`, and a
//! connect that never blocks.
//!
//! This is the one unsafe file of this device. `read` and `write` through vm-memory would be safe,
//! but cost one call per guest buffer and raise SIGPIPE when a host client hangs up.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr;

use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemory as _, Permissions};

use super::host::MAX_PIECES;
use crate::GuestMemory;
use crate::virtio::chain::Segment;

/// The maximum number of slices of one call. A piece that crosses from one memory region into the
/// next becomes two slices.
const MAX_SLICES: usize = MAX_PIECES + 16;
const NO_PIECE: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };

/// Reads from a socket into guest memory, in order; zero is the end of the stream.
pub fn receive(fd: BorrowedFd, memory: &GuestMemory, into: &[Segment]) -> io::Result<usize> {
    let (mut pieces, count) = pieces(memory, into, Permissions::Write)?;
    let mut message = message(&mut pieces[..count]);
    // SAFETY: every piece lies in guest memory, which stays mapped while `memory` is borrowed and
    // which Rust holds no reference into; `message` and the pieces it points to outlive the call.
    // Without a control buffer the kernel drops any descriptors that a client tries to pass.
    let got =
        check(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })?;
    mark_dirty(memory, into, got);
    Ok(got)
}

/// Writes guest memory to a socket. Returns how many bytes were accepted.
pub fn send_guest(fd: BorrowedFd, memory: &GuestMemory, from: &[Segment]) -> io::Result<usize> {
    let (mut pieces, count) = pieces(memory, from, Permissions::Read)?;
    send_pieces(fd, &mut pieces[..count])
}

/// Writes two slices to a socket as one. Returns how many bytes were accepted.
pub fn send(fd: BorrowedFd, first: &[u8], second: &[u8]) -> io::Result<usize> {
    let piece = |bytes: &[u8]| libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    send_pieces(fd, &mut [piece(first), piece(second)])
}

/// Copies the bytes that a socket holds without consuming them; zero is the end of the stream.
pub fn peek(fd: BorrowedFd, buf: &mut [u8]) -> io::Result<usize> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the buffer is valid for writes of its length for the whole call.
    check(unsafe { libc::recv(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), flags) })
}

/// Connects to a Unix socket without blocking; a full backlog is `WouldBlock`.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zeros is a valid address of no family.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    // The last byte stays zero, as the kernel requires.
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let len = mem::size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: `address` is a complete Unix socket address of length `len`.
    let done = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixStream::from(socket))
}

fn send_pieces(fd: BorrowedFd, pieces: &mut [libc::iovec]) -> io::Result<usize> {
    let message = message(pieces);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: every piece is valid for reads: a slice borrowed by the caller, or guest memory that
    // stays mapped while the caller borrows it; the kernel only reads.
    check(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })
}

fn message(pieces: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all zeros is a message without address, pieces or control data.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message
}

fn pieces(
    memory: &GuestMemory,
    segments: &[Segment],
    access: Permissions,
) -> io::Result<([libc::iovec; MAX_SLICES], usize)> {
    let mut pieces = [NO_PIECE; MAX_SLICES];
    let mut count = 0;
    for segment in segments.iter().take(MAX_PIECES) {
        let slices = memory
            .get_slices(segment.address, segment.len as usize, access)
            .map_err(io::Error::other)?;
        for slice in slices {
            let slice = slice.map_err(io::Error::other)?;
            if count == MAX_SLICES {
                return Ok((pieces, count));
            }
            let iov_base = slice.ptr_guard_mut().as_ptr().cast();
            pieces[count] = libc::iovec { iov_base, iov_len: slice.len() };
            count += 1;
        }
    }
    Ok((pieces, count))
}

/// Marks the bytes that the kernel wrote in the dirty bitmap of guest memory.
fn mark_dirty(memory: &GuestMemory, segments: &[Segment], mut len: usize) {
    for segment in segments {
        let part = len.min(segment.len as usize);
        len -= part;
        let slices = memory.get_slices(segment.address, part, Permissions::Write);
        for slice in slices.into_iter().flatten().flatten() {
            slice.bitmap().mark_dirty(0, slice.len());
        }
        if len == 0 {
            break;
        }
    }
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
