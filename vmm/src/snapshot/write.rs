//! Writes a folder under a hidden name, syncs it and renames it. A writer killed at any moment
//! leaves the old snapshot or the new one, never a part of one.
//!
//! A killed writer leaves a hidden folder that no process holds a lock on; the next writer in its
//! parent folder removes it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use pvmm_devices::open;

use super::checksum::{FileSums, Stamp};
use super::manifest::{self, BaseFacts, DiskFacts, Manifest, MemoryFacts, SnapshotKind, disk_file};
use super::sections::{self, Saved, SavedDisks, WorkingSetV1};
use super::signature::{self, Key, SIGNATURE};
use super::{Base, CHAIN_MAX, MANIFEST, MEMORY, MachineFacts, SIBLING, STATE, SnapshotError, host};
use crate::error::{Error, ErrorKind};
use crate::frozen::Frozen;
use crate::memory::{MAX_RUNS, MemoryImage, WorkingSet};
use crate::state::MachineState;
use crate::storage::{FrozenStorage, MissingDrive};
use crate::sys;
use crate::trace;

pub(super) const UNFINISHED: &str = ".pvmm-unfinished-";

/// The loss that a power cut may cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Nothing: every byte is on the disk before the snapshot has its name.
    #[default]
    Full,
    /// The snapshot: a crash of the host may leave it empty or damaged. The first restore detects
    /// this, because it compares all of it.
    None,
}

/// How a snapshot is written.
#[derive(Default)]
pub struct WriteOptions<'a> {
    /// The loss that a power cut may cause; none by default.
    pub durability: Durability,
    /// Replace an existing snapshot of that name.
    pub replace: bool,
    /// Write only the changes since the snapshot that the VM was restored from, if there is one.
    pub incremental: bool,
    /// Write the disks alone, without memory and registers.
    pub disk_only: bool,
    /// Sign the snapshot, so that readers with this key can check who wrote it.
    pub key: Option<&'a Key>,
    /// Called with the bytes written and the total.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
    /// Called with the folder that is written to until it is renamed, for a caller that may have to
    /// end the process and remove the folder.
    pub begun: Option<&'a mut dyn FnMut(&Path)>,
}

/// Writes the template as the folder `dir`.
pub fn write(frozen: &Frozen, dir: &Path, options: WriteOptions) -> Result<Manifest, Error> {
    if frozen.without_memory && !options.disk_only {
        let what = "snapshot: the template was loaded without its memory";
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    }
    let contents = Contents {
        machine: &frozen.state,
        facts: host::facts(
            &frozen.host,
            &frozen.state.cpu,
            frozen.state.vcpus.len() as u32,
            frozen.image.size() >> 20,
        ),
        image: &frozen.image,
        drives: &frozen.drives,
        taps: &frozen.taps,
        vsock_path: frozen.vsock_path.as_deref(),
        base: frozen.base.as_ref(),
        working_set: frozen.working_set.as_deref(),
        note: &frozen.note,
    };
    contents.write(dir, options)
}

/// The parts of a template that go into a folder: everything but the host.
pub(super) struct Contents<'a> {
    pub machine: &'a MachineState,
    pub facts: MachineFacts,
    pub image: &'a MemoryImage,
    pub drives: &'a [FrozenStorage],
    pub taps: &'a [String],
    pub vsock_path: Option<&'a Path>,
    pub base: Option<&'a Base>,
    pub working_set: Option<&'a WorkingSet>,
    pub note: &'a [u8],
}

