//! Loads a folder as a template. Every defect is reported with its name before anything is mapped.

use std::cell::OnceCell;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{self, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pvmm_devices::open;
use pvmm_devices::virtio::block::io::LayeredDisk;

use super::checksum::{FileSums, Stamp};
use super::manifest::{DiskFacts, Manifest, SnapshotKind};
use super::outside::Roots;
use super::sections::{self, Saved};
use super::signature::{Key, SIGNATURE, SIGNATURE_MAX};
use super::write::{large_files, modified_ns};
use super::{
    Base, CHAIN_MAX, MANIFEST, MANIFEST_MAX, MEMORY, NOTE_MAX, SIBLING, STAMP, STATE, STATE_MAX,
    SnapshotError, host, outside, signature,
};
use crate::error::Error;
use crate::frozen::Frozen;
use crate::kvm::vm::Kvm;
use crate::memory::{self, Layer, MemoryImage, PAGE, PageRanges};
use crate::storage::FrozenStorage;
use crate::sys;
use crate::trace;

/// How a snapshot is loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Copy the memory into a sealed file in host memory, so that no change of the folder can reach
    /// a guest. Meant for templates from which many VMs are started.
    pub hold: bool,
    /// Compare every byte with its checksum, even if a stamp says that it was done before.
    pub verify: bool,
    /// Do not open the memory: a page server will supply it to each VM.
    pub without_memory: bool,
    /// Folders below which files may be that the snapshot only names: its base, and read-only
    /// images that were not copied. `None` allows every path and is for snapshots whose writer is
    /// trusted with the files of this user.
    pub roots: Roots,
    /// Accept only a snapshot that was signed with this key. Every byte is compared, and memory is
    /// held as with `hold`.
    pub key: Option<Key>,
}

/// Reads the snapshot in `dir`.
pub fn load(kvm: &Kvm, dir: &Path, options: LoadOptions) -> Result<Frozen, Error> {
    let folder = Folder::open_with(dir, options.key.as_ref())?;
    if folder.manifest.kind() == SnapshotKind::Disk {
        return Err(SnapshotError::NoMemory { dir: dir.display().to_string() }.into());
    }
    let options = LoadOptions { hold: options.hold || options.key.is_some(), ..options };
    trace::step("manifest");
    let host = kvm.0.clone();
    host::check(&folder.manifest.machine, &host)?;
    trace::step("ask KVM what it can");
    let saved = folder.state()?;
    if saved.note.as_ref().is_some_and(|note| note.len() > NOTE_MAX) {
        return Err(SnapshotError::State("has a note that is too long".into()).into());
    }
    host::check_machine(&saved.machine, &folder.manifest.machine, &host)?;
    if saved.machine.vcpus.len() != folder.manifest.machine.vcpus as usize {
        return Err(SnapshotError::State("has another number of vCPUs".into()).into());
    }
    trace::step("decode state");
    let mut files = folder.verify(&saved, &options)?;
    trace::step("verify");

    let size = folder.manifest.memory.size;
    let working_set = saved.working_set.as_ref().map(|set| set.check(size)).transpose()?;
    let layers = if options.without_memory {
        Vec::new()
    } else {
        folder.layers(&saved, &mut files, &options, 0)?
    };
    let depth = layers.len();
    let mut image = MemoryImage::empty(folder.manifest.regions());
    for layer in layers {
        image = image.with(layer);
    }
    image = image.on_base(depth).with_dedup_file(folder.large(SIBLING, size).ok().map(Arc::new));
    if options.hold && !options.without_memory {
        image = image.copy_to_memfd()?;
    }
    trace::step("memory layers");
    let drives = folder.drives(&mut files, &options)?;
    trace::step("disks");
    let manifest = &folder.manifest;
    let id = manifest.id.clone();
    let dir = path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    Ok(Frozen {
        host,
        state: Arc::new(saved.machine),
        image,
        drives,
        taps: manifest.taps.clone(),
        vsock_path: manifest.vsock_path.as_ref().map(PathBuf::from),
        base: (!options.without_memory).then_some(Base { id, dir, depth }),
        working_set: working_set.map(Arc::new),
        without_memory: options.without_memory,
        note: saved.note.unwrap_or_default(),
        memory_sums: None,
        pause: Duration::ZERO,
    })
}

impl Manifest {
    /// Reads the manifest of the snapshot in `dir` and no other file.
    pub fn read(dir: &Path) -> Result<Self, Error> {
        Self::read_signed(dir, None)
    }

