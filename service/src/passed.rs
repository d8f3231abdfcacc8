//! Sockets that another program has opened for the server and passes to it at its start, as systemd
//! does for a socket unit.
//!
//! The server then needs no right to open them, and starts when the first client comes.

use std::env;
use std::os::fd::{AsFd, OwnedFd};

use pvmm_sandbox::Failure;
use pvmm_sandbox::sys::{passing, process};

/// The number of the first socket. The others follow.
const FIRST: i32 = 3;
/// The most sockets that are taken.
const MOST: i32 = 64;

/// Takes the sockets that were passed to this process; none, if the variables `LISTEN_PID` and
/// `LISTEN_FDS` are not meant for it. To be called once, before other files are opened.
pub fn take() -> Result<Vec<OwnedFd>, Failure> {
    let text = |name| env::var(name).unwrap_or_default();
    let count = count(&text("LISTEN_PID"), &text("LISTEN_FDS"), std::process::id())?;
    (FIRST..FIRST + count).map(socket).collect()
}

/// Returns how many sockets are for the process `own`.
fn count(pid: &str, sockets: &str, own: u32) -> Result<i32, Failure> {
    // A process that inherits the variables of its parent is not the one that they name.
    if pid.parse() != Ok(own) {
        return Ok(0);
    }
    let count = sockets.parse().ok().filter(|count| (0..=MOST).contains(count));
    count.ok_or_else(|| {
        Failure::usage(format!("LISTEN_FDS={sockets}: is not a number from 0 to {MOST}"))
            .hint("start the service by its socket unit, or unset LISTEN_PID")
    })
}

fn socket(number: i32) -> Result<OwnedFd, Failure> {
    let refused = |why: String| {
        Failure::usage(format!("socket {number} of LISTEN_FDS: {why}"))
            .hint("write ListenStream= and Accept=no in the socket unit")
    };
    let socket = process::inherited(number).map_err(|error| refused(error.to_string()))?;
    if !passing::is_listening(socket.as_fd()) {
        return Err(refused("accepts no connections".into()));
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_another_process_are_not_taken() {
        assert_eq!(count("7", "2", 7).unwrap(), 2);
        for pid in ["", "8", "-7", "7x"] {
            assert_eq!(count(pid, "2", 7).unwrap(), 0, "{pid}");
        }
    }

    #[test]
    fn number_of_sockets_that_is_none_is_refused() {
        for sockets in ["", "-1", "65", "two"] {
            assert!(count("7", sockets, 7).unwrap_err().message.contains("LISTEN_FDS"));
        }
    }

    #[test]
    fn descriptor_that_accepts_no_connections_is_refused() {
        let number = |fd: OwnedFd| std::os::fd::IntoRawFd::into_raw_fd(fd);
        let file = std::fs::File::open("/dev/null").unwrap();
        let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        for fd in [OwnedFd::from(file), OwnedFd::from(datagrams)] {
            assert!(socket(number(fd)).unwrap_err().message.contains("accepts no connections"));
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(socket(number(listener.into())).is_ok());
        assert!(socket(1).is_err());
    }
}
