//! The host side: Unix sockets, with the protocol of Firecracker's clients.
//!
//! A client connects to the one listening socket and writes `CONNECT <port>\n`; a guest that
//! connects to port P reaches the listener at `<that path>_P`. The traits separate these sockets
//! from the connection table so that tests can use scripted ones.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::config::MAX_UDS_PATH;
use super::sys;
use crate::GuestMemory;
use crate::virtio::chain::Segment;

/// The longest request line, newline included.
pub const MAX_LINE: usize = 32;

/// The maximum number of pieces of guest memory of one call.
pub const MAX_PIECES: usize = 64;

/// Accepts and opens the host's connections.
pub trait Host: Send {
    type Stream: Stream;

    /// Returns the next waiting client, or `None` if there is none.
    fn accept(&mut self) -> io::Result<Option<Self::Stream>>;

    /// Connects to the listener of `port`, without blocking.
    fn dial(&mut self, port: u32) -> io::Result<Self::Stream>;
}

/// One connection of the host. No call blocks.
pub trait Stream: Send {
    /// Copies the bytes that can be read without consuming them; zero is the end.
    fn peek(&mut self, buf: &mut [u8]) -> io::Result<usize>;
    /// Consumes exactly the bytes that a peek showed.
    fn skip(&mut self, len: usize) -> io::Result<()>;
    /// Reads into guest memory, at most `MAX_PIECES` of it; zero is the end. A short read means
    /// that there is no more now.
    fn receive(&mut self, memory: &GuestMemory, into: &[Segment]) -> io::Result<usize>;
    /// Writes from guest memory. Returns how many bytes were accepted.
    fn send_guest(&mut self, memory: &GuestMemory, from: &[Segment]) -> io::Result<usize>;
    /// Writes two slices as one. Returns how many bytes were accepted.
    fn send(&mut self, first: &[u8], second: &[u8]) -> io::Result<usize>;
    /// Shuts down one direction.
    fn shutdown(&mut self, how: Shutdown);
}

/// The result of parsing the first bytes of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// There is no newline yet, and still room for one.
    Partial,
    /// A request for `port` that ends after `len` bytes.
    Connect { port: u32, len: usize },
    /// Not a request.
    Bad,
}

/// Parses `CONNECT <port>\n` at the start of `bytes`.
pub fn parse_line(bytes: &[u8]) -> Line {
    let bytes = &bytes[..bytes.len().min(MAX_LINE)];
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
        return if bytes.len() < MAX_LINE { Line::Partial } else { Line::Bad };
    };
    let mut words =
        bytes[..end].split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let (verb, port, rest) = (words.next(), words.next(), words.next());
    let (Some(verb), Some(port), None) = (verb, port, rest) else {
        return Line::Bad;
    };
    // `parse` alone would also accept a sign.
    let port = str::from_utf8(port).ok().filter(|port| port.bytes().all(|b| b.is_ascii_digit()));
    match port.and_then(|port| port.parse().ok()) {
        Some(port) if verb.eq_ignore_ascii_case(b"connect") => Line::Connect { port, len: end + 1 },
        _ => Line::Bad,
    }
}

/// The Unix sockets of one device.
pub struct UnixHost {
    listener: UnixListener,
    path: PathBuf,
    prefix: PathBuf,
    /// The open folder of the sockets, if some port's path is longer than a socket's address.
    folder: Option<File>,
}

impl UnixHost {
    /// Serves clients of `listener` at `path`, and connects guests to the sockets below `prefix`.
    pub fn new(listener: UnixListener, path: PathBuf, prefix: PathBuf) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let folder = if port_path(&prefix, u32::MAX).as_os_str().len() > MAX_UDS_PATH {
            Some(open_folder(&prefix)?)
        } else {
            None
        };
        Ok(Self { listener, path, prefix, folder })
    }

    /// Returns the address of the socket that serves `port`, through the open folder where the path
    /// is too long.
    fn address(&self, port: u32) -> PathBuf {
        let path = port_path(&self.prefix, port);
        match (&self.folder, path.file_name()) {
            (Some(folder), Some(name)) if path.as_os_str().len() > MAX_UDS_PATH => {
                Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name)
            }
            _ => path,
        }
    }

    /// Returns the path that host clients connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn listener_fd(&self) -> RawFd {
        self.listener.as_raw_fd()
    }
}

fn open_folder(prefix: &Path) -> io::Result<File> {
    let folder = prefix.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY);
    options.open(folder.unwrap_or(Path::new(".")))
}

/// Returns the path that serves a port: the prefix and a number, so no port of the guest can leave
/// it.
pub fn port_path(prefix: &Path, port: u32) -> PathBuf {
    let mut path = OsString::from(prefix);
    path.push(format!("_{port}"));
    PathBuf::from(path)
}

