//! The system calls that a tap needs and the standard library lacks; the one unsafe file of this
//! device.
//!
//! Each frame moves between guest memory and the tap in one call, without a copy in the host.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_ulong};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemory as _, Permissions};

use super::wire::HEADER_LEN;
use crate::GuestMemory;
use crate::virtio::chain::Segment;

const TUNSETIFF: c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: c_ulong = 0x4004_54d0;
const TUNGETIFF: c_ulong = 0x8004_54d2;
const TUNSETVNETHDRSZ: c_ulong = 0x4004_54d8;
const IFF_TAP: c_int = 0x0002;
const IFF_PERSIST: c_int = 0x0800;
const IFF_NO_PI: c_int = 0x1000;
const IFF_VNET_HDR: c_int = 0x4000;

// The maximum number of pieces of one call on Linux.
const PIECES_MAX: usize = 1024;
/// The maximum number of pieces of guest memory for one frame; one is left for a host buffer.
pub const SEGMENTS_MAX: usize = PIECES_MAX - 1;

/// The kind of a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TapFlags(c_int);

impl TapFlags {
    /// Ethernet frames, no packet information, virtio headers.
    pub const OURS: Self = Self(IFF_TAP | IFF_NO_PI | IFF_VNET_HDR);
    /// The tap stays when its last user closes it.
    pub const PERSISTENT: Self = Self(IFF_PERSIST);

    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Attaches a newly opened node to the tap called `name`, or to a new one if the name is empty.
pub fn attach_tap(fd: BorrowedFd, name: &str) -> io::Result<()> {
    let mut request = request_for(name)?;
    request.ifr_ifru.ifru_flags = TapFlags::OURS.0 as i16;
    // SAFETY: the kernel reads and writes one request, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request) } as isize).map(drop)
}

/// Returns the name and kind of the tap behind a file descriptor, or an error if it is not a tap.
pub fn tap_facts(fd: BorrowedFd) -> io::Result<(String, TapFlags)> {
    let mut request = request_for("")?;
    // SAFETY: the kernel writes one request, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNGETIFF, &raw mut request) } as isize)?;
    let name: Vec<u8> =
        request.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8).collect();
    // SAFETY: the request was zeroed and TUNGETIFF fills in the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    // The flags are 16 bits wide, not a signed number.
    let flags = TapFlags(c_int::from(flags as u16));
    Ok((String::from_utf8_lossy(&name).into_owned(), flags))
}

pub fn set_header_len(fd: BorrowedFd) -> io::Result<()> {
    let len = HEADER_LEN as c_int;
    // SAFETY: the kernel reads one integer, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETVNETHDRSZ, &raw const len) } as isize)
        .map(drop)
}

pub fn set_offload(fd: BorrowedFd, offload: u32) -> io::Result<()> {
    // SAFETY: the argument is a number, no memory is passed.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, c_ulong::from(offload)) };
    check(done as isize).map(drop)
}

/// Sets the MTU of an interface, if one is given, and brings it up.
pub fn bring_up(name: &str, mtu: Option<u16>) -> io::Result<()> {
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    check(fd as isize)?;
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut request = request_for(name)?;
    if let Some(mtu) = mtu {
        request.ifr_ifru.ifru_mtu = mtu.into();
        // SAFETY: the kernel reads one request, which outlives the call.
        let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFMTU, &raw const request) };
        check(done as isize)?;
    }
    // SAFETY: the kernel writes one request, which outlives the call.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) };
    check(done as isize)?;
    // SAFETY: SIOCGIFFLAGS has just filled in the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as i16;
    // SAFETY: the kernel reads one request, which outlives the call.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    check(done as isize).map(drop)
}

pub fn set_nonblocking(fd: BorrowedFd) -> io::Result<()> {
    // SAFETY: no memory is passed; the descriptor is borrowed for the call.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    check(flags as isize)?;
    // SAFETY: as above.
    let done = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
    check(done as isize).map(drop)
}

/// Reads one frame into guest memory, and what does not fit there into `spill`.
pub fn read_frame(
    fd: BorrowedFd,
    memory: &GuestMemory,
    into: &[Segment],
    spill: &mut [u8],
) -> io::Result<usize> {
    let mut pieces = pieces(memory, into, Permissions::Write)?;
    pieces.push(libc::iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() });
    // SAFETY: every piece is guest memory, which stays mapped while `memory` is borrowed and which
    // Rust holds no reference into, or `spill`, which is borrowed exclusively; `pieces` outlives
    // the call.
    let got = unsafe { libc::readv(fd.as_raw_fd(), pieces.as_ptr(), pieces.len() as c_int) };
    let got = check(got)?;
    mark_dirty(memory, into, got);
    Ok(got)
}

