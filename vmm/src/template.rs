//! A machine that stands still: what a snapshot holds, decoded and mapped once, ready to be lived by many.
//!
//! `Vm::freeze` makes one of a running machine, `Template::load` one of a folder; forking, rolling back and
//! writing a snapshot all start from here.

use std::path::PathBuf;
use std::sync::Arc;

use crate::config::{Console, Drive, Net, Vsock};
use crate::error::Error;
use crate::kvm::vm::KvmHost;
use crate::memory::MemoryImage;
use crate::snapshot::Base;
use crate::snapshot::state::MachineState;
use crate::storage::FrozenStorage;
use crate::vm::Vm;
use crate::{kvm, restore};

/// A machine at one instant, from which any number of machines can go on.
pub struct Template {
    pub(crate) host: Arc<KvmHost>,
    pub(crate) machine: Arc<MachineState>,
    pub(crate) image: MemoryImage,
    pub(crate) drives: Vec<FrozenStorage>,
    /// The interfaces that the network cards were connected to.
    pub(crate) taps: Vec<String>,
    pub(crate) vsock_path: Option<PathBuf>,
    /// The snapshot that the lowest layer of the image is the memory of.
    pub(crate) base: Option<Base>,
}

/// What a machine gets that its template cannot give it.
#[derive(Debug, Default)]
pub struct Overrides {
    /// Its own socket; without one it takes the template's, which only one machine at a time can have.
    pub vsock: Option<Vsock>,
    /// Other drives, by their place in the template.
    pub drives: Vec<(usize, Drive)>,
    /// Other taps and addresses, by their place; without one a card takes the interface of the template's
    /// name.
    pub nets: Vec<(usize, Net)>,
    pub console: Console,
    /// As in [`crate::VmConfig`].
    pub scratch_dir: Option<PathBuf>,
}

impl Template {
    /// A machine that goes on where the template stands, paused. Nothing is read, parsed or copied.
    pub fn fork(&self, overrides: Overrides) -> Result<Vm, Error> {
        restore::restore(self, overrides)
    }

    pub fn vcpus(&self) -> usize {
        self.machine.vcpus.len()
    }

    pub fn memory_mib(&self) -> u64 {
        self.image.size() >> 20
    }

    pub(crate) fn host() -> Result<Arc<KvmHost>, kvm::vm::KvmError> {
        KvmHost::open().map(Arc::new)
    }
}
