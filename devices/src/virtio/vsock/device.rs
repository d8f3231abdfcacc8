//! The vsock device while no driver uses it: it owns the listening socket and knows the guest's address.
//!
//! Everything that needs a descriptor is opened here, so that a device can be activated later in a
//! process that may open nothing more.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use super::config::{self, VsockConfig};
use super::host::UnixHost;
use super::mux::{FIRST_HOST_PORT, Limits};
use super::state::{OwedReset, VsockStateV2};
use super::worker::VsockWorker;
use super::{VsockError, sys};
use crate::listen_privately;
use crate::virtio::registry::{DeviceKind, DeviceState};
use crate::virtio::{Activation, VirtioDevice, Worker};

/// Receive, transmit, event.
const QUEUE_SIZES: [u16; 3] = [256, 256, 64];
/// Stream sockets, said aloud; they are all there is.
const FEATURE_STREAM: u64 = 1;

/// A vsock device without a driver.
pub struct Vsock {
    pub(super) guest_cid: u64,
    pub(super) host: UnixHost,
    pub(super) socket_file: Option<SocketFile>,
    pub(super) next_host_port: u32,
    /// What a snapshot said the guest waits for in vain.
    pub(super) owed_resets: Vec<OwedReset>,
    /// The guest must first drop the connections that it remembers, or learn its new address.
    pub(super) out_of_date: bool,
    pub(super) limits: Limits,
}

impl Vsock {
    /// Opens a device: binds the listening socket, and removes it again when the device is dropped unless
    /// it is to be kept.
    ///
    /// A socket file left behind by a process that died is replaced; one that somebody listens on is
    /// refused, and so is anything else at that path.
    pub fn open(config: &VsockConfig) -> Result<Self, VsockError> {
        config.validate()?;
        let path = &config.uds_path;
        let listener = bind(path)?;
        let file = if config.keep_socket { None } else { Some(SocketFile::of(path)?) };
        Self::new(config, listener, file)
    }

    /// Makes a device of a listening socket that somebody else bound and will remove. The path in `config`
    /// is only used to reach `<uds_path>_P` when the guest connects.
    pub fn from_listener(config: &VsockConfig, listener: UnixListener) -> Result<Self, VsockError> {
        config.validate()?;
        Self::new(config, listener, None)
    }

    /// Gives a device the past that a snapshot holds. Address and path are those it was opened with, so
    /// copies of one snapshot can have their own; the guest will read its address again.
    pub fn restore(mut self, state: &VsockStateV2) -> Result<Self, VsockError> {
        state.validate()?;
        self.take_past(state);
        Ok(self)
    }

    fn take_past(&mut self, state: &VsockStateV2) {
        self.next_host_port = state.next_host_port;
        self.owed_resets.clone_from(&state.owed_resets);
        // A guest that remembers nothing is spared a way there and back before its first connection.
        self.out_of_date = state.connected || state.guest_cid != self.guest_cid;
    }

    fn new(
        config: &VsockConfig,
        listener: UnixListener,
        socket_file: Option<SocketFile>,
    ) -> Result<Self, VsockError> {
        let host =
            UnixHost::new(listener, config.uds_path.clone()).map_err(VsockError::Descriptor)?;
        Ok(Self {
            guest_cid: config.guest_cid,
            host,
            socket_file,
            next_host_port: FIRST_HOST_PORT,
            owed_resets: Vec::new(),
            out_of_date: false,
            limits: Limits::default(),
        })
    }
}

impl VirtioDevice for Vsock {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Vsock
    }

    fn features(&self) -> u64 {
        FEATURE_STREAM
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> Vec<u8> {
        config::space(self.guest_cid)
    }

    fn activate(self: Box<Self>, activation: Activation) -> Box<dyn Worker> {
        Box::new(VsockWorker::new(*self, activation))
    }

    fn save(&self) -> DeviceState {
        DeviceState::VsockV2(VsockStateV2 {
            guest_cid: self.guest_cid,
            next_host_port: self.next_host_port,
            owed_resets: self.owed_resets.clone(),
            connected: self.out_of_date,
        })
    }

    fn rewind(&mut self, state: &DeviceState) {
        match state {
            DeviceState::VsockV2(state) => self.take_past(state),
            DeviceState::Vsock(state) => self.take_past(&state.clone().into()),
            _ => {}
        }
    }
}

/// The file of a bound socket, removed by the process that bound it.
pub(super) struct SocketFile {
    path: PathBuf,
    device_and_inode: (u64, u64),
    owner: u32,
}

impl SocketFile {
    fn of(path: &Path) -> Result<Self, VsockError> {
        let metadata = fs::symlink_metadata(path)
            .map_err(|source| VsockError::Bind { path: path.to_owned(), source })?;
        let device_and_inode = (metadata.dev(), metadata.ino());
        Ok(Self { path: path.to_owned(), device_and_inode, owner: std::process::id() })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A forked copy of this process holds this value too, and the path may be somebody else's by now.
        let current = fs::symlink_metadata(&self.path).map(|m| (m.dev(), m.ino()));
        let ours = current.is_ok_and(|current| current == self.device_and_inode);
        if ours && self.owner == std::process::id() {
            // Nothing is left to report it to.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn bind(path: &Path) -> Result<UnixListener, VsockError> {
    let bound = match listen_privately(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            clear_stale(path)?;
            listen_privately(path)
        }
        bound => bound,
    };
    bound.map_err(|source| VsockError::Bind { path: path.to_owned(), source })
}

fn clear_stale(path: &Path) -> Result<(), VsockError> {
    let fail = |source: io::Error| VsockError::Bind { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(fail(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(fail(ErrorKind::AlreadyExists.into()));
        }
        Ok(_) => {}
    }
    match sys::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(fail)
        }
        // Whoever listens may also be too busy to take one more connection.
        _ => Err(VsockError::InUse { path: path.to_owned() }),
    }
}
