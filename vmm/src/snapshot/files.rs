//! A snapshot as two files that the caller names: state and memory.
//!
//! This is the format that Firecracker's clients use. The memory is one flat file that other
//! programs copy, serve page by page, or put on a block device. Disks are not part of the snapshot;
//! the caller names them again to resume the VM. The state file holds what a folder keeps in
//! `manifest.json` and `state.bin`, and a note of the caller.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::checksum::{FileSums, PIECE, Stamp, sum};
use super::manifest::{self, Manifest, MemoryFacts};
use super::outside::{self, Roots};
use super::sections::{self, Saved};
use super::write::random_id;
use super::written_file::WrittenFile;
use super::{DiskFacts, MANIFEST_MAX, MEMORY, STATE_MAX, SnapshotError, host};
use crate::error::{Error, ErrorKind};
use crate::frozen::Frozen;
use crate::kvm::vm::Kvm;
use crate::machine::Machine;
use crate::memory::{Layer, Memory, MemoryImage, PageRanges};
use crate::storage::{FrozenStorage, Storage};
use crate::{freeze, trace};

/// The first bytes of a state file.
pub(super) const MAGIC: [u8; 8] = *b"pvmm-vm\n";
const HEADER: usize = MAGIC.len() + 4;
/// The number in the first bytes of Firecracker's state files, on x86_64 and on aarch64. Later
/// versions put a byte before it that says how it is encoded.
const FIRECRACKER: [u64; 2] = [0x0710_1984_8664_0000, 0x0710_1984_aaaa_0000];
/// The longest note that a caller may leave in the state file.
pub const NOTE_MAX: usize = 256 << 10;

/// The kind of a state file, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFile {
    /// A state file that pvmm has written.
    Pvmm,
    /// A state file of Firecracker, which pvmm does not read.
    Firecracker,
    /// A file of another kind.
    Unknown,
    /// Missing, or not a file that can be read.
    Missing,
}

impl StateFile {
    /// Reads the first bytes of the file at `path` and returns its kind.
    pub fn of(path: &Path) -> Self {
        // Opening a pipe would block.
        if !fs::metadata(path).is_ok_and(|facts| facts.is_file()) {
            return Self::Missing;
        }
        let mut head = Vec::new();
        match File::open(path).and_then(|file| file.take(HEAD as u64).read_to_end(&mut head)) {
            Err(_) => Self::Missing,
            Ok(_) if head.starts_with(&MAGIC) => Self::Pvmm,
            Ok(_) if refuse_foreign(&head, "").is_err() => Self::Firecracker,
            Ok(_) => Self::Unknown,
        }
    }
}

/// Which part of guest memory is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveKind {
    /// All of guest memory.
    Full,
    /// The pages changed since the last save, or since the load. They are written over an existing
    /// memory file of the right size, otherwise into a new file with holes between them.
    Diff,
}

/// Writes the paused machine as two files, as [`crate::Vm::save_files`] describes.
pub fn save_files(
    machine: &mut Machine,
    state: &Path,
    memory: &Path,
    kind: SaveKind,
    note: &[u8],
) -> Result<(), Error> {
    let refuse = |what: &str| Err(Error::plain(ErrorKind::InvalidConfig, what));
    if machine.running {
        return refuse("save: the machine is running; pause it first");
    }
    if note.len() > NOTE_MAX {
        return refuse("save: the note is longer than 256 KiB");
    }
    if state == memory {
        return refuse("save: state and memory cannot be one file");
    }
    let disks = disk_facts(machine)?;
    sync_drives(machine)?;
    let saved_state = freeze::save_state(machine)?;
    trace::step("state saved");
    let all_here = match &machine.page_server {
        Some(server) => {
            server.save_begins()?;
            false
        }
        None => true,
    };
    let known = machine.resources.memory_sums.as_deref();
    let written = write_memory(&machine.memory, memory, kind, all_here, known);
    if let Some(server) = &machine.page_server {
        // What came after the server's end was zeros.
        server.save_ends()?;
    }
    let (memory_file, sums) = written?;
    trace::step("memory written");
    machine.resources.memory_sums = Some(Arc::from(sums.sums.as_slice()));
    publish(&memory_file, kind, state, |stamps| {
        let (runs, working_set, note) = (Vec::new(), None, Some(note.to_vec()));
        let saved =
            Saved { machine: saved_state, sums: vec![sums], runs, working_set, note, stamps };
        encode(machine, &saved, disks)
    })?;
    trace::step("files published");
    if machine.resources.track_changes {
        machine.memory.mark_saved();
    }
    Ok(())
}

