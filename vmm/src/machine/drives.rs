//! The drives of a machine: opened before it starts, and what may be changed while it runs.
//!
//! Files are opened here, on the caller's thread; the device thread only swaps one for another.

use pvmm_devices::virtio::block::{BlockConfig, BlockUpdate, EngineKind, Source};
use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::registry::DeviceUpdate;

use super::Machine;
use crate::config::{ConfigError, Drive, DriveSource, RateLimiterConfig};
use crate::error::{Error, ErrorKind};
use crate::storage::{self, DriveCopy, Storage};

/// The reason why a drive cannot be used, whichever step found it.
pub type OpenError = Box<dyn std::error::Error + Send + Sync>;

/// Prepares a drive of `size` bytes for a restored device. Nothing is opened of a
/// drive that may come later.
pub fn prepare_restored(drive: Drive, size: u64) -> Result<(BlockConfig, Storage), OpenError> {
    let DriveSource::Later(path) = drive.source else { return prepare(drive) };
    let Drive { read_only, id, cache, engine, direct, limits, .. } = drive;
    let source = Source::Later { size };
    let storage = Storage::Later { path, read_only };
    Ok((BlockConfig { source, read_only, cache, id, engine, direct, limits }, storage))
}

/// Prepares a drive for a new device.
pub fn prepare(drive: Drive) -> Result<(BlockConfig, Storage), OpenError> {
    let Drive { source, read_only, id, cache, engine, direct, limits } = drive;
    let plain = direct || engine == EngineKind::IoUring;
    let (source, storage) = storage::open_source(source, read_only, !plain)?;
    Ok((BlockConfig { source, read_only, cache, id, engine, direct, limits }, storage))
}

/// Looks at the size of drive `index` again, after its image grew or shrank, and tells the
/// guest.
pub fn resize(machine: &Machine, index: usize) -> Result<(), Error> {
    update(machine, index, BlockUpdate::Resize)
}

/// Puts another image behind drive `index`, with the access that the first one had, and tells
/// the guest its size. What is under way ends on the old image; requests after that go to the
/// new one. Whatever the guest still caches of the old one is its own affair. The image that is
/// there already stays, and only its size is looked at again.
pub fn replace(machine: &mut Machine, index: usize, source: DriveSource) -> Result<(), Error> {
    let attached = machine.resources.drives.get(index).ok_or_else(|| no_drive(machine, index))?;
    let what = || format!("drive {index}: cannot use another image");
    let (source, storage) = storage::open_source(source, attached.storage.is_read_only(), false)
        .map_err(|error| Error::new(ErrorKind::InvalidConfig, what(), error))?;
    if let (Some(old), Some(new)) = (attached.storage.file(), storage.file())
        && storage::is_same_file(old, new)
    {
        return resize(machine, index);
    }
    let opened = attached.handle.open(source);
    let other_image =
        opened.map_err(|error| Error::new(ErrorKind::InvalidConfig, what(), error))?;
    update(machine, index, other_image)?;
    if let Some(attached) = machine.resources.drives.get_mut(index) {
        attached.storage = storage;
        attached.copy = None;
    }
    Ok(())
}

/// Copies the drives that are written in place and cannot share their blocks with a copy, while
/// the guest runs. [`Self::freeze`] does this too. Whoever makes the guest's workload stand
/// still for it does better to call this before: a drive takes as long as its file.
pub fn prepare_copies(machine: &mut Machine) -> Result<(), Error> {
    drop_copies(machine)?;
    let prepared = (0..machine.resources.drives.len()).try_for_each(|index| copy(machine, index));
    if prepared.is_err() {
        drop_copies(machine)?;
    }
    prepared
}

fn copy(machine: &mut Machine, index: usize) -> Result<(), Error> {
    let failed = |error| {
        Error::new(ErrorKind::HostResource, format!("drive {index}: cannot copy it"), error)
    };
    let Some(attached) = machine.resources.drives.get(index) else { return Ok(()) };
    let begun = attached.storage.begin_copy(&machine.resources.scratch).map_err(failed)?;
    let Some(copy) = begun else { return Ok(()) };
    // What is under way ends before this returns, so that every write is either in the file or
    // noted.
    update(machine, index, BlockUpdate::Note(Some(copy.changes.clone())))?;
    let Some(attached) = machine.resources.drives.get_mut(index) else { return Ok(()) };
    let copied = attached.storage.file().map_or(Ok(()), |file| copy.advance(file));
    attached.copy = Some(copy);
    copied.map_err(failed)
}

/// Ends what [`Self::prepare_freeze`] began.
fn drop_copies(machine: &mut Machine) -> Result<(), Error> {
    (0..machine.resources.drives.len()).try_for_each(|index| take_copy(machine, index).map(drop))
}

/// The copy of a drive, if there is one; nothing is noted for it any more.
pub fn take_copy(machine: &mut Machine, index: usize) -> Result<Option<DriveCopy>, Error> {
    let copy = machine.resources.drives.get_mut(index).and_then(|attached| attached.copy.take());
    if copy.is_some() {
        update(machine, index, BlockUpdate::Note(None))?;
    }
    Ok(copy)
}

/// Opens the drives that were to be opened when the machine runs.
pub fn open_deferred(machine: &mut Machine) -> Result<(), Error> {
    for index in 0..machine.resources.drives.len() {
        let attached = machine.resources.drives.get(index).map(|attached| &attached.storage);
        if let Some(Storage::Later { path, .. }) = attached {
            replace(machine, index, DriveSource::Path(path.clone()))?;
        }
    }
    Ok(())
}

/// Sets what the guest may read and write of drive `index` per time.
pub fn limit(machine: &Machine, index: usize, limits: RateLimiterConfig) -> Result<(), Error> {
    limits.validate().map_err(ConfigError::Limits)?;
    update(machine, index, BlockUpdate::Limits(limits))
}

fn update(machine: &Machine, index: usize, update: BlockUpdate) -> Result<(), Error> {
    if index >= machine.resources.drives.len() {
        return Err(no_drive(machine, index));
    }
    let transport = machine.transports.get(index).ok_or_else(|| no_drive(machine, index))?;
    transport.update(DeviceUpdate::Block(update)).map_err(|error| match error {
        DeviceError::Update(cause) => {
            Error::new(ErrorKind::HostResource, format!("drive {index}: not changed"), cause)
        }
        other => other.into(),
    })
}

fn no_drive(machine: &Machine, index: usize) -> Error {
    let count = machine.resources.drives.len();
    let act = format!("drive {index}: the machine has {count}, counted from 0");
    Error::plain(ErrorKind::InvalidConfig, act)
}