impl Host for UnixHost {
    type Stream = UnixStream;

    fn accept(&mut self) -> io::Result<Option<UnixStream>> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    return Ok(Some(stream));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn dial(&mut self, port: u32) -> io::Result<UnixStream> {
        sys::connect(&self.address(port))
    }
}

impl Stream for UnixStream {
    fn peek(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        sys::peek(self.as_fd(), buf)
    }

    fn skip(&mut self, len: usize) -> io::Result<()> {
        self.read_exact(&mut [0; MAX_LINE][..len])
    }

    fn receive(&mut self, memory: &GuestMemory, into: &[Segment]) -> io::Result<usize> {
        sys::receive(self.as_fd(), memory, into)
    }

    fn send_guest(&mut self, memory: &GuestMemory, from: &[Segment]) -> io::Result<usize> {
        sys::send_guest(self.as_fd(), memory, from)
    }

    fn send(&mut self, first: &[u8], second: &[u8]) -> io::Result<usize> {
        sys::send(self.as_fd(), first, second)
    }

    fn shutdown(&mut self, how: Shutdown) {
        // It only fails for a socket whose peer is gone, which needs no shutdown.
        let _ = UnixStream::shutdown(self, how);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn line_of_a_request_gives_port_and_length() {
        assert_eq!(parse_line(b"CONNECT 1024\n"), Line::Connect { port: 1024, len: 13 });
        assert_eq!(parse_line(b"connect 0\r\ndata"), Line::Connect { port: 0, len: 11 });
        assert_eq!(
            parse_line(b"CONNECT 4294967295\nx\n"),
            Line::Connect { port: u32::MAX, len: 19 }
        );
    }

    #[test]
    fn e14_line_that_is_no_request_is_bad() {
        let lines: [&[u8]; 10] = [
            b"\n",
            b"CONNECT\n",
            b"CONNECT \n",
            b"CONNECT 4294967296\n",
            b"CONNECT -1\n",
            b"CONNECT +1\n",
            b"CONNECT 1 2\n",
            b"LISTEN 1\n",
            b"CONNECT \xff\xff\n",
            &[b'x'; MAX_LINE],
        ];
        for line in lines {
            assert_eq!(parse_line(line), Line::Bad, "{line:?}");
        }
    }

    #[test]
    fn e14_line_without_newline_is_partial_up_to_32_bytes() {
        assert_eq!(parse_line(b""), Line::Partial);
        assert_eq!(parse_line(&[b' '; MAX_LINE - 1]), Line::Partial);
        assert_eq!(parse_line(&[b' '; MAX_LINE]), Line::Bad);
        let mut late = [b' '; MAX_LINE + 1];
        late[MAX_LINE] = b'\n';
        assert_eq!(parse_line(&late), Line::Bad);
    }

    #[test]
    fn e13_path_of_any_port_is_the_prefix_and_a_number() {
        let prefix = Path::new("/run/vm/vsock");
        assert_eq!(port_path(prefix, 0), Path::new("/run/vm/vsock_0"));
        assert_eq!(port_path(prefix, u32::MAX), Path::new("/run/vm/vsock_4294967295"));
    }

    #[test]
    fn port_below_a_path_that_leaves_no_room_for_it_is_reached() {
        let dir = tempfile::tempdir().unwrap();
        // As long as a socket's path can be, so that no port fits after it.
        let folder = dir.path().join("f".repeat(MAX_UDS_PATH - dir.path().as_os_str().len() - 3));
        std::fs::create_dir(&folder).unwrap();
        let prefix = folder.join("v");
        assert_eq!(prefix.as_os_str().len(), MAX_UDS_PATH);
        let listener = UnixListener::bind(&prefix).unwrap();
        let mut host = UnixHost::new(listener, prefix.clone(), prefix).unwrap();
        assert_eq!(host.dial(52).unwrap_err().kind(), io::ErrorKind::NotFound);
        // A server of the port cannot use the long path either, so it binds elsewhere and renames.
        let bound = dir.path().join("s");
        let served = UnixListener::bind(&bound).unwrap();
        std::fs::rename(bound, folder.join("v_52")).unwrap();
        host.dial(52).unwrap();
        served.accept().unwrap();
    }

    proptest! {
        #[test]
        fn line_of_any_bytes_never_claims_more_than_it_was_given(bytes: Vec<u8>) {
            if let Line::Connect { len, .. } = parse_line(&bytes) {
                prop_assert!(len <= bytes.len() && len <= MAX_LINE);
                prop_assert_eq!(bytes[len - 1], b'\n');
            }
        }
    }
}
