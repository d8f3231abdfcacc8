//! The folder that containerd makes for a container: its OCI configuration, and notes of the shim.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::ShimError;
use crate::flags::Flags;

/// The largest configuration that is read.
const MAX_CONFIG: u64 = 4 << 20;
/// The annotation by which containerd's CRI plugin says to which pod a container belongs.
const POD: &str = "io.kubernetes.cri.sandbox-id";
/// Where containerd looks for the socket of a shim that it did not start itself.
const ADDRESS: &str = "address";
/// The id of the pod's VM.
const VM: &str = "pvmm-vm";

#[derive(Clone, Debug)]
pub struct Bundle(PathBuf);

impl Bundle {
    /// The bundle of a call: named by a flag, or the current folder.
    pub fn of(flags: &Flags) -> Result<Self, ShimError> {
        match &flags.bundle {
            Some(path) => Ok(Self(path.clone())),
            None => std::env::current_dir().map(Self).map_err(ShimError::io("current folder")),
        }
    }

    pub fn at(path: &str) -> Result<Self, ShimError> {
        let path = PathBuf::from(path);
        if !path.is_absolute() {
            return Err(ShimError::Invalid(format!("the bundle {path:?} is not absolute")));
        }
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns where the root filesystem is mounted.
    pub fn rootfs(&self) -> PathBuf {
        self.0.join("rootfs")
    }

    /// Reads the OCI configuration.
    pub fn config(&self) -> Result<Value, ShimError> {
        let path = self.0.join("config.json");
        let mut text = Vec::new();
        fs::File::open(&path)
            .and_then(|file| file.take(MAX_CONFIG).read_to_end(&mut text))
            .map_err(ShimError::io(format!("cannot read {}", path.display())))?;
        serde_json::from_slice(&text)
            .map_err(|error| ShimError::Invalid(format!("{}: {error}", path.display())))
    }

    /// Writes the address of the pod's daemon where containerd looks for it.
    pub fn write_address(&self, address: &str) -> Result<(), ShimError> {
        self.write(ADDRESS, address)
    }

    pub fn write_vm(&self, id: &str) -> Result<(), ShimError> {
        self.write(VM, id)
    }

    /// Returns the id of the VM, if there was one.
    pub fn read_vm(&self) -> Option<String> {
        fs::read_to_string(self.0.join(VM)).ok()
    }

    /// Writes a file of the shim's, which appears whole.
    fn write(&self, name: &str, text: &str) -> Result<(), ShimError> {
        let (path, part) = (self.0.join(name), self.0.join(format!(".{name}")));
        let wrote = fs::write(&part, text).and_then(|()| fs::rename(&part, &path));
        wrote.map_err(|error: io::Error| {
            let _ = fs::remove_file(&part);
            ShimError::Io { what: format!("cannot write {}", path.display()), source: error }
        })
    }
}

/// Returns the pod that a container belongs to: its own id, unless Kubernetes says otherwise.
pub fn pod_of<'a>(config: &'a Value, id: &'a str) -> &'a str {
    config["annotations"][POD].as_str().unwrap_or(id)
}

/// Refuses an id that could not be a file name in the guest.
pub fn check_id(id: &str) -> Result<(), ShimError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if id.is_empty() || id.len() > 128 || id.starts_with('.') || !id.chars().all(allowed) {
        return Err(ShimError::Invalid(format!("{id:?} is no id of a container")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn container_belongs_to_its_pod_or_to_itself() {
        let config = json!({"annotations": {POD: "the-pod"}});
        assert_eq!(pod_of(&config, "c"), "the-pod");
        assert_eq!(pod_of(&json!({}), "c"), "c");
    }

    #[test]
    fn id_that_leads_elsewhere_is_refused() {
        for id in ["", "..", "a/b", "a b", "ä", &"x".repeat(129)] {
            assert!(check_id(id).is_err(), "{id}");
        }
        check_id("0a_b-c.D").unwrap();
    }

    #[test]
    fn notes_are_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = Bundle::at(dir.path().to_str().unwrap()).unwrap();
        assert_eq!(bundle.read_vm(), None);
        bundle.write_vm("abc").unwrap();
        assert_eq!(bundle.read_vm().as_deref(), Some("abc"));
        assert!(bundle.config().is_err());
    }
}