/// Writes one frame: `first`, then guest memory.
pub fn write_frame(
    fd: BorrowedFd,
    first: &[u8],
    memory: &GuestMemory,
    rest: &[Segment],
) -> io::Result<usize> {
    let pieces = pieces_after(first, memory, rest)?;
    // SAFETY: every piece is valid for reads: `first`, which is borrowed, or guest memory, which
    // stays mapped while `memory` is borrowed; the kernel only reads, and `pieces` outlives the
    // call.
    check(unsafe { libc::writev(fd.as_raw_fd(), pieces.as_ptr(), pieces.len() as c_int) })
}

/// Sends one frame as a message: `first`, then guest memory. A peer that is gone is an error and
/// not a signal, which would end the process.
pub fn send_frame(
    fd: BorrowedFd,
    first: &[u8],
    memory: &GuestMemory,
    rest: &[Segment],
) -> io::Result<usize> {
    let mut pieces = pieces_after(first, memory, rest)?;
    // SAFETY: all zeros is a message without address, pieces and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len();
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: every piece is valid for reads, as in `write_frame`; `message` and `pieces` outlive
    // the call.
    check(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })
}

/// Returns whether a descriptor is a connected Unix socket that keeps the boundaries of messages.
pub fn is_packet_socket(fd: BorrowedFd) -> bool {
    let option = |name| {
        let mut value: c_int = 0;
        let mut len = size_of::<c_int>() as libc::socklen_t;
        let (to, len) = ((&raw mut value).cast(), &raw mut len);
        // SAFETY: the kernel writes one integer and its length, which outlive the call.
        let done = unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, to, len) };
        (done == 0).then_some(value)
    };
    // SAFETY: all zeros is an address without a family, and any address fits.
    let mut address: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: the kernel writes one address and its length, which outlive the call.
    let connected =
        unsafe { libc::getpeername(fd.as_raw_fd(), (&raw mut address).cast(), &raw mut len) == 0 };
    connected
        && option(libc::SO_DOMAIN) == Some(libc::AF_UNIX)
        && option(libc::SO_TYPE) == Some(libc::SOCK_SEQPACKET)
}

/// Creates two connected packet sockets.
#[cfg(any(test, feature = "testing"))]
pub fn packet_sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the kernel writes two descriptors into the array.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) } as isize)?;
    // SAFETY: both descriptors were just created and have no other owner.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// Describes `first`, then guest memory that is read, for the kernel.
fn pieces_after(
    first: &[u8],
    memory: &GuestMemory,
    rest: &[Segment],
) -> io::Result<Vec<libc::iovec>> {
    let mut pieces = pieces(memory, rest, Permissions::Read)?;
    let first = libc::iovec { iov_base: first.as_ptr().cast_mut().cast(), iov_len: first.len() };
    pieces.insert(0, first);
    Ok(pieces)
}

/// Describes guest memory for the kernel. Too many pieces are an error, never a truncated frame.
fn pieces(
    memory: &GuestMemory,
    segments: &[Segment],
    access: Permissions,
) -> io::Result<Vec<libc::iovec>> {
    let mut pieces = Vec::with_capacity(segments.len() + 2);
    for segment in segments {
        let slices = memory
            .get_slices(segment.address, segment.len as usize, access)
            .map_err(io::Error::other)?;
        for slice in slices {
            let slice = slice.map_err(io::Error::other)?;
            if pieces.len() == SEGMENTS_MAX {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let iov_base = slice.ptr_guard_mut().as_ptr().cast();
            pieces.push(libc::iovec { iov_base, iov_len: slice.len() });
        }
    }
    Ok(pieces)
}

/// Marks the bytes that the kernel wrote in the dirty bitmap of guest memory.
fn mark_dirty(memory: &GuestMemory, segments: &[Segment], mut len: usize) {
    for segment in segments {
        let part = len.min(segment.len as usize);
        if part == 0 {
            break;
        }
        len -= part;
        let slices = memory.get_slices(segment.address, part, Permissions::Write);
        for slice in slices.into_iter().flatten().flatten() {
            slice.bitmap().mark_dirty(0, slice.len());
        }
    }
}

/// Creates a request about the interface called `name`.
fn request_for(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all zeros is a request about an interface without a name.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero, as the kernel requires.
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

fn check(done: isize) -> io::Result<usize> {
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}
