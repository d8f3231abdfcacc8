//! The system calls that the standard library lacks; the one unsafe file of this crate.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::token::Token;

/// The events that a descriptor is watched for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    pub readable: bool,
    pub writable: bool,
}

/// An event of a watched descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    pub token: Token,
    pub readable: bool,
    pub writable: bool,
}

/// A set of watched descriptors. An event is reported for as long as it holds.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

const EVENTS_MAX: usize = 256;

impl Poller {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the descriptor was just created and has no other owner.
        Ok(Self { epoll: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Changes what a descriptor is watched for. One that is watched for nothing is not in the set:
    /// the kernel would report its errors again and again.
    pub fn watch(
        &self,
        fd: BorrowedFd,
        token: Token,
        before: Interest,
        after: Interest,
    ) -> io::Result<()> {
        let none = Interest::default();
        let act = match (before == none, after == none) {
            _ if before == after => return Ok(()),
            (true, _) => libc::EPOLL_CTL_ADD,
            (_, true) => libc::EPOLL_CTL_DEL,
            _ => libc::EPOLL_CTL_MOD,
        };
        let readable = if after.readable { libc::EPOLLIN | libc::EPOLLRDHUP } else { 0 };
        let writable = if after.writable { libc::EPOLLOUT } else { 0 };
        let mut event =
            libc::epoll_event { events: (readable | writable) as u32, u64: token.into() };
        // SAFETY: the kernel reads one event, which outlives the call.
        let done =
            unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), act, fd.as_raw_fd(), &raw mut event) };
        check(done).map(drop)
    }

    /// Waits for events, at most as long as `timeout`, and returns them.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Vec<Ready>> {
        // Rounded up, so that a deadline has passed when the wait ends.
        let millis = |time: Duration| c_int::try_from(time.as_micros().div_ceil(1000));
        let timeout = timeout.map_or(-1, |time| millis(time).unwrap_or(c_int::MAX));
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        // SAFETY: the kernel writes at most EVENTS_MAX events into the array.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                EVENTS_MAX as c_int,
                timeout,
            )
        };
        let count = match check(count) {
            Ok(count) => count as usize,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        let ready = |event: &libc::epoll_event| {
            let bits = event.events as c_int;
            let broken = bits & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
            let readable = broken || bits & (libc::EPOLLIN | libc::EPOLLRDHUP) != 0;
            let writable = broken || bits & libc::EPOLLOUT != 0;
            Ready { token: Token::from(event.u64), readable, writable }
        };
        Ok(events.iter().take(count).map(ready).collect())
    }
}

/// Takes a descriptor that the caller of this process left open under a number.
pub fn inherit(number: RawFd) -> io::Result<OwnedFd> {
    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: no memory is passed; the call fails if there is no such descriptor.
    let flags = check(unsafe { libc::fcntl(number, libc::F_GETFD) })?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(number, libc::F_SETFD, flags | libc::FD_CLOEXEC) })?;
    // SAFETY: the descriptor is open, and was left to this process for this use; `main` takes each
    // number once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

pub fn set_nonblocking(fd: BorrowedFd) -> io::Result<()> {
    // SAFETY: no memory is passed.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: no memory is passed.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) }).map(drop)
}

/// Returns whether a descriptor is a Unix socket that keeps the boundaries of messages and tells
/// when its peer is gone.
pub fn is_packet_socket(fd: BorrowedFd) -> bool {
    option(fd, libc::SO_TYPE).is_ok_and(|kind| kind == libc::SOCK_SEQPACKET)
        && option(fd, libc::SO_DOMAIN).is_ok_and(|domain| domain == libc::AF_UNIX)
}

fn option(fd: BorrowedFd, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes one integer and its length, which outlive the call.
    let done = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    check(done).map(|_| value)
}

/// Asks for room for `bytes` of frames on their way to the peer. The kernel may give less.
pub fn set_send_room(fd: BorrowedFd, bytes: c_int) {
    set_room(fd, libc::SO_SNDBUF, bytes);
}

/// Asks for room for `bytes` that have arrived and were not read. The kernel may give less.
pub fn set_receive_room(fd: BorrowedFd, bytes: c_int) {
    set_room(fd, libc::SO_RCVBUF, bytes);
}

fn set_room(fd: BorrowedFd, name: c_int, bytes: c_int) {
    // SAFETY: the kernel reads one integer, which outlives the call.
    unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw const bytes).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
}

/// Receives a message and returns its whole length, which may exceed the buffer's. Zero means that
/// the peer is gone.
pub fn receive(fd: BorrowedFd, buffer: &mut [u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: the kernel writes at most the buffer's length into it.
    let got =
        unsafe { libc::recv(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) };
    check_len(got)
}

/// Sends a message.
pub fn send(fd: BorrowedFd, message: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel reads the message, which is borrowed.
    let sent = unsafe { libc::send(fd.as_raw_fd(), message.as_ptr().cast(), message.len(), flags) };
    check_len(sent)
}

/// Begins to connect to an address. The socket is writable when the attempt has ended.
pub fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let fd = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let done = match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            connect_raw(socket.as_fd(), &raw)
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            connect_raw(socket.as_fd(), &raw)
        }
    };
    match done {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(TcpStream::from(socket)),
    }
}

/// `T` is the address structure of the socket's family.
fn connect_raw<T>(socket: BorrowedFd, address: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads one address of the given length, which outlives the call.
    let done =
        unsafe { libc::connect(socket.as_raw_fd(), std::ptr::from_ref(address).cast(), len) };
    check(done).map(drop)
}

/// Fills a buffer with random bytes.
pub fn random<const LEN: usize>() -> io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    // SAFETY: the kernel writes at most the buffer's length into it.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), LEN, 0) };
    if check_len(got)? == LEN { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Ends this process when its parent ends.
pub fn die_with_parent() -> io::Result<()> {
    prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong)
}

/// Keeps this process from gaining privileges by executing a program.
pub fn forbid_new_privileges() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// Keeps other processes of the same user from reading this one's memory.
pub fn forbid_dumps() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 0)
}

fn prctl(option: c_int, argument: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the options used here take numbers only.
    check(unsafe { libc::prctl(option, argument, 0, 0, 0) }).map(drop)
}

/// Sets both values of a resource limit, or less if the hard limit is lower.
pub fn limit(resource: libc::__rlimit_resource_t, value: u64) -> io::Result<()> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one structure, which outlives the call.
    check(unsafe { libc::getrlimit(resource, &raw mut now) })?;
    let value = value.min(now.rlim_max);
    let new = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: the kernel reads one structure, which outlives the call.
    check(unsafe { libc::setrlimit(resource, &raw const new) }).map(drop)
}

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: c_int,
}

const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

/// Gives up every capability, now and for all programs that this process might execute.
pub fn drop_capabilities() -> io::Result<()> {
    // The bounding set first: shrinking it takes a capability itself. Without that capability there
    // is nothing to drop.
    for capability in 0..64 {
        // SAFETY: the argument is a number.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
    prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong)?;
    let header = CapabilityHeader { version: CAPABILITY_VERSION_3, pid: 0 };
    // Two words each of effective, permitted and inheritable capabilities, all empty.
    let data = [0u32; 6];
    // SAFETY: the kernel reads a header and, for this version, six words; both outlive the call.
    let done = unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) };
    check(done as c_int).map(drop)
}

fn check(done: c_int) -> io::Result<c_int> {
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

fn check_len(done: isize) -> io::Result<usize> {
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}
