//! The contenders: each boots the same guest in a process of its own and leads to the same agent.

pub mod firecracker;
pub mod pvmm;
pub mod qemu;

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Child;
use std::time::Instant;

use ::pvmm::agent::Agent;

use crate::board::Outcome;
use crate::guest::Spec;
use crate::sys;

/// A way to boot a guest.
pub trait Peer {
    fn name(&self) -> &'static str;

    /// A running machine that has answered an exec, and how many milliseconds after the start it
    /// did.
    fn boot(&self, spec: &Spec) -> Outcome<(Machine, f64)>;
}

/// A booted guest in a process of its own, which ends with this.
pub struct Machine {
    pub process: Process,
    pub agent: Agent,
    pub way: Way,
}

/// How the guest's own connections reach the host.
pub enum Way {
    /// `<path>_<port>` is where connections to `port` arrive.
    Unix(std::path::PathBuf),
    /// The host kernel's own vsock.
    Kernel,
}

/// Where a guest's connection to one port arrives.
pub enum Ear {
    Unix(UnixListener),
    Kernel(OwnedFd),
}

impl Way {
    pub fn listen(&self, port: u32) -> Outcome<Ear> {
        Ok(match self {
            Way::Unix(path) => {
                let mut name = OsString::from(path);
                name.push(format!("_{port}"));
                let _ = std::fs::remove_file(&name);
                Ear::Unix(UnixListener::bind(name)?)
            }
            Way::Kernel => Ear::Kernel(sys::vsock_listen(port)?),
        })
    }
}

impl Ear {
    pub fn accept(&self, deadline: Instant) -> Outcome<UnixStream> {
        let fd = match self {
            Ear::Unix(listener) => listener.as_fd(),
            Ear::Kernel(fd) => fd.as_fd(),
        };
        // Only read and written: to the standard library one stream socket is like another.
        Ok(UnixStream::from(sys::accept(fd, deadline)?))
    }
}

/// A child process, killed and waited for at the end.
pub struct Process(pub Child);

impl Process {
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
