//! Kernel images from anywhere, loaded for a fuzz target.

use std::path::Path;

use pvmm_devices::GuestMemory;

use crate::arch::x86_64::kernel::{self, Image, KernelError};
use crate::arch::x86_64::layout;
use crate::config::BootProtocol;

/// The memory of a trial's guest: room for a small kernel.
const MEMORY_MIB: u64 = 32;

/// Memory that one kernel after another is loaded into.
#[derive(Debug)]
pub struct KernelTrial(GuestMemory);

impl KernelTrial {
    /// None if the host has no memory for it.
    pub fn new() -> Option<Self> {
        GuestMemory::from_ranges(&layout::ram(MEMORY_MIB)).ok().map(Self)
    }

    /// Whether the image at `path` is taken for a kernel; one that is refused says why.
    pub fn load(&self, path: &Path) -> Result<(), KernelError> {
        let image = Image {
            kernel: &path.into(),
            initrd: None,
            cmdline: "quiet",
            protocol: BootProtocol::Auto,
            memory_mib: MEMORY_MIB,
            rsdp: layout::ACPI,
        };
        kernel::load(&image, &self.0).map(drop)
    }
}
