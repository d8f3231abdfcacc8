//! The contenders: each boots the guest in a process of its own and connects to the agent in the
//! guest.

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

/// A VMM that can boot the guest.
pub trait Peer {
    fn name(&self) -> &'static str;

    /// Boots a VM. Returns the VM after it has answered an exec, and the milliseconds from the
    /// start of its process to the answer.
    fn boot(&self, spec: &Spec) -> Outcome<(Machine, f64)>;
}

/// A booted guest in a process of its own, which is killed when this value is dropped.
pub struct Machine {
    pub process: Process,
    pub agent: Agent,
    pub way: Way,
}

/// How connections from the guest reach the host.
pub enum Way {
    /// A connection to `port` arrives at the Unix socket `<path>_<port>`.
    Unix(std::path::PathBuf),
    /// A connection arrives at the vsock of the host's kernel.
    Kernel,
}

/// A listener for connections from the guest to one port.
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
        // A vsock socket is only read and written here, and the standard library does that for
        // every stream socket in the same way.
        Ok(UnixStream::from(sys::accept(fd, deadline)?))
    }
}

/// A child process that is killed and waited for on drop.
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