fn encode(
    machine: &Machine,
    saved: &Saved,
    disks: Vec<DiskFacts>,
) -> Result<Vec<u8>, SnapshotError> {
    let (sections, table) = sections::encode(saved)?;
    let size = machine.memory.image.size();
    let failed = |source| SnapshotError::Write { file: "state".into(), source };
    let manifest = Manifest {
        format: manifest::FILES_FORMAT.to_owned(),
        version: manifest::VERSION,
        id: random_id().map_err(failed)?,
        created_by: concat!("pvmm ", env!("CARGO_PKG_VERSION")).to_owned(),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
        machine: host::facts(
            machine.kvm.host(),
            &saved.machine.cpu,
            machine.vcpus.len() as u32,
            size >> 20,
        ),
        memory: MemoryFacts {
            size,
            regions: machine.memory.image.regions().iter().map(|r| (r.address, r.len)).collect(),
            base: None,
        },
        disks,
        taps: machine.resources.taps.clone(),
        vsock_path: machine.resources.vsock_path.as_ref().map(|path| path.display().to_string()),
        sections: table,
        checksum: 0,
    };
    join(&manifest.encode()?, &sections)
}

/// Puts on the disk what the guest has written to drives that are not part of the files.
fn sync_drives(machine: &Machine) -> Result<(), SnapshotError> {
    for (index, drive) in machine.resources.drives.iter().enumerate() {
        if let Storage::InPlace { file, .. } = &drive.storage {
            let file_name = || format!("drive {index}");
            file.sync_all().map_err(|source| SnapshotError::Write { file: file_name(), source })?;
        }
    }
    Ok(())
}

/// The drives by their paths. A disk without one would be lost.
fn disk_facts(machine: &Machine) -> Result<Vec<DiskFacts>, SnapshotError> {
    let facts = |(index, storage): (usize, &Storage)| match storage {
        Storage::Layers(_) => Err(SnapshotError::OwnDisk { index }),
        Storage::Fixed { path, .. } | Storage::InPlace { path, .. } => Ok(DiskFacts::Named {
            path: path.as_ref().map(|path| absolute(path)),
            read_only: storage.is_read_only(),
        }),
        Storage::Later { path, read_only } => {
            Ok(DiskFacts::Named { path: Some(absolute(path)), read_only: *read_only })
        }
    };
    machine.resources.drives.iter().map(|drive| &drive.storage).enumerate().map(facts).collect()
}

/// Makes a path independent of the current folder.
fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string()
}

/// Writes the memory under a hidden name and computes its checksums. `known` are the checksums of
/// the save or load that changes are counted from.
pub(super) fn write_memory(
    memory: &Memory,
    path: &Path,
    kind: SaveKind,
    all_here: bool,
    known: Option<&[u32]>,
) -> Result<(WrittenFile, FileSums), Error> {
    let size = memory.image.size();
    let all = PageRanges::all(size);
    let (changed, filled) = (memory.dirty_since_save()?, memory.nonzero_ranges(all_here)?);
    let file = match kind {
        SaveKind::Full => {
            let file = WrittenFile::create(path)?;
            let written = if file.in_place() {
                // The old bytes stay: this VM may be mapped over them.
                file.check_size(size)?;
                memory.write_over(file.file(), &all)
            } else {
                memory.write_flat(file.file(), &filled)
            };
            written.map_err(|error| file.failed(error))?;
            file
        }
        SaveKind::Diff => {
            let file = WrittenFile::over(path, size)?;
            memory.write_over(file.file(), &changed).map_err(|error| file.failed(error))?;
            file
        }
    };
    file.sync()?;
    // Checksums cover all of memory, also for a diff, because it is loaded merged with its base.
    let sums = memory.sums(PIECE, sum, known, &changed, &filled)?;
    Ok((file, FileSums { file: MEMORY.to_owned(), size, sums }))
}

