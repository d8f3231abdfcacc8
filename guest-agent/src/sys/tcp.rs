//! Non-blocking TCP: start to connect, get the result, close one direction.
//!
//! The standard library's connect blocks, which the agent's event loop must not.

use std::io::{Error, Result};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use super::{check, own};

/// Starts a TCP connection. Its result is available when the socket becomes writable.
pub fn connect(address: &SocketAddr) -> Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes no pointer.
    let socket = own(unsafe { libc::socket(family, kind, 0) })?;
    let on: libc::c_int = 1;
    // SAFETY: both addresses are plain data for which zeroes are a valid value; option and address
    // live through the calls with the sizes passed.
    let result = unsafe {
        // Small messages are sent at once: forwarding must not add to their delay.
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NODELAY,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        );
        match address {
            SocketAddr::V4(v4) => {
                let mut raw: libc::sockaddr_in = std::mem::zeroed();
                raw.sin_family = libc::AF_INET as libc::sa_family_t;
                raw.sin_port = v4.port().to_be();
                raw.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                let len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
                libc::connect(socket.as_raw_fd(), (&raw const raw).cast(), len)
            }
            SocketAddr::V6(v6) => {
                let mut raw: libc::sockaddr_in6 = std::mem::zeroed();
                raw.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                raw.sin6_port = v6.port().to_be();
                raw.sin6_addr.s6_addr = v6.ip().octets();
                let len = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
                libc::connect(socket.as_raw_fd(), (&raw const raw).cast(), len)
            }
        }
    };
    match check(result) {
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(socket),
        other => other.map(|_| socket),
    }
}

/// Returns whether a started connection is established (true) or still pending (false); fails if it
/// was refused.
pub fn connect_result(socket: &OwnedFd) -> Result<bool> {
    let mut errno: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: value and length live through the call and agree; a sockaddr_storage is plain data.
    unsafe {
        check(libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ERROR,
            (&raw mut errno).cast(),
            &mut len,
        ))?;
        if errno != 0 {
            return Err(Error::from_raw_os_error(errno));
        }
        let mut peer: libc::sockaddr_storage = std::mem::zeroed();
        let mut len = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        Ok(libc::getpeername(socket.as_raw_fd(), (&raw mut peer).cast(), &mut len) == 0)
    }
}

/// Ends the writing direction; reading goes on.
pub fn end_writing(socket: &OwnedFd) {
    // SAFETY: takes no pointer. A peer that is gone needs no notification.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_WR) };
}
