//! Passes open files over a Unix socket, and looks at a socket that was passed.
//!
//! A template's memory goes from one process to another as file descriptors, not as bytes.
#![allow(unsafe_code)] // Received descriptors become owned ones; getsockopt.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

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
        // SAFETY: no memory is passed. Close-on-exec, like all descriptors that this program opens.
        match unsafe { libc::fcntl(*fd, libc::F_SETFD, libc::FD_CLOEXEC) } {
            0 => Ok(file),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let files = raw.iter().take(files).map(own).collect::<io::Result<_>>()?;
    Ok((bytes, files))
}

/// Returns whether `file` is a stream socket that accepts connections.
pub fn is_listening(file: BorrowedFd<'_>) -> bool {
    let has = |option, wanted: libc::c_int| {
        let (mut value, mut size) = (0, size_of::<libc::c_int>() as libc::socklen_t);
        let place = (&raw mut value).cast();
        // SAFETY: the kernel writes at most `size` bytes to `value`, and both outlive the call.
        let result = unsafe {
            libc::getsockopt(file.as_raw_fd(), libc::SOL_SOCKET, option, place, &mut size)
        };
        result == 0 && value == wanted
    };
    has(libc::SO_ACCEPTCONN, 1) && has(libc::SO_TYPE, libc::SOCK_STREAM)
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
