//! Tools for a snapshot of two files that need no VM: describing a state file, and merging a diff
//! into a memory file.
//!
//! They implement Firecracker's `snapshot-editor`; `launcher/src/firecracker/snapshot_editor.rs` is
//! its command line.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pvmm_devices::{open, sparse};

use super::files::{StateFile, read_state};
use crate::error::{Error, ErrorKind};

/// Bytes copied at a time.
const BUFFER: u64 = 1 << 20;

/// The contents of a state file as text.
pub struct StateText {
    /// The version of the file's format.
    pub version: u32,
    /// The manifest, in JSON.
    pub machine: String,
    /// The registers of each vCPU.
    pub vcpus: Vec<String>,
}

impl StateFile {
    /// Reads a state file, with the checks of a load, and returns its contents as text.
    pub fn describe(path: &Path) -> Result<StateText, Error> {
        let (manifest, saved) = read_state(path)?;
        let machine = serde_json::to_string_pretty(&manifest)
            .map_err(|error| Error::new(ErrorKind::Bug, "a manifest", error))?;
        let text = |vcpu: &crate::kvm::state::VcpuStateV1| {
            let msrs: String =
                vcpu.msrs.iter().map(|(i, v)| format!("  {i:#x}: {v:#x}\n")).collect();
            format!("{:#?}\n{:#?}\nmsrs:\n{msrs}", vcpu.regs, vcpu.sregs)
        };
        let vcpus = saved.machine.vcpus.iter().map(|vcpu| text(vcpu)).collect();
        Ok(StateText { version: manifest.version, machine, vcpus })
    }
}

/// Writes the data of the diff `differences` over the memory file `memory`, in place. Both files
/// must have one size.
pub fn rebase(memory: &Path, differences: &Path) -> Result<(), Error> {
    let failed = |path: &Path, error: io::Error| {
        Error::new(ErrorKind::HostResource, path.display().to_string(), error)
    };
    let from =
        open::image(differences, open::Access::Read).map_err(|error| failed(differences, error))?;
    let to = open::image(memory, open::Access::ReadWrite).map_err(|error| failed(memory, error))?;
    let size = |file: &File, path: &Path| {
        file.metadata().map(|facts| facts.len()).map_err(|error| failed(path, error))
    };
    let len = size(&from, differences)?;
    if len != size(&to, memory)? {
        let what = format!("{} is not of the size of {}", differences.display(), memory.display());
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    }
    let parts = sparse::known_data(&from, 0..len).map_err(|error| failed(differences, error))?;
    let Some(parts) = parts else {
        let hint =
            "its file system does not say where it has holes; copy it to another with cp --sparse";
        let what = format!("{}: {hint}", differences.display());
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    };
    let mut buffer = vec![0; BUFFER as usize];
    let copy = || -> io::Result<()> {
        for part in parts {
            let mut at = part.start;
            while at < part.end {
                let bytes = &mut buffer[..(part.end - at).min(BUFFER) as usize];
                from.read_exact_at(bytes, at)?;
                to.write_all_at(bytes, at)?;
                at += bytes.len() as u64;
            }
        }
        to.sync_all()
    };
    copy().map_err(|error| failed(memory, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_replace_what_they_cover_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (memory, differences) = (dir.path().join("m"), dir.path().join("d"));
        std::fs::write(&memory, vec![1; 64 << 10]).unwrap();
        let file = File::create(&differences).unwrap();
        file.set_len(64 << 10).unwrap();
        file.write_all_at(&[0; 4096], 8192).unwrap();
        file.write_all_at(&[2; 4096], 32768).unwrap();
        rebase(&memory, &differences).unwrap();
        let bytes = std::fs::read(&memory).unwrap();
        assert_eq!((bytes[0], bytes[8192], bytes[32768], bytes[40960]), (1, 0, 2, 1));
        file.set_len(1).unwrap();
        assert!(rebase(&memory, &differences).is_err());
        assert!(rebase(&memory, &dir.path().join("none")).is_err());
    }
}
