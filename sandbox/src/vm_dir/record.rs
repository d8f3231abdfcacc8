//! The JSON documents in a VM's directory: its description, its network, and how it ended.
//!
//! One process writes them and others may read them at any moment, so they are always replaced as a
//! whole.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use pvmm_egress::ConnectionKey;
use pvmm_egress::policy::{Policy, PolicyDocument, PolicyError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::kernel_file::KernelFile;

/// The largest document that is read; `pvmm` writes none as large.
const MAX_DOCUMENT: u64 = 1 << 20;
/// The most bytes of a command line that are kept for display.
const MAX_COMMAND: usize = 4096;

/// The description of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub id: String,
    pub name: Option<String>,
    /// Seconds since 1970.
    pub created: u64,
    /// The template's name, or the path of the root filesystem.
    pub template: String,
    pub kernel: String,
    /// The file of the kernel, if it is known.
    #[serde(default)]
    pub kernel_file: Option<KernelFile>,
    pub cpus: u32,
    pub memory_mib: u64,
    /// The process id of the monitor process.
    pub pid: Option<u32>,
    /// The user and group of the monitor process, if they are its own.
    #[serde(default)]
    pub user: Option<u32>,
    pub command: Vec<String>,
    /// Forwarded ports of the host, as `127.0.0.1:8080->80`.
    #[serde(default)]
    pub ports: Vec<String>,
    /// The host's tap interfaces behind the VM's network devices.
    #[serde(default)]
    pub taps: Vec<String>,
    /// The volumes that the guest has mounted.
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    /// Whether the agent has answered.
    pub ready: bool,
    /// Whether the vCPUs are paused by request.
    #[serde(default)]
    pub paused: bool,
    /// Whether it is a foreground run, whose directory is removed at its end.
    pub ephemeral: bool,
}

/// A volume of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// An image with an ext4 file system.
    pub image: PathBuf,
    /// The folder in the guest.
    pub at: String,
    pub read_only: bool,
    /// The guest has it mounted already, as one that goes on from its own snapshot has.
    pub mounted: bool,
}

/// The network of a VM behind its egress process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    pub policy: PolicyDocument,
    /// DNS servers that names are looked up at; those of the host if empty.
    #[serde(default)]
    pub resolvers: Vec<SocketAddr>,
    /// Connections that were open in the VM that this one was copied from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inherited: Vec<ConnectionKey>,
}

impl Egress {
    /// Returns a network that reaches what these rules say; each begins with an address or a name.
    pub fn allowing<S: AsRef<str>>(
        rules: impl IntoIterator<Item = S>,
    ) -> Result<Self, PolicyError> {
        let policy = PolicyDocument::allowing(rules);
        Policy::new(&policy)?;
        Ok(Self { policy, ..Self::default() })
    }
}

/// The time to live of a running VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ttl {
    /// Seconds since 1970.
    pub ends_at: Option<u64>,
}

/// How a VM ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// The main command's exit code, if there was a main command.
    pub exit_code: Option<u8>,
    /// One line for people.
    pub reason: String,
    /// Seconds since 1970.
    pub at: u64,
}

impl Ending {
    /// The reason of a VM that has lived as long as it may.
    pub const TTL_PASSED: &str = "its time to live has passed (ttl)";
    /// The reason of a VM whose guest switched itself off.
    pub const POWEROFF: &str = "the guest powered itself off";
    /// The reason of a VM whose guest asked for a reset.
    pub const REBOOT: &str = "the guest asked for a reboot";
    /// The reason of a VM whose guest had a fault that nothing in it handled.
    pub const TRIPLE_FAULT: &str = "the guest crashed (triple fault)";
}

/// The state of a VM, as `pvmm ps` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmStatus {
    /// The VM is being made, or its agent has not answered yet.
    Starting,
    Running,
    /// The vCPUs are paused until `pvmm resume`.
    Paused,
    /// The VM has ended in an orderly way.
    Exited(Ending),
    /// The monitor process is gone without recording an end.
    Dead,
}

impl VmStatus {
    pub fn is_alive(&self) -> bool {
        matches!(self, VmStatus::Starting | VmStatus::Running | VmStatus::Paused)
    }

    /// Returns the state in one word, for scripts.
    pub fn word(&self) -> &'static str {
        match self {
            VmStatus::Starting => "starting",
            VmStatus::Running => "running",
            VmStatus::Paused => "paused",
            VmStatus::Exited(_) => "exited",
            VmStatus::Dead => "dead",
        }
    }
}

impl Record {
    /// Returns a command line for display: lossy text of bounded length.
    pub fn command_of(argv: &[OsString]) -> Vec<String> {
        let mut room = MAX_COMMAND;
        let mut command = Vec::new();
        for word in argv {
            let word = word.to_string_lossy();
            if word.len() > room {
                command.push("…".to_owned());
                break;
            }
            room -= word.len() + 1.min(room - word.len());
            command.push(word.into_owned());
        }
        command
    }
}

/// Returns the seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the milliseconds since 1970.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Replaces the document atomically.
pub fn write<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    // A directory has one writer at a time: its creator first, then its supervisor.
    let temporary = path.with_extension("json.new");
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    file.write_all(&text)?;
    drop(file);
    fs::rename(&temporary, path)
}

/// Reads the document; `None` if it is missing or invalid.
pub fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_DOCUMENT).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}
