//! Opens a snapshot of disks alone, which a VM is booted with.
//!
//! Nothing here needs KVM: without memory and registers any host can use it.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::manifest::{DiskFacts, Manifest, SnapshotKind};
use super::read::{Folder, open_outside};
use super::{LoadOptions, NOTE_MAX, SnapshotError, sections};
use crate::cpu::CpuBaseline;
use crate::error::Error;

/// The disks of a VM at one instant, without its memory.
#[derive(Debug)]
pub struct Disks {
    /// The snapshot's table of contents.
    pub manifest: Manifest,
    /// The processor features that the VM was offered, for [`crate::VmConfig::cpu`].
    pub cpu: CpuBaseline,
    /// The note of the caller in the snapshot; empty if there is none.
    pub note: Vec<u8>,
    /// The disks in the guest's order.
    pub disks: Vec<Disk>,
}

/// One disk of a snapshot.
#[derive(Debug)]
pub enum Disk {
    /// A disk of the VM's own, for [`crate::Drive::over`].
    Own(File),
    /// An image that the guest only reads.
    ReadOnly {
        /// The open image.
        file: File,
        /// Its path.
        path: PathBuf,
    },
    /// An image outside of the snapshot that is gone or changed, or that the snapshot may not name.
    Missing {
        /// The path that the snapshot names.
        path: PathBuf,
    },
}

impl Disks {
    /// Reads the snapshot in the folder `dir`. Only `verify`, `roots` and `key` of the options
    /// matter.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self, Error> {
        Ok(Self::read(dir, options)?)
    }

    fn read(dir: &Path, options: &LoadOptions) -> Result<Self, SnapshotError> {
        let folder = Folder::open_with(dir, options.key.as_ref())?;
        if folder.manifest.kind() != SnapshotKind::Disk {
            return Err(SnapshotError::HasMemory { dir: dir.display().to_string() });
        }
        let saved = sections::decode_disks(&folder.state_bytes()?, &folder.manifest.sections)?;
        let note = saved.note.unwrap_or_default();
        if note.len() > NOTE_MAX {
            return Err(SnapshotError::State("has a note that is too long".into()));
        }
        let mut files = folder.verify_files(&saved.sums, &saved.stamps, options)?;
        let open = |disk: &DiskFacts| match disk {
            DiskFacts::Inside { file, read_only: false, .. } => Ok(Disk::Own(files.take(file)?)),
            DiskFacts::Inside { file, .. } => {
                Ok(Disk::ReadOnly { file: files.take(file)?, path: folder.path.join(file) })
            }
            DiskFacts::Outside { path, size, modified_ns } => {
                let path = PathBuf::from(path);
                Ok(match open_outside(&path, *size, *modified_ns, &options.roots) {
                    Some(file) => Disk::ReadOnly { file, path },
                    None => Disk::Missing { path },
                })
            }
            // Unreachable for a folder: `Manifest::decode` refuses such a disk.
            DiskFacts::Named { path, .. } => {
                Ok(Disk::Missing { path: path.clone().unwrap_or_default().into() })
            }
        };
        let disks = folder.manifest.disks.iter().map(open).collect::<Result<_, SnapshotError>>()?;
        Ok(Self { cpu: saved.cpu, note, disks, manifest: folder.manifest })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use pvmm_devices::virtio::block::io::LayeredDisk;

    use super::super::write::Contents;
    use super::super::{Key, MEMORY, WriteOptions, testing};
    use super::*;
    use crate::memory::{MemoryImage, Region};
    use crate::storage::FrozenStorage;

    /// Writes a snapshot of a disk that begins with a nine.
    fn write(dir: &Path, options: WriteOptions) -> Result<Manifest, Error> {
        let disk = tempfile::tempfile().unwrap();
        disk.write_all_at(&[9; 8192], 0).unwrap();
        let layers = LayeredDisk::over(disk, tempfile::tempfile().unwrap()).unwrap();
        let contents = Contents {
            machine: &testing::saved().machine,
            facts: testing::manifest(Vec::new()).machine,
            image: &MemoryImage::empty(vec![Region { address: 0, len: 64 << 20 }]),
            drives: &[FrozenStorage::Layers(layers)],
            taps: &[],
            vsock_path: None,
            base: None,
            working_set: None,
            note: b"note",
        };
        contents.write(dir, options)
    }

    fn refused(loaded: Result<Disks, Error>) -> String {
        format!("{:#}", loaded.unwrap_err())
    }

    #[test]
    fn snapshot_of_disks_has_no_memory_and_no_registers_and_is_read_back() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("snap");
        let written = write(&dir, WriteOptions { disk_only: true, ..Default::default() }).unwrap();
        assert_eq!(written.kind(), SnapshotKind::Disk);
        assert!(!dir.join(MEMORY).exists());
        let kinds: Vec<_> = written.sections.iter().map(|it| it.kind.as_str()).collect();
        assert_eq!(kinds, ["checksums", "note", "stamps"]);
        let read = Disks::load(&dir, &LoadOptions { verify: true, ..Default::default() }).unwrap();
        assert_eq!((read.note.as_slice(), read.manifest.machine.memory_mib), (&b"note"[..], 64));
        let [Disk::Own(file)] = read.disks.as_slice() else { panic!("{read:?}") };
        let mut byte = [0];
        file.read_exact_at(&mut byte, 8191).unwrap();
        assert_eq!(byte, [9]);
    }

    #[test]
    fn snapshot_of_the_other_kind_is_refused_by_its_name() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("snap");
        write(&dir, WriteOptions::default()).unwrap();
        let why = refused(Disks::load(&dir, &LoadOptions::default()));
        assert!(why.contains("holds memory"), "{why}");
    }

    #[test]
    fn disk_that_was_changed_or_signed_by_nobody_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let (key_file, dir) = (place.path().join("key"), place.path().join("snap"));
        std::fs::write(&key_file, [7; 32]).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&key_file, mode).unwrap();
        let key = Key::read(&key_file).unwrap();
        let signed = LoadOptions { key: Some(key.clone()), ..Default::default() };
        write(&dir, WriteOptions { disk_only: true, ..Default::default() }).unwrap();
        let why = refused(Disks::load(&dir, &signed));
        assert!(why.contains("there is none"), "{why}");
        let (disk_only, replace) = (true, true);
        let options =
            WriteOptions { disk_only, replace, key: Some(&key), ..WriteOptions::default() };
        write(&dir, options).unwrap();
        Disks::load(&dir, &signed).unwrap();
        let disk = dir.join("disk-0.img");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&disk, mode).unwrap();
        File::options().write(true).open(&disk).unwrap().write_all_at(&[8], 0).unwrap();
        for options in [LoadOptions::default(), signed] {
            let why = refused(Disks::load(&dir, &options));
            assert!(why.contains("disk-0.img"), "{why}");
        }
    }
}
