//! The machine that a VM of this launcher is: its command line, its disks, its size.
//!
//! In one place because a warm template must be the very machine that a run would boot.

use pvmm::{Balloon, Drive, Initrd, VmConfig};

use crate::drive::DriveFlag;
use crate::net_card::NetCard;
use crate::prepare::Parts;
use crate::vm_dir::Record;

/// The machine for a record, without its socket and its console. A console is slow, so the kernel only
/// speaks on it when somebody wants to hear it.
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
    config.drives = vec![Drive::read_only(parts.rootfs), Drive::from_file(parts.upper)];
    config
}

/// What a run may have beyond that.
#[derive(Default)]
pub struct Extras {
    pub drives: Vec<DriveFlag>,
    pub net: Option<NetCard>,
    /// The guest gives back what it frees, and more when it is asked.
    pub balloon: bool,
}

impl Extras {
    pub fn add_to(&self, config: &mut VmConfig) {
        config.drives.extend(self.drives.iter().cloned().map(DriveFlag::into_drive));
        config.nets.extend(self.net.as_ref().map(|card| card.config("")));
        config.balloon = self.balloon.then(|| Balloon {
            deflate_on_oom: true,
            free_page_reporting: true,
            ..Balloon::default()
        });
    }
}