impl Contents<'_> {
    pub(super) fn write(&self, dir: &Path, mut options: WriteOptions) -> Result<Manifest, Error> {
        if !options.replace && fs::symlink_metadata(dir).is_ok() {
            return Err(SnapshotError::Exists { dir: dir.display().to_string() }.into());
        }
        let unfinished = Unfinished::begin(dir)?;
        if let Some(begun) = &mut options.begun {
            begun(&unfinished.path);
        }
        let manifest = self.write_files(&unfinished, &mut options)?;
        unfinished.publish(dir, &options)?;
        trace::step("published");
        Ok(manifest)
    }

    fn write_files(
        &self,
        folder: &Unfinished,
        options: &mut WriteOptions,
    ) -> Result<Manifest, SnapshotError> {
        let own = self.image.base_layers();
        let own_runs = self.image.runs_from(own);
        // A chain that would be too long, or too scattered to be mapped, is written whole; so is
        // memory that is no longer mapped over its base.
        let base = self.base.filter(|base| {
            let incremental = options.incremental && !options.disk_only;
            incremental && own > 0 && base.depth < CHAIN_MAX && own_runs.len() <= MAX_RUNS
        });
        let (own_layers, runs) = match base {
            Some(_) => (own, own_runs),
            None => (0, Vec::new()),
        };
        let mut progress = Progress { done: 0, total: self.data_bytes(own_layers), options };

        let (size, disk_only) = (self.image.size(), progress.options.disk_only);
        let mut sums = Vec::new();
        if !disk_only {
            let memory = folder.create(MEMORY)?;
            let read = |at: u64, bytes: &mut [u8]| self.image.read(own_layers, at, bytes);
            let fill =
                || FileSums::write(MEMORY, &memory, size, read, &mut |bytes| progress.add(bytes));
            sums.push(folder.finish(MEMORY, &memory, size, fill)?);
            if let Some(sibling) = self.image.dedup_source() {
                folder.copy_sibling(sibling, size)?;
            }
            trace::step("memory written");
        }
        let disks = self.write_disks(folder, &mut sums)?;
        trace::step("disks written");
        // A stamp says that a file need not be compared. For a file that is not synced, a power cut
        // may keep the metadata and lose the bytes.
        let stamps = match progress.options.durability {
            Durability::Full => folder.stamps(&sums)?,
            Durability::None => Vec::new(),
        };
        let note = Some(self.note.to_vec()).filter(|note| !note.is_empty());
        let (state, sections) = if disk_only {
            let cpu = self.machine.cpu.clone();
            sections::encode_disks(&SavedDisks { cpu, sums, note, stamps })?
        } else {
            let machine = self.machine.clone();
            let working_set = self.working_set.map(WorkingSetV1::of);
            sections::encode(&Saved { machine, sums, runs, working_set, note, stamps })?
        };
        folder.write(STATE, &state)?;
        let manifest = Manifest {
            format: if disk_only { manifest::DISKS_FORMAT } else { manifest::FORMAT }.to_owned(),
            version: manifest::VERSION,
            id: random_id().map_err(|e| cannot(MANIFEST, e))?,
            created_by: concat!("pvmm ", env!("CARGO_PKG_VERSION")).to_owned(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
            machine: self.facts.clone(),
            memory: MemoryFacts {
                size,
                regions: self.image.regions().iter().map(|r| (r.address, r.len)).collect(),
                base: base
                    .map(|base| BaseFacts { id: base.id.clone(), path: canonical(&base.dir) }),
            },
            disks,
            taps: self.taps.to_vec(),
            vsock_path: self.vsock_path.map(|path| path.display().to_string()),
            sections,
            checksum: 0,
        };
        let text = manifest.encode()?;
        folder.write(MANIFEST, &text)?;
        if let Some(key) = progress.options.key {
            folder.sign(key, &manifest, &[(MANIFEST, &text), (STATE, &state)])?;
        }
        trace::step("state written");
        if progress.options.durability == Durability::Full {
            folder.sync(&manifest)?;
            trace::step("synced");
        }
        progress.add(u64::MAX);
        Ok(manifest)
    }

    /// Writes the disks that belong to the VM, adds their checksums to `sums`, and describes all
    /// disks.
    fn write_disks(
        &self,
        folder: &Unfinished,
        sums: &mut Vec<FileSums>,
    ) -> Result<Vec<DiskFacts>, SnapshotError> {
        let mut disks = Vec::new();
        for (index, drive) in self.drives.iter().enumerate() {
            let name = disk_file(index);
            let facts = match drive {
                FrozenStorage::Missing { path, allowed, .. } => {
                    return Err(MissingDrive::new(index, path, *allowed).into());
                }
                FrozenStorage::Named { .. } => return Err(SnapshotError::NotOpened { index }),
                FrozenStorage::Fixed { file, path: Some(path) } => outside(file, path, &name)?,
                FrozenStorage::Fixed { file, path: None } => {
                    let size = file.metadata().map_err(|e| cannot(&name, e))?.size();
                    let disk = folder.create(&name)?;
                    let fill = || -> io::Result<FileSums> {
                        disk.set_len(size)?;
                        pvmm_devices::sparse::copy(file, &disk, 0..size)?;
                        FileSums::of(&name, &disk, size)
                    };
                    sums.push(folder.finish(&name, &disk, size, fill)?);
                    DiskFacts::Inside { file: name, size, read_only: true }
                }
                FrozenStorage::Layers(layers) => {
                    let disk = folder.create(&name)?;
                    let fill = || -> io::Result<FileSums> {
                        layers.write_frozen(&disk)?;
                        FileSums::of(&name, &disk, layers.size())
                    };
                    sums.push(folder.finish(&name, &disk, layers.size(), fill)?);
                    DiskFacts::Inside { file: name, size: layers.size(), read_only: false }
                }
            };
            disks.push(facts);
        }
        Ok(disks)
    }

    fn data_bytes(&self, from_layer: usize) -> u64 {
        self.image.layers().iter().skip(from_layer).map(|layer| layer.range_bytes()).sum()
    }
}

