//! The host's side of a VM: options that are the same for a boot and for a fork, and registers that
//! the caller implements.
//!
//! They are apart from the machine's description, because a template does not contain them.

use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use pvmm_devices::bus::BusDevice;
use pvmm_devices::rate_limiter::{BucketConfig, RateLimiterConfig};

use crate::thread_filters::ThreadFilters;

/// The host's side of a VM, whether it is booted or forked: what the guest cannot see, or sees as
/// speed only.
#[derive(Debug)]
pub struct HostOptions {
    /// Where the output of the serial console goes; discarded by default.
    pub console: Console,
    /// The rate at which the guest may write to its console; what goes beyond that is dropped.
    pub console_limit: Option<BucketConfig>,
    /// The rate at which the guest may read the entropy device.
    pub rng_limits: RateLimiterConfig,
    /// Where nameless files for a machine's own writes to its disks are made: at most as much as
    /// the disks are large for the machine, and again for each of the sixteen layers that are kept
    /// of it. Without one the directory for temporary files, or `/var/tmp` where that is in memory.
    pub scratch_dir: Option<PathBuf>,
    /// Accept a directory in memory (tmpfs, ramfs) as `scratch_dir`, whose memory is then the
    /// host's. Refused otherwise.
    pub scratch_in_memory: bool,
    /// An open `/proc/self/pagemap` of the process that runs the VM, for one that has no `/proc`:
    /// its dirty pages are listed by it. Opened when it is needed if `None`.
    pub pagemap: Option<Arc<File>>,
    /// Take note, after each [`crate::Vm::save_files`], of what the guest writes, so that the next
    /// one of [`crate::snapshot::SaveKind::Diff`] holds no more than that. Costs the guest a fault
    /// on the first write to each page. Without it such a save holds what changed since the machine
    /// was made.
    pub track_changes: bool,
    /// Back the memory with pages of 2 MiB where the kernel has them at hand: fewer faults, coarser
    /// copies.
    pub huge_pages: bool,
    /// The beginning of the names of the vCPU threads; the number of the vCPU follows. `pvmm-vcpu-`
    /// by default.
    pub vcpu_thread_prefix: Cow<'static, str>,
    /// The system call filter of each thread of the VM. The caller's own threads are its own
    /// matter. Nothing is installed by default.
    pub thread_filters: Option<Arc<ThreadFilters>>,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            console: Console::default(),
            console_limit: None,
            rng_limits: RateLimiterConfig::default(),
            scratch_dir: None,
            pagemap: None,
            scratch_in_memory: false,
            track_changes: false,
            huge_pages: false,
            vcpu_thread_prefix: "pvmm-vcpu-".into(),
            thread_filters: None,
        }
    }
}

/// A page of registers that the caller implements.
#[derive(Clone)]
#[non_exhaustive]
pub struct Registers {
    /// The guest address: a multiple of [`Self::SIZE`] in [`Self::ADDRESSES`].
    pub address: u64,
    /// The implementation of reads and writes. Called on vCPU threads.
    pub device: Arc<dyn BusDevice>,
}

impl Registers {
    /// The size of the page.
    pub const SIZE: u64 = 0x1000;
    /// Where the pages may be.
    pub const ADDRESSES: Range<u64> = 0xc000_0000..0xd000_0000;

    /// Registers at a guest address.
    pub fn new(address: u64, device: Arc<dyn BusDevice>) -> Self {
        Self { address, device }
    }
}

impl std::fmt::Debug for Registers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registers").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Where the guest's serial console goes.
#[derive(Debug, Default)]
pub enum Console {
    /// Nowhere: the output is dropped.
    #[default]
    Discard,
    /// To the standard output of this process.
    Stdout,
    /// To this file.
    File(File),
}
