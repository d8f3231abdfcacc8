//! The guest that every contender runs: one kernel, one initramfs and one root image, on one tmpfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::ExecRequest;
use pvmm::{Drive, Initrd, Net, TapSource, VmConfig, Vsock};
use pvmm_agent_image::AGENT;
use pvmm_images::{Cache, Kernel, Template};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::board::Outcome;
use crate::facts;

pub const MEMORY_MIB: u64 = 512;
/// The longest time that an operation on a guest may take, also on an emulated processor.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// The number of taps that are made before anything is timed: the first is for a parent, the others
/// are for its children.
pub const TAPS: usize = 16;

const CMDLINE: &str = "quiet reboot=k panic=-1 pvmm.root=/dev/vda pvmm.rootfstype=ext4 \
                       pvmm.hostname=guest";

/// The files of the guest on the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Guest {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub rootfs: PathBuf,
}

/// One VM: the guest, and what VMs do not share.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    pub guest: Guest,
    /// Where the sockets of the VM are made.
    pub dir: PathBuf,
    pub tap: Option<String>,
    /// A second disk, writable.
    pub disk: Option<PathBuf>,
    pub cmdline: String,
}

impl Guest {
    /// Copies the default kernel, its initramfs and the root image of the template `base` to
    /// `place`. Returns the copies, and facts about them.
    pub fn prepare(place: &Path) -> Outcome<(Self, Value)> {
        let cache = Cache::open()?;
        let kernel = Kernel::default_in(&cache, &mut pvmm_images::Silent)?;
        let template = Template::find(&cache, "base")?;
        let guest = Self {
            kernel: place.join("vmlinux"),
            initrd: place.join("initrd"),
            rootfs: place.join("rootfs.ext4"),
        };
        fs::copy(&kernel.vmlinux, &guest.kernel)?;
        fs::write(&guest.initrd, kernel.initramfs(AGENT)?)?;
        fs::copy(&template.rootfs, &guest.rootfs)?;
        let facts = json!({
            "kernel": kernel.label,
            "kernel_sha256": digest(&guest.kernel)?,
            "initrd_sha256": digest(&guest.initrd)?,
            "rootfs_sha256": digest(&guest.rootfs)?,
            "memory_mib": MEMORY_MIB,
            "vcpus": 1,
        });
        Ok((guest, facts))
    }

    /// Returns a VM that has a network card if `tap` is given, and no second disk.
    pub fn spec(&self, dir: &Path, tap: Option<String>) -> Spec {
        let (guest, dir) = (self.clone(), dir.to_owned());
        Spec { guest, dir, tap, disk: None, cmdline: cmdline() }
    }
}

/// Returns the kernel command line. On a nested host it turns off the randomisation of addresses in
/// the guest, for the reason that `main.rs` gives for the host.
fn cmdline() -> String {
    CMDLINE.to_owned() + if facts::emulated() { " norandmaps" } else { "" }
}

impl Spec {
    pub fn socket(&self) -> PathBuf {
        self.dir.join("v")
    }

    /// Returns the configuration of the VM for pvmm.
    pub fn config(&self) -> VmConfig {
        let mut config = VmConfig::new(&self.guest.kernel);
        config.initrd = Some(Initrd::Path(self.guest.initrd.clone()));
        config.cmdline = self.cmdline.clone();
        config.memory_mib = MEMORY_MIB;
        config.drives.push(Drive::read_only(&self.guest.rootfs));
        config.drives.extend(self.disk.as_ref().map(Drive::writable));
        config.nets.extend(self.tap.as_deref().map(net));
        config.vsock = Some(Vsock::new(3, self.socket()));
        config
    }
}

pub fn net(tap: &str) -> Net {
    Net::new(TapSource::Name(tap.to_owned()))
}

/// Returns the name of the tap `index`, or `None` if the taps could not be made.
pub fn tap(index: usize) -> Option<String> {
    HAS_TAPS.get().is_some_and(|has| *has).then(|| format!("bench{index}"))
}

static HAS_TAPS: OnceLock<bool> = OnceLock::new();

/// Makes the taps. If a tap cannot be made, every contender runs without a network card.
pub fn make_taps() {
    let ip = |arguments: &[&str]| {
        Command::new("ip").args(arguments).output().is_ok_and(|output| output.status.success())
    };
    let made = (0..TAPS).all(|index| {
        let name = format!("bench{index}");
        ip(&["tuntap", "add", "dev", &name, "mode", "tap", "vnet_hdr"])
            && ip(&["link", "set", &name, "up"])
    });
    HAS_TAPS.get_or_init(|| made);
}

/// Runs `/bin/true` in the guest and waits for its end. Fails if the command does not succeed.
pub fn exec_true(agent: &Agent) -> Outcome<()> {
    let output = agent.exec(&ExecRequest::argv(["/bin/true"]).timeout(PATIENCE))?;
    if output.status.success() { Ok(()) } else { Err(format!("/bin/true: {output:?}").into()) }
}

/// Runs a shell line in the guest and returns its output. Fails if the line does not succeed.
pub fn shell(agent: &Agent, line: &str) -> Outcome<String> {
    let output = agent.exec(&ExecRequest::shell(line).timeout(PATIENCE))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout.bytes).trim_end().to_owned())
    } else {
        Err(format!("{line}: {output:?}").into())
    }
}

pub fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

pub fn digest(path: &Path) -> Outcome<String> {
    Ok(pvmm_images::cache::file_digest(path)?)
}
