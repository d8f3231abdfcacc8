//! Named volumes: ext4 images in pvmm's data directory that outlive the sandboxes that use them.
//!
//! A volume is a folder with one image. One sandbox may write it, or several may read it: the
//! monitor process holds a lock on the image for as long as it has it open.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use pvmm_images::volume::{self, VolumeError};
use serde::Serialize;

use crate::failure::{Failure, FailureKind, io_text};
use crate::prepare::{Blame, refuse};
use crate::snapshots;
use crate::sys::lock;
use crate::vm_dir::check_name;

const IMAGE: &str = "image.ext4";
/// The start of a folder's name while it is being made.
const UNFINISHED: &str = ".new-";

/// A volume, as it was found.
#[derive(Clone, Debug, Serialize)]
pub struct Volume {
    pub name: String,
    /// The size that a guest sees.
    pub bytes: u64,
    /// The space that it takes on the host.
    pub disk_bytes: u64,
    /// Seconds since 1970.
    pub created: u64,
    /// Whether a sandbox has it mounted.
    pub in_use: bool,
    pub image: PathBuf,
}

/// The volumes of one data directory.
#[derive(Clone, Debug)]
pub struct Volumes {
    folder: PathBuf,
}

impl Volumes {
    /// Opens the volumes of this user.
    pub fn open() -> Result<Self, Failure> {
        Self::at(&snapshots::data_dir()?.join("volumes"))
    }

    /// Opens the volumes in `folder`, which is made if it is not there.
    pub fn at(folder: &Path) -> Result<Self, Failure> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| failed("make", folder, &error))?;
        Ok(Self { folder: folder.to_owned() })
    }

    /// Makes a volume; a name that is taken is a conflict.
    pub fn create(&self, name: &str, bytes: u64) -> Result<Volume, Failure> {
        self.make(name, |image| volume::create(image, bytes))
    }

    /// Makes a copy of a volume that no sandbox writes.
    pub fn copy(&self, name: &str, new_name: &str) -> Result<Volume, Failure> {
        let from = self.get(name)?;
        let file = File::open(&from.image).map_err(|error| failed("open", &from.image, &error))?;
        require_lock(name, lock::try_shared(&file))?;
        self.make(new_name, |image| volume::copy(&from.image, image))
    }

    /// Grows a volume that no sandbox uses.
    pub fn resize(&self, name: &str, bytes: u64) -> Result<Volume, Failure> {
        let old = self.get(name)?;
        let _held = hold(&old)?;
        volume::grow(&old.image, bytes).map_err(refuse)?;
        self.get(name)
    }

    /// Removes a volume that no sandbox uses, and all that is in it.
    pub fn remove(&self, name: &str) -> Result<(), Failure> {
        let volume = self.get(name)?;
        let _held = hold(&volume)?;
        let folder = self.folder.join(name);
        fs::remove_dir_all(&folder).map_err(|error| failed("remove", &folder, &error))
    }

    pub fn get(&self, name: &str) -> Result<Volume, Failure> {
        check(name)?;
        self.read(name).ok_or_else(|| {
            Failure::usage(format!("volume '{name}' not found"))
                .of_kind(FailureKind::NotFound)
                .hint("'pvmm volume ls' lists the volumes there are")
        })
    }

    /// Lists all volumes by name. What a killed process left unfinished is removed.
    pub fn list(&self) -> Result<Vec<Volume>, Failure> {
        let entries =
            fs::read_dir(&self.folder).map_err(|error| failed("read", &self.folder, &error))?;
        let mut volumes = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(UNFINISHED) {
                remove_abandoned(&entry.path());
            } else {
                volumes.extend(self.read(&name));
            }
        }
        volumes.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(volumes)
    }

    fn read(&self, name: &str) -> Option<Volume> {
        let image = self.folder.join(name).join(IMAGE);
        let file = File::open(&image).ok()?;
        let facts = file.metadata().ok()?;
        let created = facts.created().or_else(|_| facts.modified()).ok();
        let created = created.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        Some(Volume {
            name: name.to_owned(),
            bytes: facts.len(),
            disk_bytes: facts.blocks() * 512,
            created: created.map_or(0, |since| since.as_secs()),
            in_use: !lock::try_exclusive(&file).unwrap_or(false),
            image,
        })
    }

    /// Makes the folder of a volume beside its place, and gives it its name when it is complete.
    fn make(
        &self,
        name: &str,
        image: impl FnOnce(&Path) -> Result<(), VolumeError>,
    ) -> Result<Volume, Failure> {
        check(name)?;
        let place = self.folder.join(name);
        let taken = || {
            Failure::usage(format!("a volume '{name}' exists already"))
                .of_kind(FailureKind::Conflict)
        };
        if place.exists() {
            return Err(taken());
        }
        let unfinished = self.folder.join(format!("{UNFINISHED}{name}-{}", std::process::id()));
        let at = |error: io::Error| failed("make", &unfinished, &error);
        DirBuilder::new().mode(0o700).create(&unfinished).map_err(at)?;
        let held = File::open(&unfinished).map_err(at)?;
        lock::try_exclusive(&held).map_err(at)?;
        let made = image(&unfinished.join(IMAGE)).map_err(refuse).and_then(|()| {
            fs::rename(&unfinished, &place).map_err(|error| match error.kind() {
                io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => taken(),
                _ => failed("make", &place, &error),
            })
        });
        if made.is_err() {
            let _ = fs::remove_dir_all(&unfinished);
        }
        made?;
        self.get(name)
    }
}

