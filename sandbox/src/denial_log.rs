//! The log of a VM's network process, read for what was denied.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use serde_json::Value;

use crate::vm_dir::VmEntry;

/// The most that is read at once.
const MAX_READ: u64 = 256 << 10;

/// A log and how much of it was read.
#[derive(Debug)]
pub struct DenialLog {
    path: PathBuf,
    read: u64,
}

impl DenialLog {
    /// Begins at the start of the log.
    pub fn of(vm: &VmEntry) -> Self {
        Self { path: vm.dir.egress_log(), read: 0 }
    }

    /// Begins at the end of the log.
    pub fn at_end(vm: &VmEntry) -> Self {
        let path = vm.dir.egress_log();
        let read = path.metadata().map_or(0, |facts| facts.len());
        Self { path, read }
    }

    /// Reads the new lines. Returns the targets that were denied, with the reasons.
    pub fn read(&mut self) -> io::Result<Vec<String>> {
        let mut file = File::open(&self.path)?;
        if file.metadata()?.len() <= self.read {
            return Ok(Vec::new());
        }
        file.seek(SeekFrom::Start(self.read))?;
        let mut bytes = Vec::new();
        file.take(MAX_READ).read_to_end(&mut bytes)?;
        // A line without its end is read again, unless it fills the buffer and is none of ours.
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let is_junk = whole == 0 && bytes.len() as u64 == MAX_READ;
        self.read += if is_junk { MAX_READ } else { whole as u64 };
        let lines = bytes[..whole].split(|byte| *byte == b'\n');
        Ok(lines.filter_map(|line| denied(&serde_json::from_slice(line).ok()?)).collect())
    }
}

fn denied(line: &Value) -> Option<String> {
    if line["decision"] != "deny" {
        return None;
    }
    let target = line["name"].as_str().or(line["address"].as_str()).unwrap_or("-");
    let port = line["port"].as_u64().map(|port| format!(":{port}")).unwrap_or_default();
    let protocol = line["protocol"].as_str().unwrap_or_default();
    let reason = line["reason"].as_str().unwrap_or_default();
    Some(format!("{target}{port}/{protocol} ({reason})"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn denied_lines_are_read_once_and_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut log = DenialLog { path: file.path().into(), read: 0 };
        let line = r#"{"decision":"deny","name":"evil.test","port":443,"protocol":"tcp","reason":"no rule"}"#;
        write!(file, "{{\"decision\":\"allow\"}}\nno json\n{line}\n{{\"deci").unwrap();
        assert_eq!(log.read().unwrap(), ["evil.test:443/tcp (no rule)"]);
        assert!(log.read().unwrap().is_empty());
        writeln!(file, "sion\":\"deny\",\"address\":\"10.0.0.1\",\"protocol\":\"udp\"}}").unwrap();
        assert_eq!(log.read().unwrap(), ["10.0.0.1/udp ()"]);
    }
}
