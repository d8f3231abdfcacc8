//! The drives of a machine: opened before it starts, and what may be changed while it runs.
//!
//! Files are opened here, on the caller's thread; the device thread only swaps one for another.

use pvmm_devices::virtio::block::{
    Block, BlockConfig, BlockHandle, BlockUpdate, EngineKind, Source,
};
use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::registry::DeviceUpdate;

use crate::config::{ConfigError, Drive, DriveSource, RateLimiterConfig};
use crate::error::{Error, ErrorKind};
use crate::storage::{self, DriveCopy, Storage};
use crate::vm::Vm;

/// What the owner keeps of a drive beside the device that serves it.
pub struct HeldDrive {
    handle: BlockHandle,
    pub storage: Storage,
    /// There between [`Vm::prepare_freeze`] and the freeze.
    pub copy: Option<DriveCopy>,
}

impl HeldDrive {
    pub fn new(block: &Block, storage: Storage) -> Self {
        Self { handle: block.handle(), storage, copy: None }
    }
}

/// What is wrong with a drive, whichever step found it.
pub type OpenError = Box<dyn std::error::Error + Send + Sync>;

/// Opens and locks what stands behind a drive.
pub fn open(drive: Drive) -> Result<(Block, HeldDrive), OpenError> {
    let (config, storage) = prepare(drive)?;
    let block = Block::new(config)?;
    let held = HeldDrive::new(&block, storage);
    Ok((block, held))
}

/// What a device would be made of that goes on with a drive of `size` bytes. Nothing is opened of a drive
/// that may come later.
pub fn prepare_restored(drive: Drive, size: u64) -> Result<(BlockConfig, Storage), OpenError> {
    let DriveSource::Later(path) = drive.source else { return prepare(drive) };
    let Drive { read_only, id, cache, engine, direct, limits, .. } = drive;
    let source = Source::Later { size };
    let storage = Storage::Later { path, read_only };
    Ok((BlockConfig { source, read_only, cache, id, engine, direct, limits }, storage))
}

/// What a device would be made of.
fn prepare(drive: Drive) -> Result<(BlockConfig, Storage), OpenError> {
    let Drive { source, read_only, id, cache, engine, direct, limits } = drive;
    let plain = direct || engine == EngineKind::IoUring;
    let (source, storage) = storage::open_source(source, read_only, !plain)?;
    Ok((BlockConfig { source, read_only, cache, id, engine, direct, limits }, storage))
}

impl Vm {
    /// Looks at the size of drive `index` again, after its image grew or shrank, and tells the guest.
    pub fn resize_drive(&self, index: usize) -> Result<(), Error> {
        self.update_drive(index, BlockUpdate::Resize)
    }

    /// Puts another image behind drive `index`, with the access that the first one had, and tells the
    /// guest its size. What is under way ends on the old image; requests after that go to the new one.
    /// Whatever the guest still caches of the old one is its own affair. The image that is there already
    /// stays, and only its size is looked at again.
    pub fn replace_drive(&mut self, index: usize, source: DriveSource) -> Result<(), Error> {
        let held = self.held.drives.get(index).ok_or_else(|| self.no_drive(index))?;
        let what = || format!("drive {index}: cannot use another image");
        let (source, storage) = storage::open_source(source, held.storage.is_read_only(), false)
            .map_err(|error| Error::new(ErrorKind::InvalidConfig, what(), error))?;
        if let (Some(old), Some(new)) = (held.storage.file(), storage.file())
            && storage::is_same_file(old, new)
        {
            return self.resize_drive(index);
        }
        let opened = held.handle.open(source);
        let update = opened.map_err(|error| Error::new(ErrorKind::InvalidConfig, what(), error))?;
        self.update_drive(index, update)?;
        if let Some(held) = self.held.drives.get_mut(index) {
            held.storage = storage;
            held.copy = None;
        }
        Ok(())
    }

    /// Copies the drives that are written in place and cannot share their blocks with a copy, while the guest runs.
    /// [`Self::freeze`] does this too. Whoever makes the guest's workload stand still for it does better to call this
    /// before: a drive takes as long as its file.
    pub fn prepare_freeze(&mut self) -> Result<(), Error> {
        self.drop_copies()?;
        let prepared = (0..self.held.drives.len()).try_for_each(|index| self.copy_drive(index));
        if prepared.is_err() {
            self.drop_copies()?;
        }
        prepared
    }

    fn copy_drive(&mut self, index: usize) -> Result<(), Error> {
        let failed = |error| {
            Error::new(ErrorKind::HostResource, format!("drive {index}: cannot copy it"), error)
        };
        let Some(held) = self.held.drives.get(index) else { return Ok(()) };
        let begun = held.storage.begin_copy(&self.held.scratch).map_err(failed)?;
        let Some(copy) = begun else { return Ok(()) };
        // What is under way ends before this returns, so that every write is either in the file or noted.
        self.update_drive(index, BlockUpdate::Note(Some(copy.changes.clone())))?;
        let Some(held) = self.held.drives.get_mut(index) else { return Ok(()) };
        let copied = held.storage.file().map_or(Ok(()), |file| copy.advance(file));
        held.copy = Some(copy);
        copied.map_err(failed)
    }

    /// Ends what [`Self::prepare_freeze`] began.
    fn drop_copies(&mut self) -> Result<(), Error> {
        (0..self.held.drives.len()).try_for_each(|index| self.take_copy(index).map(drop))
    }

    /// The copy of a drive, if there is one; nothing is noted for it any more.
    pub(crate) fn take_copy(&mut self, index: usize) -> Result<Option<DriveCopy>, Error> {
        let copy = self.held.drives.get_mut(index).and_then(|held| held.copy.take());
        if copy.is_some() {
            self.update_drive(index, BlockUpdate::Note(None))?;
        }
        Ok(copy)
    }

    /// Opens the drives that were to be opened when the machine runs.
    pub(crate) fn open_drives(&mut self) -> Result<(), Error> {
        for index in 0..self.held.drives.len() {
            let held = self.held.drives.get(index).map(|held| &held.storage);
            if let Some(Storage::Later { path, .. }) = held {
                self.replace_drive(index, DriveSource::Path(path.clone()))?;
            }
        }
        Ok(())
    }

    /// Sets what the guest may read and write of drive `index` per time.
    pub fn limit_drive(&self, index: usize, limits: RateLimiterConfig) -> Result<(), Error> {
        limits.validate().map_err(ConfigError::Limits)?;
        self.update_drive(index, BlockUpdate::Limits(limits))
    }

    fn update_drive(&self, index: usize, update: BlockUpdate) -> Result<(), Error> {
        if index >= self.held.drives.len() {
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
        let count = self.held.drives.len();
        let act = format!("drive {index}: the machine has {count}, counted from 0");
        Error::plain(ErrorKind::InvalidConfig, act)
    }
}