/// Takes the lock of a volume that nobody uses.
fn hold(volume: &Volume) -> Result<lock::Guard, Failure> {
    let file = File::open(&volume.image).map_err(|error| failed("open", &volume.image, &error))?;
    require_lock(&volume.name, lock::try_exclusive(&file))?;
    Ok(lock::Guard::of(file))
}

fn require_lock(name: &str, held: io::Result<bool>) -> Result<(), Failure> {
    match held {
        Ok(true) => Ok(()),
        Ok(false) => Err(Failure::usage(format!("volume '{name}' is in use by a sandbox"))
            .of_kind(FailureKind::Conflict)
            .hint("end the sandbox first")),
        Err(error) => Err(Failure::fault(format!("cannot lock volume '{name}': {error}"))),
    }
}

/// Removes a folder that nobody is making any more.
fn remove_abandoned(folder: &Path) {
    let free = File::open(folder).and_then(|folder| lock::try_exclusive(&folder));
    if free.unwrap_or(false) {
        let _ = fs::remove_dir_all(folder);
    }
}

fn check(name: &str) -> Result<(), Failure> {
    check_name(name).map(drop).map_err(|why| Failure::usage(format!("volume: {why}")))
}

fn failed(act: &str, path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::fault(format!("cannot {act} {}: {}", path.display(), io_text(error)));
    match error.kind() {
        io::ErrorKind::StorageFull => failure.of_kind(FailureKind::DiskFull),
        _ => failure,
    }
}

impl Blame for VolumeError {
    fn is_users(&self) -> bool {
        matches!(self, VolumeError::Size { .. } | VolumeError::Shrink { .. })
    }

    fn kind(&self) -> Option<FailureKind> {
        match self {
            VolumeError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Some(FailureKind::DiskFull)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::probe::without_forks;

    #[test]
    fn volume_in_use_is_neither_removed_nor_grown_nor_copied_while_it_is_written() {
        let _alone = without_forks();
        let dir = tempfile::tempdir().unwrap();
        let volumes = Volumes::at(dir.path()).unwrap();
        let volume = volumes.create("data", 16 << 20).unwrap();
        assert_eq!(volumes.create("data", 16 << 20).unwrap_err().kind(), FailureKind::Conflict);
        let user = File::open(&volume.image).unwrap();
        assert!(lock::try_exclusive(&user).unwrap());
        assert!(volumes.get("data").unwrap().in_use);
        for refused in [
            volumes.remove("data").unwrap_err(),
            volumes.resize("data", 32 << 20).unwrap_err(),
            volumes.copy("data", "more").unwrap_err(),
        ] {
            assert_eq!(refused.kind(), FailureKind::Conflict, "{refused:?}");
        }
        drop(user);
        assert_eq!(volumes.resize("data", 32 << 20).unwrap().bytes, 32 << 20);
        volumes.copy("data", "more").unwrap();
        volumes.remove("data").unwrap();
        assert_eq!(volumes.get("data").unwrap_err().kind(), FailureKind::NotFound);
        assert_eq!(volumes.list().unwrap().len(), 1);
    }

    #[test]
    fn folder_of_a_killed_maker_is_removed_and_a_bad_name_refused() {
        let _alone = without_forks();
        let dir = tempfile::tempdir().unwrap();
        let volumes = Volumes::at(dir.path()).unwrap();
        fs::create_dir(dir.path().join(".new-x-1")).unwrap();
        assert!(volumes.list().unwrap().is_empty());
        assert!(!dir.path().join(".new-x-1").exists());
        for name in ["", "..", "a/b", ".new-x"] {
            assert_eq!(volumes.get(name).unwrap_err().kind(), FailureKind::InvalidInput, "{name}");
        }
    }
}