/// Renames the memory file, then writes the state file that goes with it.
///
/// In this order, because a rename changes a file's stamp and the state file contains it. Until the
/// new state file is there, the old one refuses the new memory, whose checksums differ.
pub(super) fn publish(
    memory: &WrittenFile,
    kind: SaveKind,
    state: &Path,
    encode: impl FnOnce(Vec<Stamp>) -> Result<Vec<u8>, SnapshotError>,
) -> Result<(), SnapshotError> {
    let mut state_file = WrittenFile::create(state)?;
    memory.publish()?;
    // The stamp of a device says nothing about its bytes, and a diff is not all of memory before it
    // is merged.
    let looks = || -> io::Result<Vec<Stamp>> {
        if kind == SaveKind::Full && memory.file().metadata()?.is_file() {
            Ok(vec![Stamp::of(MEMORY, memory.file())?])
        } else {
            Ok(Vec::new())
        }
    };
    let stamps = looks().map_err(|error| memory.cannot(error))?;
    state_file.write_all(&encode(stamps)?)?;
    state_file.publish()
}

/// Reads a pair of files; drives at paths outside of `roots` must be replaced by overrides.
pub fn load_files(
    kvm: &Kvm,
    state: &Path,
    memory: Option<&Path>,
    roots: &Roots,
) -> Result<Frozen, Error> {
    let (manifest, saved) = read_state(state)?;
    trace::step("state file");
    let size = manifest.memory.size;
    let mut image = MemoryImage::empty(manifest.regions());
    if let Some(path) = memory {
        let file = open_memory(path, state, &saved, size)?;
        image = image.with(Layer::new(file.into(), PageRanges::all(size)));
    }
    trace::step("memory file");
    let host = kvm.0.clone();
    host::check(&manifest.machine, &host)?;
    host::check_machine(&saved.machine, &manifest.machine, &host)?;
    let named = |(index, disk): (usize, &DiskFacts)| match disk {
        DiskFacts::Named { path: Some(path), .. }
            if roots.is_some() && !outside::is_allowed(Path::new(path), roots) =>
        {
            FrozenStorage::Missing { index, path: PathBuf::from(path), allowed: false }
        }
        DiskFacts::Named { path, read_only } => {
            FrozenStorage::Named { path: path.as_ref().map(PathBuf::from), read_only: *read_only }
        }
        // `Manifest::decode` has seen that there are none.
        _ => FrozenStorage::Named { path: None, read_only: true },
    };
    Ok(Frozen {
        host,
        state: Arc::new(saved.machine),
        image,
        drives: manifest.disks.iter().enumerate().map(named).collect(),
        taps: manifest.taps.clone(),
        vsock_path: manifest.vsock_path.as_ref().map(PathBuf::from),
        base: None,
        working_set: None,
        without_memory: memory.is_none(),
        note: saved.note.unwrap_or_default(),
        memory_sums: saved.sums.into_iter().next().map(|sums| Arc::from(sums.sums)),
        pause: Duration::ZERO,
    })
}

/// Returns the bytes of a state file.
pub(super) fn join(manifest: &[u8], sections: &[u8]) -> Result<Vec<u8>, SnapshotError> {
    let len = u32::try_from(manifest.len()).map_err(|_| bad_state("has too long a manifest"))?;
    Ok([&MAGIC, &len.to_le_bytes()[..], manifest, sections].concat())
}

