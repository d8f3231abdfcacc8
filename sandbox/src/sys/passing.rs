//! Passes open files over a Unix socket, and looks at a socket that was passed.
//!
//! A template's memory goes from one process to another as file descriptors, not as bytes.
#![allow(unsafe_code)] // Received descriptors become owned ones.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use rustix::io::FdFlags;
use rustix::net::{SocketType, sockopt};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// The most files that one message can carry.
const MAX_FILES: usize = 253;

/// Sends some of `bytes` with all of `files`; returns the number of bytes sent.
pub fn send(socket: &UnixStream, bytes: &[u8], files: &[OwnedFd]) -> io::Result<usize> {
    let raw: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    socket.send_with_fds(&[bytes], &raw).map_err(io::Error::from)
}

/// Receives some bytes and the files sent with them.
pub fn receive(socket: &UnixStream, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut raw = [0; MAX_FILES];
    let mut parts = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
    // SAFETY: the one part is `buffer`, which is borrowed for the call.
    let (bytes, files) = unsafe { socket.recv_with_fds(&mut parts, &mut raw)? };
    let own = |fd: &RawFd| {
        // SAFETY: the kernel has just made the descriptor for this process, and it has no other
        // owner.
        let file = unsafe { OwnedFd::from_raw_fd(*fd) };
        // Like all descriptors that this program opens.
        rustix::io::fcntl_setfd(&file, FdFlags::CLOEXEC)?;
        Ok(file)
    };
    let files = raw.iter().take(files).map(own).collect::<io::Result<_>>()?;
    Ok((bytes, files))
}

/// Returns whether `file` is a stream socket that accepts connections.
pub fn is_listening(file: BorrowedFd<'_>) -> bool {
    sockopt::socket_acceptconn(file) == Ok(true)
        && sockopt::socket_type(file) == Ok(SocketType::STREAM)
}

/// Receives a line of at most `max` bytes. Returns the line, the bytes after it, and the files sent
/// with it.
pub fn receive_line(
    socket: &UnixStream,
    max: usize,
) -> io::Result<(Vec<u8>, Vec<u8>, Vec<OwnedFd>)> {
    let (mut bytes, mut files) = (Vec::new(), Vec::new());
    loop {
        let mut buffer = vec![0; 64 << 10];
        let (count, more) = receive(socket, &mut buffer)?;
        files.extend(more);
        bytes.extend_from_slice(&buffer[..count]);
        if let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let rest = bytes.split_off(end + 1);
            return Ok((bytes, rest, files));
        }
        if count == 0 || bytes.len() > max {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}