struct Progress<'a, 'b> {
    done: u64,
    total: u64,
    options: &'a mut WriteOptions<'b>,
}

impl Progress<'_, '_> {
    fn add(&mut self, bytes: u64) {
        self.done = self.done.saturating_add(bytes).min(self.total);
        if let Some(tell) = &mut self.options.progress {
            tell(self.done, self.total);
        }
    }
}

/// Describes a read-only image outside of the folder, which is recorded and not copied.
fn outside(file: &File, path: &Path, name: &str) -> Result<DiskFacts, SnapshotError> {
    let facts = file.metadata().map_err(|e| cannot(name, e))?;
    Ok(DiskFacts::Outside {
        path: canonical(path),
        size: facts.size(),
        modified_ns: modified_ns(&facts),
    })
}

/// Resolves symbolic links as they are today.
fn canonical(path: &Path) -> String {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()).display().to_string()
}

pub fn modified_ns(facts: &fs::Metadata) -> i128 {
    i128::from(facts.mtime()) * 1_000_000_000 + i128::from(facts.mtime_nsec())
}

/// A folder that is being written. Dropping it removes the folder unless it was published.
struct Unfinished {
    path: PathBuf,
    parent: PathBuf,
    // Held while this process writes; a process that can take the lock may remove the folder.
    _lock: File,
    published: std::cell::Cell<bool>,
}

impl Unfinished {
    fn begin(dir: &Path) -> Result<Self, SnapshotError> {
        let named = dir.file_name().is_some();
        let parent = match dir.parent() {
            Some(parent) if named && parent.as_os_str().is_empty() => PathBuf::from("."),
            Some(parent) if named => parent.to_owned(),
            _ => {
                let source = io::Error::other("it is not the name of a folder");
                return Err(cannot(&dir.display().to_string(), source));
            }
        };
        let failed = |error| cannot(&dir.display().to_string(), error);
        sweep(&parent, |path| fs::remove_dir_all(path).or_else(|_| fs::remove_file(path)));
        let path = parent.join(format!("{UNFINISHED}{}", random_id().map_err(failed)?));
        fs::DirBuilder::new().mode(0o700).create(&path).map_err(failed)?;
        let begun = Self::lock(&path).map(|lock| Self {
            path: path.clone(),
            parent,
            _lock: lock,
            published: std::cell::Cell::new(false),
        });
        begun.map_err(|error| {
            let _ = fs::remove_dir(&path);
            failed(error)
        })
    }

    fn lock(path: &Path) -> io::Result<File> {
        let lock = open::found(path)?;
        sys::lock_file(&lock)?;
        Ok(lock)
    }

