//! Waits for the ready signal of an agent.
//!
//! The agent connects once and sends its welcome, so that nobody polls a booting guest.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pvmm_devices::listen_privately;
use pvmm_guest_agent::limits::{READY_PORT, VERSION};
use pvmm_guest_agent::message::Welcome;

use super::dial;
use super::error::AgentError;
use crate::sys::wait_readable;

/// The time limit of one caller for its frame, so that it does not delay others.
const FRAME_TIME: Duration = Duration::from_secs(2);

/// A listener on the socket to which a VM's vsock device forwards the agent's ready signal.
pub struct ReadyListener {
    listener: UnixListener,
    path: PathBuf,
}

impl ReadyListener {
    /// Binds `<uds>_1025`. Must be called before the guest runs.
    pub fn bind(uds: &Path) -> Result<Self, AgentError> {
        let mut path = OsString::from(uds);
        path.push(format!("_{READY_PORT}"));
        let path = PathBuf::from(path);
        let listen = || {
            let listener = listen_privately(&path)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        match listen() {
            Ok(listener) => Ok(Self { listener, path }),
            Err(source) => Err(AgentError::Listen { path, source }),
        }
    }

    /// Waits for the agent's welcome. A caller that sends anything else is ignored.
    pub fn wait(&self, deadline: Instant) -> Result<Welcome, AgentError> {
        let failed = |source| AgentError::Listen { path: self.path.clone(), source };
        let left = || Some(deadline.saturating_duration_since(Instant::now()));
        while wait_readable(&self.listener, left()).map_err(failed)? {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                Err(e) => return Err(failed(e)),
            };
            let patience = deadline.min(Instant::now() + FRAME_TIME);
            match dial::read_welcome(&socket, patience) {
                Ok(welcome) if welcome.version == VERSION => return Ok(welcome),
                _ => {}
            }
        }
        Err(AgentError::NotReady)
    }
}

impl AsFd for ReadyListener {
    /// The descriptor is readable when a connection waits, for callers that poll other descriptors
    /// too.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for ReadyListener {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
