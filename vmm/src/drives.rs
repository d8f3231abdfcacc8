//! The drives of a machine: opened before it starts, and what may be changed while it runs.
//!
//! Files are opened here, on the caller's thread; the device thread only swaps one for another.

use pvmm_devices::virtio::block::{Block, BlockConfig, BlockError, BlockUpdate, Source};
use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::registry::DeviceUpdate;

use crate::config::{ConfigError, Drive, DriveSource, RateLimiterConfig};
use crate::error::{Error, ErrorKind};
use crate::vm::Vm;

/// Opens and locks what stands behind each drive.
pub fn open_all(drives: Vec<Drive>) -> Result<Vec<Block>, Error> {
    let refused = |error| Error::new(ErrorKind::InvalidConfig, "cannot open a device", error);
    drives.into_iter().map(|drive| open(drive).map_err(refused)).collect()
}

fn open(drive: Drive) -> Result<Block, BlockError> {
    let Drive { source, read_only, id, cache, engine, direct, limits } = drive;
    let source = into_source(source);
    Block::new(BlockConfig { source, read_only, cache, id, engine, direct, limits })
}

impl Vm {
    /// Looks at the size of drive `index` again, after its image grew or shrank, and tells the guest.
    pub fn resize_drive(&self, index: usize) -> Result<(), Error> {
        self.update_drive(index, BlockUpdate::Resize)
    }

    /// Puts another image behind drive `index`, with the access that the first one had, and tells the
    /// guest its size. What is under way ends on the old image; requests after that go to the new one.
    /// Whatever the guest still caches of the old one is its own affair.
    pub fn replace_drive(&self, index: usize, source: DriveSource) -> Result<(), Error> {
        let handle = self.drives.get(index).ok_or_else(|| self.no_drive(index))?;
        let opened = handle.open(into_source(source));
        let what = || format!("drive {index}: cannot use another image");
        let update = opened.map_err(|error| Error::new(ErrorKind::InvalidConfig, what(), error))?;
        self.update_drive(index, update)
    }

    /// Sets what the guest may read and write of drive `index` per time.
    pub fn limit_drive(&self, index: usize, limits: RateLimiterConfig) -> Result<(), Error> {
        limits.validate().map_err(ConfigError::Limits)?;
        self.update_drive(index, BlockUpdate::Limits(limits))
    }

    fn update_drive(&self, index: usize, update: BlockUpdate) -> Result<(), Error> {
        if index >= self.drives.len() {
            return Err(self.no_drive(index));
        }
        let transport = self.transports.get(index).ok_or_else(|| self.no_drive(index))?;
        transport.update(DeviceUpdate::Block(update)).map_err(|error| match error {
            DeviceError::Update(cause) => {
                Error::new(ErrorKind::HostResource, format!("drive {index}: not changed"), cause)
            }
            other => other.into(),
        })
    }

    fn no_drive(&self, index: usize) -> Error {
        let count = self.drives.len();
        let act = format!("drive {index}: the machine has {count}, counted from 0");
        Error::plain(ErrorKind::InvalidConfig, act)
    }
}

fn into_source(source: DriveSource) -> Source {
    match source {
        DriveSource::Path(path) => Source::Path(path),
        DriveSource::File(file) => Source::File(file),
    }
}
