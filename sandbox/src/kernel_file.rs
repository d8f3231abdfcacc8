//! The kernel file of a VM: recorded when the VM is made, and found again when its disks boot.
//!
//! Path, size and time tell whether the file is still the one that the VM ran.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pvmm::snapshot::{Roots, is_allowed};
use pvmm_images::{Cache, Kernel};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, FailureKind};
use crate::prepare;

/// A kernel file as it was when a VM was made with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFile {
    /// The path, with symbolic links resolved.
    pub path: PathBuf,
    pub size: u64,
    /// The time of the last modification, in nanoseconds since 1970.
    pub modified_ns: i64,
}

impl KernelFile {
    /// Describes the file at `path`, if there is one.
    pub fn of(path: &Path) -> Option<Self> {
        let path = fs::canonicalize(path).ok()?;
        let facts = fs::metadata(&path).ok()?;
        let modified_ns = facts.mtime().checked_mul(1_000_000_000)?.checked_add(facts.mtime_nsec());
        Some(Self { path, size: facts.size(), modified_ns: modified_ns? })
    }

    /// Describes the kernel that warm templates are baked with, if there is one.
    pub fn default_of_host() -> Option<Self> {
        Self::of(&Kernel::default_file(&Cache::open().ok()?)?)
    }

    /// Opens the kernel, which must still be the same file and lie below one of `roots`. `label` is
    /// its name for display.
    pub fn find(&self, label: &str, roots: &Roots) -> Result<Kernel, Failure> {
        let path = self.path.display();
        if !is_allowed(&self.path, roots) {
            let message =
                format!("kernel {path}: is in no folder that a snapshot may name files of");
            return Err(Failure::usage(message)
                .hint("allow its folder with --allow-files, or give the file with --kernel"));
        }
        if Self::of(&self.path).as_ref() != Some(self) {
            let message = format!("kernel {path} ({label}): is gone, or not the file it was");
            return Err(Failure::usage(message)
                .of_kind(FailureKind::NotFound)
                .hint("put it back, or give another kernel with --kernel FILE"));
        }
        let kernel = Kernel::found(&self.path).map_err(prepare::refuse)?;
        Ok(Kernel { label: label.to_owned(), ..kernel })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_that_is_gone_changed_or_elsewhere_is_refused_by_its_name() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("vmlinux-of-the-vm");
        fs::write(&path, b"one").unwrap();
        let kernel = KernelFile::of(&path).unwrap();
        let refused = |roots: &Roots| kernel.find("pvmm kernel", roots).unwrap_err().message;
        let elsewhere = refused(&Some(vec!["/usr".into()]));
        assert!(elsewhere.contains("vmlinux-of-the-vm") && elsewhere.contains("folder"));
        // Reached, and no kernel.
        assert!(refused(&None).contains("neither"), "{}", refused(&None));
        fs::write(&path, b"another").unwrap();
        assert!(refused(&None).contains("not the file it was"));
        fs::remove_file(&path).unwrap();
        assert!(refused(&None).contains("pvmm kernel"));
    }
}