    /// Reads the manifest like [`Self::read`]. With a key, nothing is decoded unless a holder of
    /// the key has signed it.
    pub fn read_signed(dir: &Path, key: Option<&Key>) -> Result<Self, Error> {
        Ok(Folder::open_with(dir, key)?.manifest)
    }
}

/// An open snapshot folder and its manifest.
pub(super) struct Folder {
    dir: File,
    pub(super) path: PathBuf,
    pub(super) manifest: Manifest,
    /// The signed digests of its files, if a key was given.
    signed: Option<Signed>,
}

impl Folder {
    #[cfg(test)]
    pub(super) fn open(path: &Path) -> Result<Self, SnapshotError> {
        Self::open_with(path, None)
    }

    pub(super) fn open_with(path: &Path, key: Option<&Key>) -> Result<Self, SnapshotError> {
        let failed = |source| SnapshotError::Read { file: path.display().to_string(), source };
        Self::read(sys::open_dir(path).map_err(failed)?, path, key)
    }

    /// Opens the base of a snapshot at `path`, if `options` allow it.
    fn open_base(path: &Path, options: &LoadOptions) -> Result<Self, String> {
        if !outside::is_allowed(path, &options.roots) {
            return Err(
                "is in no folder that a snapshot may name files of; allow its folder".into()
            );
        }
        let dir = outside::open_folder(path).map_err(|error| error.to_string())?;
        Self::read(dir, path, options.key.as_ref()).map_err(|error| error.to_string())
    }

    /// Reads the manifest. With a key, nothing is decoded before its signature has been verified.
    pub(super) fn read(dir: File, path: &Path, key: Option<&Key>) -> Result<Self, SnapshotError> {
        let bytes = read_small(&dir, MANIFEST, MANIFEST_MAX);
        if bytes.is_err() {
            refuse_foreign_folder(path)?;
        }
        let bytes = bytes?;
        let signed = key.map(|key| Signed::read(&dir, key)).transpose()?;
        if let Some(signed) = &signed {
            signed.check(MANIFEST, signature::digest_bytes(&bytes))?;
        }
        Ok(Self { dir, path: path.to_owned(), manifest: Manifest::decode(&bytes)?, signed })
    }

    /// Returns the open folder.
    pub(super) fn dir(&self) -> &File {
        &self.dir
    }

    pub(super) fn state(&self) -> Result<Saved, SnapshotError> {
        sections::decode(&self.state_bytes()?, &self.manifest.sections)
    }

    /// Returns the contents of `state.bin`.
    pub(super) fn state_bytes(&self) -> Result<Vec<u8>, SnapshotError> {
        let bytes = read_small(&self.dir, STATE, STATE_MAX)?;
        if let Some(signed) = &self.signed {
            signed.check(STATE, signature::digest_bytes(&bytes))?;
        }
        Ok(bytes)
    }

    /// Opens a large file, whose size must be the manifest's.
    pub(super) fn large(&self, name: &str, expected: u64) -> Result<File, SnapshotError> {
        let (file, size) = open_plain(&self.dir, name)?;
        if size == expected {
            Ok(file)
        } else {
            Err(SnapshotError::Size { file: name.to_owned(), size, expected })
        }
    }

    /// Opens the large files and compares them with their checksums, unless their stamps are known.
    /// The returned files are the compared ones and must not be opened again by name.
    pub(super) fn verify(
        &self,
        saved: &Saved,
        options: &LoadOptions,
    ) -> Result<LargeFiles, SnapshotError> {
        self.verify_files(&saved.sums, &saved.stamps, options)
    }

    /// Does [`Self::verify`] for files with these checksums and stamps.
    pub(super) fn verify_files(
        &self,
        sums: &[FileSums],
        stamps_then: &[Stamp],
        options: &LoadOptions,
    ) -> Result<LargeFiles, SnapshotError> {
        // Stamps in a file of their own belong to a folder that was moved to another disk, or that
        // an earlier version wrote.
        let later: OnceCell<Vec<Stamp>> = OnceCell::new();
        let known = |stamp: &Stamp| {
            stamps_then.contains(stamp) || later.get_or_init(|| self.kept()).contains(stamp)
        };
        let (mut files, mut stamps, mut compared) = (Vec::new(), Vec::new(), false);
        let wanted = |(name, _): &(String, u64)| !options.without_memory || name != MEMORY;
        for (name, size) in large_files(&self.manifest).into_iter().filter(wanted) {
            let sums = sums.iter().find(|sums| sums.file == name && sums.size == size);
            let sums = sums.ok_or_else(|| SnapshotError::State(format!("no sums of {name}")))?;
            let file = self.large(&name, size)?;
            let failed = |source| SnapshotError::Read { file: name.clone(), source };
            let stamp = Stamp::of(&name, &file).map_err(failed)?;
            if options.verify || !known(&stamp) {
                compared = true;
                if let Some(offset) = sums.compare(&file).map_err(failed)? {
                    return Err(SnapshotError::Checksum { file: name.clone(), offset });
                }
            }
            if let Some(signed) = &self.signed {
                signed.check(&name, signature::digest(&file, size).map_err(failed)?)?;
            }
            stamps.push(stamp);
            files.push((name, file));
        }
        // An incomplete list of stamps would make the next load compare everything again.
        if compared && !options.without_memory {
            self.keep(&stamps, &files);
        }
        Ok(LargeFiles(files))
    }

