//! The files of an unfinished pull. They stay when the pull is interrupted, and the next one finds
//! in them what it need not fetch again.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pvmm_images::part::Part;

use crate::chunk::{self, CHUNK, Digest};
use crate::error::TravelError;
use crate::manifest::{FileEntry, Manifest};

/// The age at which an unfinished pull is given up.
const ABANDONED: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Hexadecimal digits of the manifest's digest in a folder's name.
const DIGITS: usize = 16;
/// The mode bits that a pulled file may have.
const MODES: u32 = 0o755;

/// The folder of one unfinished pull.
pub struct Staging {
    pub path: PathBuf,
    files: Vec<File>,
}

impl Staging {
    /// Returns the folder below `pulls` in which the manifest with this digest is put together.
    fn place(pulls: &Path, manifest: &Manifest, digest: &Digest) -> PathBuf {
        let digits: String = digest.hex().chars().take(DIGITS).collect();
        pulls.join(format!("{}{digits}", prefix(manifest)))
    }

    /// Opens or makes the files of the manifest, all of their sizes.
    pub fn open(pulls: &Path, manifest: &Manifest, digest: &Digest) -> Result<Self, TravelError> {
        let path = Self::place(pulls, manifest, digest);
        make_dir(&path)?;
        let files = manifest.files.iter().map(|entry| open_file(&path, entry));
        Ok(Self { files: files.collect::<Result<_, _>>()?, path })
    }

    /// Returns the content of a chunk as far as it is there; `None` for zeros.
    pub fn read(
        &self,
        manifest: &Manifest,
        file: usize,
        index: u64,
    ) -> io::Result<Option<Vec<u8>>> {
        chunk::read(&self.files[file], manifest.files[file].size, index)
    }

    /// Writes a chunk whose digest was compared.
    pub fn write(&self, file: usize, index: u64, bytes: &[u8]) -> Result<(), TravelError> {
        let written = self.files[file].write_all_at(bytes, index * CHUNK);
        written.map_err(TravelError::write(&self.path))
    }

    /// Gives the files their modes and waits until they are on the disk.
    pub fn finish(self, manifest: &Manifest) -> Result<PathBuf, TravelError> {
        for (file, entry) in self.files.iter().zip(&manifest.files) {
            let mode = Permissions::from_mode(entry.mode & MODES | 0o400);
            let done = file.set_permissions(mode).and_then(|()| file.sync_all());
            done.map_err(TravelError::write(&self.path.join(&entry.path)))?;
        }
        Ok(self.path)
    }
}

/// Returns the files of earlier unfinished pulls of the same name.
pub fn earlier(pulls: &Path, manifest: &Manifest, digest: &Digest) -> Vec<Part> {
    let own = Staging::place(pulls, manifest, digest);
    let others = same_name(pulls, manifest).into_iter().filter(|path| *path != own);
    let files = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten();
    let plain = others.flat_map(files).filter(|it| it.file_type().is_ok_and(|it| it.is_file()));
    plain.filter_map(|entry| Part::open("unfinished", &entry.path()).ok()).collect()
}

/// Removes earlier unfinished pulls of the same name, and those of all names that were given up.
pub fn sweep(pulls: &Path, manifest: &Manifest) {
    for path in same_name(pulls, manifest) {
        let _ = fs::remove_dir_all(path);
    }
    for entry in fs::read_dir(pulls).into_iter().flatten().flatten() {
        let age = entry.metadata().ok().and_then(|facts| facts.modified().ok()?.elapsed().ok());
        if age.is_some_and(|age| age > ABANDONED) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn same_name(pulls: &Path, manifest: &Manifest) -> Vec<PathBuf> {
    let prefix = prefix(manifest);
    let named = |name: &str| name.strip_prefix(&prefix).is_some_and(|rest| rest.len() == DIGITS);
    let entries = fs::read_dir(pulls).into_iter().flatten().flatten();
    let same = entries.filter(|entry| entry.file_name().to_str().is_some_and(named));
    same.map(|entry| entry.path()).collect()
}

fn prefix(manifest: &Manifest) -> String {
    format!("{}-{}.", manifest.kind.folder(), manifest.name)
}

fn make_dir(path: &Path) -> Result<(), TravelError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(TravelError::write(path))
}

fn open_file(folder: &Path, entry: &FileEntry) -> Result<File, TravelError> {
    let path = folder.join(&entry.path);
    make_dir(path.parent().unwrap_or(folder))?;
    // A pull that was killed at its end has taken the right to write away already.
    if let Err(error) = fs::set_permissions(&path, Permissions::from_mode(0o600))
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(TravelError::Write { path, source: error });
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(&path).and_then(|file| file.set_len(entry.size).map(|()| file));
    file.map_err(TravelError::write(&path))
}
