//! The guest that every contender runs: one kernel, one initramfs, one root image, on one tmpfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::ExecRequest;
use pvmm::{Drive, Initrd, Net, TapSource, VmConfig, Vsock};
use pvmm_agent_image::AGENT;
use pvmm_sandbox::{Cache, Kernel, Template};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::board::Outcome;
use crate::facts;

pub const MEMORY_MIB: u64 = 512;
/// How long anything about a guest may take where processors are emulated.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Interfaces that are made before anything is timed: the first for a parent, the others for
/// children.
pub const TAPS: usize = 16;

const CMDLINE: &str = "quiet reboot=k panic=-1 pvmm.root=/dev/vda pvmm.rootfstype=ext4 \
                       pvmm.hostname=guest";

/// The files of a guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Guest {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub rootfs: PathBuf,
}

/// What one machine has beside the guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    pub guest: Guest,
    /// Where its sockets go.
    pub dir: PathBuf,
    pub tap: Option<String>,
    /// A second, writable disk.
    pub disk: Option<PathBuf>,
    pub cmdline: String,
}

impl Guest {
    /// Copies the default kernel and the base template to `place`.
    pub fn prepare(place: &Path) -> Outcome<(Self, Value)> {
        let cache = Cache::open()?;
        let kernel = Kernel::default_in(&cache, &mut pvmm_sandbox::Silent)?;
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

    /// A machine with a network card if there are taps, and nothing else of its own.
    pub fn spec(&self, dir: &Path, tap: Option<String>) -> Spec {
        let (guest, dir) = (self.clone(), dir.to_owned());
        Spec { guest, dir, tap, disk: None, cmdline: cmdline() }
    }
}

/// Fixed addresses in the guest for the reason that `main.rs` gives for the host.
fn cmdline() -> String {
    CMDLINE.to_owned() + if facts::emulated() { " norandmaps" } else { "" }
}

impl Spec {
    pub fn socket(&self) -> PathBuf {
        self.dir.join("v")
    }

    /// The same machine for pvmm.
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

/// The name of a tap, if taps could be made.
pub fn tap(index: usize) -> Option<String> {
    HAS_TAPS.get().is_some_and(|has| *has).then(|| format!("bench{index}"))
}

static HAS_TAPS: OnceLock<bool> = OnceLock::new();

/// Makes the taps; without the right to, machines go without a card, on all sides.
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

/// Runs `/bin/true` to its end.
pub fn exec_true(agent: &Agent) -> Outcome<()> {
    let output = agent.exec(&ExecRequest::argv(["/bin/true"]).timeout(PATIENCE))?;
    if output.status.success() { Ok(()) } else { Err(format!("/bin/true: {output:?}").into()) }
}

/// What a shell line prints; it must succeed.
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
    Ok(pvmm_sandbox::cache::file_digest(path)?)
}