/// Decodes and checks a whole state file.
pub(super) fn decode(bytes: &[u8]) -> Result<(Manifest, Saved), SnapshotError> {
    let (header, rest) =
        bytes.split_at_checked(HEADER).ok_or_else(|| bad_state("is shorter than its header"))?;
    if header.get(..MAGIC.len()) != Some(&MAGIC) {
        return Err(bad_state("is not a state file of pvmm"));
    }
    let len = header.get(MAGIC.len()..).and_then(|len| len.try_into().ok()).unwrap_or_default();
    let (manifest, sections) = rest
        .split_at_checked(u32::from_le_bytes(len) as usize)
        .ok_or_else(|| bad_state("is shorter than its manifest"))?;
    let manifest = Manifest::decode_files(manifest)?;
    let saved = sections::decode(sections, &manifest.sections)?;
    let sane = saved.runs.is_empty()
        && saved.working_set.is_none()
        && saved.note.as_ref().is_some_and(|note| note.len() <= NOTE_MAX);
    if !sane {
        return Err(bad_state("has parts that belong to a folder"));
    }
    if saved.machine.vcpus.len() != manifest.machine.vcpus as usize {
        return Err(bad_state("has another number of vCPUs"));
    }
    match saved.sums.as_slice() {
        [sums] if sums.size == manifest.memory.size => Ok((manifest, saved)),
        _ => Err(bad_state("has no sums of all memory")),
    }
}

pub(super) fn read_state(path: &Path) -> Result<(Manifest, Saved), SnapshotError> {
    let name = path.display().to_string();
    let failed = |source| SnapshotError::Read { file: name.clone(), source };
    let facts = fs::metadata(path).map_err(failed)?;
    if facts.is_dir() {
        return Err(SnapshotError::Folder { path: name });
    }
    // Opening a pipe or a device could block.
    if !facts.is_file() {
        return Err(SnapshotError::Kind { file: name });
    }
    let max = HEADER as u64 + MANIFEST_MAX + STATE_MAX;
    if facts.len() > max {
        let mut head = [0; HEAD];
        File::open(path).and_then(|file| file.read_exact_at(&mut head, 0)).map_err(failed)?;
        refuse_foreign(&head, &name)?;
        return Err(SnapshotError::TooBig { file: name, size: facts.len(), max });
    }
    let mut bytes = Vec::with_capacity(facts.len() as usize);
    File::open(path).and_then(|file| file.take(max).read_to_end(&mut bytes)).map_err(failed)?;
    refuse_foreign(&bytes, &name)?;
    decode(&bytes).map_err(|error| error.of_file(&name))
}

/// The number of bytes that identify the kind of a state file.
pub(super) const HEAD: usize = 9;

/// Refuses a state file of Firecracker, by its first bytes.
pub(super) fn refuse_foreign(bytes: &[u8], name: &str) -> Result<(), SnapshotError> {
    let number = |at: usize| {
        let bytes = bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u64::from_le_bytes)
    };
    if [number(0), number(1)].into_iter().flatten().any(|it| FIRECRACKER.contains(&it)) {
        Err(SnapshotError::Foreign { path: name.to_owned() })
    } else {
        Ok(())
    }
}

/// Opens a flat memory file or block device, which must have the size and the checksums of the
/// state file: a guest that runs with memory of another moment is corrupted slowly. A file whose
/// stamp is known is not read.
pub(super) fn open_memory(
    path: &Path,
    state: &Path,
    saved: &Saved,
    expected: u64,
) -> Result<File, SnapshotError> {
    let name = || path.display().to_string();
    let failed = |source| SnapshotError::Read { file: name(), source };
    let kind = fs::metadata(path).map_err(failed)?.file_type();
    let block = kind.is_block_device();
    if !kind.is_file() && !block {
        return Err(SnapshotError::Kind { file: name() });
    }
    let mut file = File::open(path).map_err(failed)?;
    // The one way to learn the size of a file and of a block device.
    let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
    // A device may be larger than the memory.
    if size != expected && !(block && size > expected) {
        return Err(SnapshotError::MemorySize { file: name(), size, expected });
    }
    if !block && saved.stamps.contains(&Stamp::of(MEMORY, &file).map_err(failed)?) {
        return Ok(file);
    }
    for sums in &saved.sums {
        if sums.compare(&file).map_err(failed)?.is_some() {
            let state = state.display().to_string();
            return Err(SnapshotError::Mixed { memory: name(), state });
        }
    }
    Ok(file)
}

fn bad_state(what: &str) -> SnapshotError {
    SnapshotError::State(what.to_owned())
}
