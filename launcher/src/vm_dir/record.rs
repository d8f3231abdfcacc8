//! The two small documents in a VM's directory: what it is, and how it ended.
//!
//! Written by one process and read by others at any moment, so they are always replaced whole.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// No document is larger: more than this is not ours.
const MAX_DOCUMENT: u64 = 1 << 20;
/// How much of a long command line is kept for people to see.
const MAX_COMMAND: usize = 4096;

/// What a VM is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub id: String,
    pub name: Option<String>,
    /// Seconds since 1970.
    pub created: u64,
    /// The template's name, or the path of the root filesystem.
    pub template: String,
    pub kernel: String,
    pub cpus: u32,
    pub memory_mib: u64,
    /// The VMM process.
    pub pid: Option<u32>,
    pub command: Vec<String>,
    /// Ports of the host that lead into it, as `127.0.0.1:8080->80`.
    #[serde(default)]
    pub ports: Vec<String>,
    /// The interfaces of the host that its network cards are on.
    #[serde(default)]
    pub taps: Vec<String>,
    /// Whether the agent has answered.
    pub ready: bool,
    /// Whether its vCPUs stand still because somebody asked for it.
    #[serde(default)]
    pub paused: bool,
    /// A foreground run, of which nothing stays.
    pub ephemeral: bool,
}

/// How a VM ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// The main command's exit code, if it had one.
    pub exit_code: Option<u8>,
    /// In one line, for people.
    pub reason: String,
    /// Seconds since 1970.
    pub at: u64,
}

/// What `ps` shows of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The machine is being made or the guest has not answered yet.
    Starting,
    Running,
    /// Its vCPUs stand still until `pvmm resume`.
    Paused,
    /// It ended in an orderly way.
    Exited(Ending),
    /// Its process is gone and left no word.
    Dead,
}

impl State {
    pub fn is_alive(&self) -> bool {
        matches!(self, State::Starting | State::Running | State::Paused)
    }

    /// One word, for scripts.
    pub fn word(&self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Running => "running",
            State::Paused => "paused",
            State::Exited(_) => "exited",
            State::Dead => "dead",
        }
    }
}

impl Record {
    /// A command line as people see it: text, and not endless.
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

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Replaces the document in one step.
pub(super) fn write<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    // One writer per directory at a time: its maker first, then its VMM process.
    let temporary = path.with_extension("json.new");
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    serde_json::to_writer_pretty(&mut file, value)?;
    file.write_all(b"\n")?;
    drop(file);
    fs::rename(&temporary, path)
}

/// The document, if it is there and whole.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_DOCUMENT).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}