    fn create(&self, name: &str) -> Result<File, SnapshotError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        options.open(self.path.join(name)).map_err(|e| cannot(name, e))
    }

    /// Fills a large file with `fill`, which returns its checksums, and makes it read-only.
    fn finish(
        &self,
        name: &str,
        file: &File,
        size: u64,
        fill: impl FnOnce() -> io::Result<FileSums>,
    ) -> Result<FileSums, SnapshotError> {
        let finish = || -> io::Result<FileSums> {
            let sums = fill()?;
            let written = file.metadata()?.size();
            if written != size {
                return Err(io::Error::other(format!("{written} bytes instead of {size}")));
            }
            sys::set_mode(file, 0o400)?;
            Ok(sums)
        };
        finish().map_err(|e| cannot(name, e))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.create(name)?.write_all(bytes).map_err(|e| cannot(name, e))
    }

    /// Copies the sibling's file. It needs no checksum: it is compared with guest memory before it
    /// is used.
    fn copy_sibling(&self, sibling: &File, size: u64) -> Result<(), SnapshotError> {
        let file = self.create(SIBLING)?;
        let fill = || -> io::Result<()> {
            file.set_len(size)?;
            pvmm_devices::sparse::copy(sibling, &file, 0..size)?;
            sys::set_mode(&file, 0o400)
        };
        fill().map_err(|e| cannot(SIBLING, e))
    }

    /// Returns the stamps of the files that were just written.
    fn stamps(&self, sums: &[FileSums]) -> Result<Vec<Stamp>, SnapshotError> {
        let stamp = |FileSums { file: name, .. }: &FileSums| {
            let looked = File::open(self.path.join(name)).and_then(|file| Stamp::of(name, &file));
            looked.map_err(|e| cannot(name, e))
        };
        sums.iter().map(stamp).collect()
    }

    fn sign(
        &self,
        key: &Key,
        manifest: &Manifest,
        small: &[(&str, &[u8])],
    ) -> Result<(), SnapshotError> {
        let of_bytes =
            |(name, bytes): &(&str, &[u8])| ((*name).to_owned(), signature::digest_bytes(bytes));
        let mut files: Vec<_> = small.iter().map(of_bytes).collect();
        for (name, size) in large_files(manifest) {
            let file = File::open(self.path.join(&name)).map_err(|e| cannot(&name, e))?;
            let digest = signature::digest(&file, size).map_err(|e| cannot(&name, e))?;
            files.push((name, digest));
        }
        self.write(SIGNATURE, key.sign(&files).as_bytes())
    }

    fn sync(&self, manifest: &Manifest) -> Result<(), SnapshotError> {
        let mut names: Vec<_> = large_files(manifest).into_iter().map(|(name, _)| name).collect();
        names.extend([STATE, MANIFEST].map(str::to_owned));
        let perhaps = [SIBLING, SIGNATURE].into_iter().filter(|name| self.path.join(name).exists());
        names.extend(perhaps.map(str::to_owned));
        for name in names {
            let synced = File::open(self.path.join(&name)).and_then(|file| file.sync_all());
            synced.map_err(|e| cannot(&name, e))?;
        }
        File::open(&self.path).and_then(|dir| dir.sync_all()).map_err(|e| cannot("folder", e))
    }

    /// Renames the folder to `dir`.
    fn publish(self, dir: &Path, options: &WriteOptions) -> Result<(), SnapshotError> {
        let failed = |error| cannot(&dir.display().to_string(), error);
        match sys::rename_new(&self.path, dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && options.replace => {
                // The old snapshot now has the hidden name and is removed by `drop`.
                sys::rename_exchange(&self.path, dir).map_err(failed)?;
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(SnapshotError::Exists { dir: dir.display().to_string() });
            }
            result => {
                result.map_err(failed)?;
                self.published.set(true);
            }
        }
        if options.durability == Durability::Full {
            File::open(&self.parent).and_then(|dir| dir.sync_all()).map_err(failed)?;
        }
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.published.get() {
            // A folder that cannot be removed now is removed by the next writer.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Calls `remove` for each folder and file that a killed writer has left in `parent`.
pub(super) fn sweep(parent: &Path, remove: impl Fn(&Path) -> io::Result<()>) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(UNFINISHED);
        if ours && Unfinished::lock(&entry.path()).is_ok() {
            // What cannot be removed now is removed by the next writer.
            let _ = remove(&entry.path());
        }
    }
}

/// Returns the names and sizes of the files of a snapshot that have checksums.
pub fn large_files(manifest: &Manifest) -> Vec<(String, u64)> {
    let mut files = match manifest.kind() {
        SnapshotKind::Memory => vec![(MEMORY.to_owned(), manifest.memory.size)],
        SnapshotKind::Disk => Vec::new(),
    };
    for disk in &manifest.disks {
        if let DiskFacts::Inside { file, size, .. } = disk {
            files.push((file.clone(), *size));
        }
    }
    files
}

pub(super) fn random_id() -> io::Result<String> {
    let mut bytes = [0; 16];
    sys::fill_random(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn cannot(file: &str, source: io::Error) -> SnapshotError {
    SnapshotError::Write { file: file.to_owned(), source }
}
