//! How bytes move between a disk's requests and the host's storage.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `op.rs` | one thing that storage is asked to do, and the memory it does it with |
//! | `file.rs` | which files can be disks, and how they are opened and locked |
//! | `absent.rs` | a disk whose image is opened later |
//! | `layers.rs` | a disk that can be frozen, forked and taken back |
//! | `changes.rs` | what was written to a disk while somebody copies it |
//! | `plain.rs` | the engine that carries an operation out at once |
//! | `uring.rs`, `sys.rs` | the engine that hands it to the kernel and goes on |
//!
//! Nothing here knows of rings or of virtio.

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

/// Storage that moves bytes between itself and memory, and returns when it has.
pub trait DiskIo: Send {
    /// Fills the buffers from `offset`; may be short, zero at the end of the storage.
    fn read(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize>;

    /// Stores the buffers at `offset`; may be short.
    fn write(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize>;

    /// Makes everything that was written survive a power cut.
    fn sync(&self) -> io::Result<()>;

    /// Makes a range read as zero.
    fn clear(&self, how: Clear, offset: u64, len: u64) -> io::Result<()>;
}

/// Carries operations out, now or later. Each comes back exactly once through `finished`, with its token.
pub trait Engine: Send {
    /// Takes an operation on. Only while `has_room`, and with a token that is not out already.
    fn start(&mut self, token: u16, op: Op);

    /// Whether another operation can be started.
    fn has_room(&self) -> bool;

    /// Makes sure that what was started is under way.
    fn submit(&mut self) -> io::Result<()>;

    /// An operation that has ended.
    fn finished(&mut self) -> Option<Finished>;

    /// Waits until at least one operation has ended, or until interrupted; an error if none is out, for
    /// that would be a wait without end.
    fn wait(&mut self) -> io::Result<()>;

    /// The size of the storage now.
    fn measure(&self) -> io::Result<u64>;
}

/// Which engine a disk should have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// One operation after the other, on the device thread. Best where the host's page cache is warm.
    #[default]
    Plain,
    /// io_uring; refused where the host has none.
    IoUring,
    /// io_uring where the host has it, otherwise plain.
    Auto,
}

/// The engine of `kind` for an open image; `event` is written when an operation ends by itself, and without one none
/// does.
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
