//! System calls, in the words of this crate.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send as send_on, sockopt,
};
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};
use rustix::rand::GetRandomFlags;
use rustix::thread::{CapabilitySet, CapabilitySets};

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
/// The longest wait that the call for milliseconds takes.
const WAIT_MAX: Duration = Duration::from_millis(i32::MAX as u64);

impl Poller {
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
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
        let mut events = epoll::EventFlags::empty();
        events.set(epoll::EventFlags::IN | epoll::EventFlags::RDHUP, after.readable);
        events.set(epoll::EventFlags::OUT, after.writable);
        let data = epoll::EventData::new_u64(token.into());
        let done = match (before == none, after == none) {
            _ if before == after => Ok(()),
            (true, _) => epoll::add(&self.epoll, fd, data, events),
            (_, true) => epoll::delete(&self.epoll, fd),
            _ => epoll::modify(&self.epoll, fd, data, events),
        };
        Ok(done?)
    }

    /// Waits for events, at most as long as `timeout`, and returns them.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Vec<Ready>> {
        // Rounded up by the callee, so that a deadline has passed when the wait ends.
        let timeout = timeout.map(|time| Timespec::try_from(time.min(WAIT_MAX)));
        let timeout = timeout.transpose().map_err(io::Error::other)?;
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let room = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.epoll, room, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = |event: epoll::Event| {
            let (flags, data) = (event.flags, event.data);
            let any = |wanted| flags.intersects(wanted);
            let broken = any(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
            let readable = broken || any(epoll::EventFlags::IN | epoll::EventFlags::RDHUP);
            let writable = broken || any(epoll::EventFlags::OUT);
            Ready { token: Token::from(data.u64()), readable, writable }
        };
        Ok(events.into_iter().map(ready).collect())
    }
}

/// Takes a descriptor that the caller of this process left open under a number.
#[allow(unsafe_code)]
pub fn inherit(number: RawFd) -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;

    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: borrowed for two calls, which fail if there is no such descriptor.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = rustix::io::fcntl_getfd(fd)?;
    rustix::io::fcntl_setfd(fd, flags | rustix::io::FdFlags::CLOEXEC)?;
    // SAFETY: the descriptor is open, and was left to this process for this use; `main` takes each
    // number once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

pub fn set_nonblocking(fd: BorrowedFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// Returns whether a descriptor is a Unix socket that keeps the boundaries of messages and tells
/// when its peer is gone.
pub fn is_packet_socket(fd: BorrowedFd) -> bool {
    sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
        && sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
}

/// Asks for room for `bytes` of frames on their way to the peer. The kernel may give less.
pub fn set_send_room(fd: BorrowedFd, bytes: usize) {
    let _ = sockopt::set_socket_send_buffer_size(fd, bytes);
}

/// Asks for room for `bytes` that have arrived and were not read. The kernel may give less.
pub fn set_receive_room(fd: BorrowedFd, bytes: usize) {
    let _ = sockopt::set_socket_recv_buffer_size(fd, bytes);
}

/// Receives a message and returns its whole length, which may exceed the buffer's. Zero means that
/// the peer is gone.
pub fn receive(fd: BorrowedFd, buffer: &mut [u8]) -> io::Result<usize> {
    let (_, whole) = recv(fd, buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC)?;
    Ok(whole)
}

/// Sends a message.
pub fn send(fd: BorrowedFd, message: &[u8]) -> io::Result<usize> {
    Ok(send_on(fd, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Begins to connect to an address. The socket is writable when the attempt has ended.
pub fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(error) => Err(error.into()),
    }
}

/// Fills a buffer with random bytes.
pub fn random<const LEN: usize>() -> io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    let got = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
    if got == LEN { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Ends this process when its parent ends.
pub fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Keeps this process from gaining privileges by executing a program.
pub fn forbid_new_privileges() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

/// Keeps other processes of the same user from reading this one's memory.
pub fn forbid_dumps() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Sets both values of a resource limit, or less if the hard limit is lower.
pub fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let hard = rustix::process::getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let value = Some(value.min(hard));
    Ok(rustix::process::setrlimit(resource, Rlimit { current: value, maximum: value })?)
}

/// Gives up every capability, now and for all programs that this process might execute.
pub fn drop_capabilities() -> io::Result<()> {
    // The bounding set first: shrinking it takes a capability itself. Without that capability there
    // is nothing to drop.
    for number in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if rustix::thread::remove_capability_from_bounding_set(capability).is_err() {
            break;
        }
    }
    rustix::thread::clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}
