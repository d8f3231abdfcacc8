//! How bytes move between a disk's requests and the host's storage.
//!
//! | file | contents |
//! | --- | --- |
//! | `op.rs` | one operation on storage, and the memory that it uses |
//! | `file.rs` | which files can be disks, and how they are opened and locked |
//! | `absent.rs` | a disk whose image is opened later |
//! | `layers.rs` | a disk that can be frozen, forked and rolled back |
//! | `changes.rs` | what was written to a disk while it is being copied |
//! | `plain.rs` | the engine that completes an operation before it returns |
//! | `uring.rs`, `sys.rs` | the engine that submits operations to the kernel and does not wait |
//!
//! Nothing here depends on rings or virtio.

mod absent;
mod changes;
mod file;
mod layers;
mod op;
mod plain;
mod sys;
mod uring;

use std::io;
use std::sync::Arc;

use vm_memory::VolatileSlice;
use vmm_sys_util::eventfd::EventFd;

pub use absent::Absent;
pub use changes::Changes;
pub use file::{Access, FileDisk, OpenError};
pub use layers::LayeredDisk;
pub use op::{Bounce, Finished, Op, Target, guest_slices};
pub use plain::{MeasuredDisk, Plain};
pub use uring::Uring;

pub use crate::sys::Clear;

/// Storage that moves bytes between itself and memory synchronously.
pub trait DiskIo: Send {
    /// Fills the buffers from `offset`. May be short; returns zero at the end of the storage.
    fn read(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize>;

    /// Stores the buffers at `offset`. May be short.
    fn write(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize>;

    /// Makes all completed writes durable.
    fn sync(&self) -> io::Result<()>;

    /// Makes a range read as zeros.
    fn clear(&self, how: Clear, offset: u64, len: u64) -> io::Result<()>;
}

/// Carries out operations, now or later. Each is returned exactly once by `finished`, with its
/// token.
pub trait Engine: Send {
    /// Accepts an operation. Call it only while `has_room`, and with a token that is not in flight.
    fn start(&mut self, token: u16, op: Op);

    /// Returns whether another operation can be started.
    fn has_room(&self) -> bool;

    /// Makes sure that all started operations are in progress.
    fn submit(&mut self) -> io::Result<()>;

    /// Returns an operation that has completed, if any.
    fn finished(&mut self) -> Option<Finished>;

    /// Waits until at least one operation has completed, or until interrupted. Returns an error if
    /// none is in flight, because that wait would never end.
    fn wait(&mut self) -> io::Result<()>;

    /// Returns the current size of the storage.
    fn measure(&self) -> io::Result<u64>;
}

/// The kind of engine that a disk uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// Runs one operation after the other on the device thread. Best where the host's page cache is
    /// warm.
    #[default]
    Plain,
    /// Uses io_uring, and refuses the disk where the host has none.
    IoUring,
    /// Uses io_uring where the host has it, otherwise `Plain`.
    Auto,
}

/// Returns the engine of `kind` for an open image. `event` is written when an operation completes
/// in the background; without it the plain engine is used.
pub fn engine(
    kind: EngineKind,
    disk: FileDisk,
    event: Option<&Arc<EventFd>>,
) -> Result<Box<dyn Engine>, OpenError> {
    if let Some(event) = event {
        match Uring::new(&disk, event) {
            Ok(uring) => return Ok(Box::new(uring)),
            Err(source) if kind == EngineKind::IoUring => {
                return Err(OpenError::IoUring { source });
            }
            Err(error) => log::info!("no io_uring on this host, plain I/O instead: {error}"),
        }
    }
    Ok(Box::new(Plain::new(Box::new(disk))))
}
