//! The vsock device while no driver uses it: it owns the listening socket and the guest's address.
//!
//! Everything that needs a file descriptor is opened here, so that a device can be activated later
//! in a process that may open nothing more.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use super::config::{self, VsockConfig};
use super::host::UnixHost;
use super::mux::{FIRST_HOST_PORT, Limits};
use super::state::{OwedReset, VsockStateV1};
use super::worker::VsockWorker;
use super::{VsockError, sys};
use crate::listen_privately;
use crate::virtio::registry::{BackendHandle, DeviceKind, DeviceState};
use crate::virtio::{Rings, VirtioDevice, Worker};

/// The sizes of the receive, transmit and event queues.
const QUEUE_SIZES: [u16; 3] = [256, 256, 64];
/// VIRTIO_VSOCK_F_STREAM. Only stream sockets are supported.
const FEATURE_STREAM: u64 = 1;

/// A vsock device without a driver.
pub struct Vsock {
    pub(super) guest_cid: u64,
    pub(super) host: UnixHost,
    pub(super) socket_file: Option<SocketFile>,
    pub(super) next_host_port: u32,
    /// Resets from a snapshot for connections that the guest waits for in vain.
    pub(super) owed_resets: Vec<OwedReset>,
    /// The guest must first drop the connections that it remembers, or read its new address.
    pub(super) out_of_date: bool,
    pub(super) limits: Limits,
}

impl Vsock {
    /// Opens a device: binds the listening socket. The socket file is removed when the device is
    /// dropped, unless `keep_socket` is set.
    ///
    /// A socket file left by a process that died is replaced; one with a listener is refused, and
    /// so is anything else at that path.
    pub fn open(config: &VsockConfig) -> Result<Self, VsockError> {
        config.validate()?;
        let path = &config.uds_path;
        let listener = bind(path)?;
        let file = if config.keep_socket { None } else { Some(SocketFile::of(path)?) };
        Self::new(config, listener, file)
    }

    /// Creates a device from a listening socket that the caller has bound and will remove. The path
    /// in `config` is only used to reach `<uds_path>_P` when the guest connects.
    pub fn from_listener(config: &VsockConfig, listener: UnixListener) -> Result<Self, VsockError> {
        config.validate()?;
        Self::new(config, listener, None)
    }

    /// Applies the state of a snapshot. Address and path stay those that the device was opened
    /// with, so forks of one snapshot can have their own; the guest will read its address again.
    pub fn restore(mut self, state: &VsockStateV1) -> Result<Self, VsockError> {
        state.validate()?;
        self.take_past(state);
        Ok(self)
    }

    fn take_past(&mut self, state: &VsockStateV1) {
        self.next_host_port = state.next_host_port;
        self.owed_resets.clone_from(&state.owed_resets);
        // A guest without connections is spared a round trip before its first connection.
        self.out_of_date = state.connected || state.guest_cid != self.guest_cid;
    }

    fn new(
        config: &VsockConfig,
        listener: UnixListener,
        socket_file: Option<SocketFile>,
    ) -> Result<Self, VsockError> {
        let prefix = config.dial_path.as_ref().unwrap_or(&config.uds_path);
        let host = UnixHost::new(listener, config.uds_path.clone(), prefix.clone())
            .map_err(VsockError::Descriptor)?;
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

    fn backend(&self) -> BackendHandle {
        BackendHandle::Socket(self.host.path().to_owned())
    }

    fn activate(self: Box<Self>, _rings: &mut Rings, _features: u64) -> Box<dyn Worker> {
        Box::new(VsockWorker::new(*self))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Vsock(VsockStateV1 {
            guest_cid: self.guest_cid,
            next_host_port: self.next_host_port,
            owed_resets: self.owed_resets.clone(),
            connected: self.out_of_date,
        })
    }

    fn rewind(&mut self, state: &DeviceState) {
        if let DeviceState::Vsock(state) = state {
            self.take_past(state);
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
        // A forked process holds this value too, and the path may have been bound by another
        // process since.
        let current = fs::symlink_metadata(&self.path).map(|m| (m.dev(), m.ino()));
        let ours = current.is_ok_and(|current| current == self.device_and_inode);
        if ours && self.owner == std::process::id() {
            // An error cannot be reported from here.
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
        // A listener may also be too busy to accept another connection.
        _ => Err(VsockError::InUse { path: path.to_owned() }),
    }
}
