//! The audit log: one JSON line for each act, and for each request that was refused.
//!
//! A line says who, which sandbox, what was run and how it ended. Values of environment variables,
//! tokens and contents of files are never in it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

use crate::clock;
use crate::error::ApiError;

/// The size at which a file is put aside.
const MAX_BYTES: u64 = 16 << 20;
/// The number of files that are put aside; the oldest is removed.
const KEPT: u32 = 4;
/// The most characters of a command that are logged.
const MAX_COMMAND: usize = 4096;

/// An act of a client.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Act {
    /// The prefix of the token.
    pub who: String,
    /// The kind of the act, such as `exec`.
    pub act: &'static str,
    /// The sandbox that the act is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// The command line, code or path, shortened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what: Option<String>,
    /// The exit code of a command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit: Option<i64>,
    /// The bytes that the act carried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The reason why the act failed or was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub denied: Option<String>,
    /// How long the act took.
    pub duration_ms: u64,
}

impl Act {
    /// Begins an act of a token on a sandbox.
    pub fn new(act: &'static str, who: &str, sandbox: &str) -> Self {
        let sandbox = (!sandbox.is_empty()).then(|| sandbox.to_owned());
        Self { who: who.to_owned(), act, sandbox, ..Self::default() }
    }

    /// Adds the command, code or path.
    pub fn what(mut self, what: &str) -> Self {
        self.what = Some(what.chars().take(MAX_COMMAND).collect());
        self
    }

    /// Adds the number of bytes.
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = Some(bytes);
        self
    }

    /// Adds the exit code.
    pub fn exit(mut self, exit: i64) -> Self {
        self.exit = Some(exit);
        self
    }

    /// Adds the time since `begun`.
    pub fn since(mut self, begun: Instant) -> Self {
        self.duration_ms = begun.elapsed().as_millis() as u64;
        self
    }

    /// Adds the reason of a failure, if the outcome is one.
    pub fn outcome<T>(mut self, outcome: &Result<T, ApiError>) -> Self {
        self.denied = outcome.as_ref().err().map(|error| error.message.clone());
        self
    }
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(flatten)]
    act: &'a Act,
}

/// The open log.
pub struct Audit {
    path: PathBuf,
    file: Mutex<Open>,
    max_bytes: u64,
}

struct Open {
    file: File,
    length: u64,
}

impl Audit {
    /// Opens the log at `path`, to which acts are appended.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::with_size(path, MAX_BYTES)
    }

    fn with_size(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let file = Mutex::new(open(path)?);
        Ok(Self { path: path.to_owned(), file, max_bytes })
    }

    /// Appends an act. A log that cannot be written is reported once for each act, and does not
    /// stop the act.
    pub fn write(&self, act: &Act) {
        let line = Line { time: clock::rfc3339(clock::now_ms()), act };
        let written = serde_json::to_vec(&line).map_err(io::Error::other).and_then(|mut line| {
            line.push(b'\n');
            self.append(&line)
        });
        if let Err(error) = written {
            log::error!("cannot write {}: {error}", self.path.display());
        }
    }

    fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut open_file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if open_file.length > 0 && open_file.length + line.len() as u64 > self.max_bytes {
            self.put_aside()?;
            *open_file = open(&self.path)?;
        }
        open_file.file.write_all(line)?;
        open_file.length += line.len() as u64;
        Ok(())
    }

    fn put_aside(&self) -> io::Result<()> {
        let numbered = |number: u32| self.path.with_extension(format!("log.{number}"));
        for number in (1..KEPT).rev() {
            match fs::rename(numbered(number), numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, numbered(1))
    }
}

fn open(path: &Path) -> io::Result<Open> {
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    let length = file.metadata()?.len();
    Ok(Open { file, length })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn log_is_rotated_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let audit = Audit::with_size(&path, 200).unwrap();
        for _ in 0..40 {
            audit.write(&Act::new("exec", "pvmm_1", "a").what("true").exit(0));
        }
        let names = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(names, 1 + KEPT as usize);
        assert!(fs::metadata(&path).unwrap().len() <= 200);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let line = fs::read_to_string(&path).unwrap();
        let line: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
        assert_eq!(line["act"], "exec");
        assert_eq!(line["exit"], 0);
    }

    #[test]
    fn command_is_shortened() {
        let act = Act::new("exec", "", "").what(&"x".repeat(10_000));
        assert_eq!(act.what.unwrap().len(), MAX_COMMAND);
    }
}