    /// Returns the stamps that [`Self::keep`] wrote.
    fn kept(&self) -> Vec<Stamp> {
        let bytes = read_small(&self.dir, STAMP, MANIFEST_MAX).ok();
        bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }

    /// Records the stamps, so that the next load need not compare again. A folder that cannot be
    /// written is compared at each load. The files are synced first: otherwise a power cut could
    /// leave a valid stamp over lost bytes.
    fn keep(&self, stamps: &[Stamp], files: &[(String, File)]) {
        let hidden = self.path.join(format!(".{STAMP}-{}", std::process::id()));
        let kept = serde_json::to_vec(stamps).map_err(std::io::Error::from).and_then(|bytes| {
            files.iter().try_for_each(|(_, file)| file.sync_all())?;
            File::create_new(&hidden)?.write_all(&bytes)?;
            fs::rename(&hidden, self.path.join(STAMP))
        });
        if kept.is_err() {
            let _ = fs::remove_file(&hidden);
        }
    }

    /// Returns the layers of the memory image, lowest first.
    pub(super) fn layers(
        &self,
        saved: &Saved,
        files: &mut LargeFiles,
        options: &LoadOptions,
        depth: usize,
    ) -> Result<Vec<Layer>, SnapshotError> {
        let size = self.manifest.memory.size;
        let file = files.take(MEMORY)?;
        let Some(base) = &self.manifest.memory.base else {
            return Ok(vec![Layer::new(file.into(), PageRanges::all(size))]);
        };
        let refused = |reason: String| SnapshotError::Base { dir: base.path.clone(), reason };
        if depth >= CHAIN_MAX {
            return Err(refused("the chain is too long".into()));
        }
        let below = Self::open_base(Path::new(&base.path), options).map_err(&refused)?;
        if below.manifest.id != base.id {
            return Err(refused("is another snapshot than the one it was".into()));
        }
        if below.manifest.memory.regions != self.manifest.memory.regions {
            return Err(refused("has other memory regions".into()));
        }
        let saved_below = below.state()?;
        let mut files_below = below.verify(&saved_below, options)?;
        let mut layers = below.layers(&saved_below, &mut files_below, options, depth + 1)?;
        layers.push(Layer::new(file.into(), check_runs(&saved.runs, size)?));
        Ok(layers)
    }

    pub(super) fn drives(
        &self,
        files: &mut LargeFiles,
        options: &LoadOptions,
    ) -> Result<Vec<FrozenStorage>, SnapshotError> {
        let open = |(index, disk): (usize, &DiskFacts)| match disk {
            DiskFacts::Inside { file: name, read_only, .. } => {
                let file = files.take(name)?;
                let failed = |source| SnapshotError::Read { file: name.clone(), source };
                if *read_only {
                    Ok(FrozenStorage::Fixed { file, path: Some(self.path.join(name)) })
                } else {
                    let top = memory::memfd(c"pvmm-disk", 0).map_err(failed)?;
                    LayeredDisk::over(file, top).map(FrozenStorage::Layers).map_err(failed)
                }
            }
            // Unreachable for a folder: `Manifest::decode` refuses such a disk.
            DiskFacts::Named { path, .. } => {
                let path = path.clone().unwrap_or_default().into();
                Ok(FrozenStorage::Missing { index, path, allowed: true })
            }
            DiskFacts::Outside { path, size, modified_ns: modified } => {
                let path = PathBuf::from(path);
                let allowed = outside::is_allowed(&path, &options.roots);
                // Not an error yet: the caller may override this drive.
                Ok(match open_outside(&path, *size, *modified, &options.roots) {
                    Some(file) => FrozenStorage::Fixed { file, path: Some(path) },
                    None => FrozenStorage::Missing { index, path, allowed },
                })
            }
        };
        self.manifest.disks.iter().enumerate().map(open).collect()
    }
}

