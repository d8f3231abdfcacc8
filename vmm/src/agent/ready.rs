//! The host's ear for an agent that has just become ready.
//! The agent dials once and says its welcome, so that nobody polls a booting guest.

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

/// How long one caller may take over its one frame; others must not be kept waiting by it.
const FRAME_TIME: Duration = Duration::from_secs(2);

/// Listens where a VM's vsock device leads the agent's ready signal.
pub struct ReadyListener {
    listener: UnixListener,
    path: PathBuf,
}

impl ReadyListener {
    /// Binds `<uds>_1025`; to be called before the guest runs.
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

    /// Waits for the agent's welcome. Whoever dials and says something else is ignored.
    pub fn wait(&self, deadline: Instant) -> Result<Welcome, AgentError> {
        let failed = |source| AgentError::Listen { path: self.path.clone(), source };
        while dial::wait_readable(self.listener.as_fd(), deadline).map_err(failed)? {
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
    /// Readable when somebody has dialled; for those who wait for other things as well.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for ReadyListener {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
