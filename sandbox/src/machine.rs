//! The configuration of the VMs that this launcher makes: kernel command line, disks, size.
//!
//! In one place because a warm template must be exactly the VM that `pvmm run` would boot.

use std::time::Duration;

use pvmm::{Balloon, CpuBaseline, Initrd, VmConfig};

use crate::drive::DriveFlag;
use crate::net_card::NetCard;
use crate::prepare::Parts;
use crate::vm_dir::Record;

/// How long a guest may take to become idle before it is frozen; it runs meanwhile.
pub const SETTLE_MAX: Duration = Duration::from_millis(20);

/// The place of the first drive after root filesystem and writable disk.
pub const SPARE_DRIVE: usize = 2;

/// Builds the configuration for a record, without vsock and console. A console is slow, so the
/// kernel prints to it only if `loud`.
pub fn config(parts: Parts, record: &Record, loud: bool) -> VmConfig {
    let hostname = record.name.as_deref().unwrap_or(&record.id);
    let loudness = if loud { "" } else { "quiet loglevel=3 " };
    let mut config = VmConfig::new(parts.kernel.vmlinux);
    config.cmdline = format!(
        "console=ttyS0 {loudness}reboot=k panic=-1 random.trust_cpu=on pvmm.root=/dev/vda \
         pvmm.rootfstype={} pvmm.upper=/dev/vdb pvmm.hostname={hostname}",
        parts.rootfs_type,
    );
    config.initrd = Some(Initrd::Bytes(parts.initramfs));
    config.memory_mib = record.memory_mib;
    config.vcpus = record.cpus;
    config.drives = parts.drives;
    config
}

/// Optional devices of a VM that is booted, and its processor.
#[derive(Default)]
pub struct Extras {
    /// The processor features that the guest is offered.
    pub cpu: CpuBaseline,
    pub drives: Vec<DriveFlag>,
    pub net: Option<NetCard>,
    /// Add a balloon device: the guest gives back the memory that it frees, and more on request.
    pub balloon: bool,
}

impl Extras {
    pub fn add_to(&self, config: &mut VmConfig) {
        config.cpu = self.cpu.clone();
        config.drives.extend(self.drives.iter().cloned().map(DriveFlag::into_drive));
        config.nets.extend(self.net.as_ref().map(|card| card.config("")));
        config.balloon = self.balloon.then(|| Balloon {
            deflate_on_oom: true,
            free_page_reporting: true,
            ..Balloon::default()
        });
    }
}