/// Opens an image outside of the folder, if it may be named and is the file that it was.
pub(super) fn open_outside(path: &Path, size: u64, modified: i128, roots: &Roots) -> Option<File> {
    let allowed = outside::is_allowed(path, roots);
    let file = allowed.then(|| outside::open_file(path).ok()).flatten()?;
    let facts = file.metadata().ok()?;
    (facts.size() == size && modified_ns(&facts) == modified).then_some(file)
}

/// The digests of a signed folder's files.
struct Signed(Vec<(String, [u8; 32])>);

impl Signed {
    fn read(dir: &File, key: &Key) -> Result<Self, SnapshotError> {
        let text = read_small(dir, SIGNATURE, SIGNATURE_MAX).map_err(|error| match error {
            SnapshotError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                SnapshotError::Signature("there is none".into())
            }
            error => error,
        })?;
        Ok(Self(key.verify(&text)?))
    }

    fn check(&self, name: &str, digest: [u8; 32]) -> Result<(), SnapshotError> {
        if self.0.iter().any(|(known, signed)| known == name && *signed == digest) {
            Ok(())
        } else {
            Err(SnapshotError::Signature(format!("{name} is not the file that was signed")))
        }
    }
}

/// The open files that were compared with their checksums, by name.
pub(super) struct LargeFiles(Vec<(String, File)>);

impl LargeFiles {
    pub(super) fn take(&mut self, name: &str) -> Result<File, SnapshotError> {
        let place = self.0.iter().position(|(known, _)| known == name);
        let (_, file) = place.map(|place| self.0.swap_remove(place)).ok_or_else(|| {
            let source = std::io::ErrorKind::NotFound.into();
            SnapshotError::Read { file: name.to_owned(), source }
        })?;
        Ok(file)
    }
}

/// Refuses a folder that holds a snapshot of two files, pvmm's or Firecracker's.
fn refuse_foreign_folder(path: &Path) -> Result<(), SnapshotError> {
    for name in ["vm.state", "snapshot", "snapshot_file", "vmstate", "snap.state"] {
        let state = path.join(name);
        let mut head = [0; super::files::HEAD];
        let opened = open::file(&state, open::Access::Read);
        let read = opened.and_then(|mut file| file.read_exact(&mut head));
        if read.is_ok() {
            super::files::refuse_foreign(&head, &state.display().to_string())?;
            if head.starts_with(&super::files::MAGIC) {
                return Err(SnapshotError::TwoFiles { path: state.display().to_string() });
            }
        }
    }
    Ok(())
}

/// Checks that ranges are whole pages, ascending and within the memory, and converts them.
pub fn check_runs(runs: &[(u64, u64)], size: u64) -> Result<PageRanges, SnapshotError> {
    let mut checked = PageRanges::with_capacity(runs.len());
    let mut end = 0;
    for (start, stop) in runs {
        let whole = start.is_multiple_of(PAGE) && stop.is_multiple_of(PAGE);
        if !whole || *start < end || start >= stop || *stop > size {
            return Err(SnapshotError::State("ranges of memory are impossible".into()));
        }
        checked.push(*start..*stop);
        end = *stop;
    }
    if checked.count() <= memory::MAX_RUNS {
        Ok(checked)
    } else {
        Err(SnapshotError::State("there are too many ranges of memory".into()))
    }
}

/// Opens a file of the folder, which must be a regular file and not a link.
pub(super) fn open_plain(dir: &File, name: &str) -> Result<(File, u64), SnapshotError> {
    let file = sys::open_beneath(dir, name).map_err(|source| match source.raw_os_error() {
        Some(libc::ELOOP | libc::ENXIO) => SnapshotError::Kind { file: name.to_owned() },
        _ => SnapshotError::Read { file: name.to_owned(), source },
    })?;
    let facts =
        file.metadata().map_err(|source| SnapshotError::Read { file: name.to_owned(), source })?;
    if facts.is_file() {
        Ok((file, facts.size()))
    } else {
        Err(SnapshotError::Kind { file: name.to_owned() })
    }
}

/// Reads a whole file of at most `max` bytes.
fn read_small(dir: &File, name: &str, max: u64) -> Result<Vec<u8>, SnapshotError> {
    let (file, size) = open_plain(dir, name)?;
    if size > max {
        return Err(SnapshotError::TooBig { file: name.to_owned(), size, max });
    }
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, 0)
        .map_err(|source| SnapshotError::Read { file: name.to_owned(), source })?;
    Ok(bytes)
}
