//! The root filesystem of a container, as a snapshotter of containerd describes it: mounted here
//! only to be copied into the guest.

use std::path::{Path, PathBuf};

use containerd_shim_protos::api::Mount;
use rustix::mount::{self, MountFlags, UnmountFlags};

use crate::error::ShimError;

/// A root filesystem that is mounted until this value is dropped.
pub struct Mounted {
    target: PathBuf,
    count: usize,
}

impl Mounted {
    /// Mounts a snapshot at `target`, read-only. Without mounts the files are there already.
    pub fn new(mounts: &[Mount], target: &Path) -> Result<Self, ShimError> {
        std::fs::create_dir_all(target)
            .map_err(ShimError::io(format!("cannot make {}", target.display())))?;
        let mut mounted = Self { target: target.to_owned(), count: 0 };
        for one in mounts {
            let Options { flags, data } = Options::parse(&one.options);
            let data = std::ffi::CString::new(data)
                .map_err(|_| ShimError::Invalid("a mount's options have a NUL".to_owned()))?;
            mount::mount(&one.source, target, &one.type_, flags, Some(data.as_c_str())).map_err(
                |errno| ShimError::Io {
                    what: format!("cannot mount {} ({})", target.display(), one.type_),
                    source: errno.into(),
                },
            )?;
            mounted.count += 1;
        }
        Ok(mounted)
    }

    pub fn path(&self) -> &Path {
        &self.target
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for _ in 0..self.count {
            let _ = mount::unmount(&self.target, UnmountFlags::DETACH);
        }
    }
}

/// The options of a mount: those that are flags, and the others.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    flags: MountFlags,
    data: String,
}

impl Options {
    fn parse(words: &[String]) -> Self {
        let mut flags = MountFlags::empty();
        let mut data = Vec::new();
        for word in words {
            match word.as_str() {
                "ro" => flags |= MountFlags::RDONLY,
                "bind" => flags |= MountFlags::BIND,
                "rbind" => flags |= MountFlags::BIND | MountFlags::REC,
                "nosuid" => flags |= MountFlags::NOSUID,
                "nodev" => flags |= MountFlags::NODEV,
                "noexec" => flags |= MountFlags::NOEXEC,
                "noatime" => flags |= MountFlags::NOATIME,
                "rw" | "defaults" | "" => (),
                other => data.push(other),
            }
        }
        Self { flags, data: data.join(",") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_flags_and_data() {
        let words = ["rbind", "ro", "lowerdir=/a:/b", "index=off"].map(str::to_owned);
        let options = Options::parse(&words);
        assert_eq!(options.flags, MountFlags::BIND | MountFlags::REC | MountFlags::RDONLY);
        assert_eq!(options.data, "lowerdir=/a:/b,index=off");
    }

    #[test]
    fn files_that_are_there_already_are_not_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("rootfs");
        let mounted = Mounted::new(&[], &target).unwrap();
        assert!(mounted.path().is_dir() && mounted.count == 0);
    }
}
