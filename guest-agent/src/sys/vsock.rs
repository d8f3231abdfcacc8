//! Sockets between the guest and its host.

use std::io::Result;
use std::os::fd::{AsRawFd, OwnedFd};

use super::{check, own};

/// Listens on a vsock port.
pub fn listen(port: u32) -> Result<OwnedFd> {
    let socket = socket(libc::SOCK_NONBLOCK)?;
    let address = address(libc::VMADDR_CID_ANY, port);
    // SAFETY: the address is a sockaddr_vm of the size passed.
    unsafe {
        check(libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_vm>() as u32,
        ))?;
        check(libc::listen(socket.as_raw_fd(), 64))?;
    }
    Ok(socket)
}

/// Connects to a vsock port; the kernel gives up after two seconds.
pub fn dial(cid: u32, port: u32) -> Result<OwnedFd> {
    let socket = socket(0)?;
    let address = address(cid, port);
    // SAFETY: the address is a sockaddr_vm of the size passed.
    check(unsafe {
        libc::connect(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_vm>() as u32,
        )
    })?;
    Ok(socket)
}

/// Accepts a vsock connection and returns the socket and the peer's CID.
pub fn accept(listener: &OwnedFd) -> Result<(OwnedFd, u32)> {
    let mut address = address(0, 0);
    let mut len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: address and length live through the call and agree.
    let socket = own(unsafe {
        libc::accept4(
            listener.as_raw_fd(),
            (&raw mut address).cast(),
            &mut len,
            libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
        )
    })?;
    Ok((socket, address.svm_cid))
}

fn socket(flags: libc::c_int) -> Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags;
    // SAFETY: takes no pointer.
    own(unsafe { libc::socket(libc::AF_VSOCK, kind, 0) })
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: a sockaddr_vm is plain data for which zeroes are a valid value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}
