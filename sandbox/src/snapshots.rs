//! Where snapshots are kept, and how they are named.
//!
//! A name is a folder in pvmm's data directory; text with a slash is a path.

use std::fs;
use std::path::{Path, PathBuf};

use pvmm::snapshot::Manifest;
use pvmm_images::{Cache, cache};

use crate::failure::{Failure, io_text};

/// The folder of links to snapshots outside of the data directory.
const ELSEWHERE: &str = "snapshots-elsewhere";

/// Returns the folder of a snapshot by name or path.
pub fn place(name: &str) -> Result<PathBuf, Failure> {
    if name.contains('/') {
        let path = PathBuf::from(name);
        return Ok(std::path::absolute(&path).unwrap_or(path));
    }
    crate::vm_dir::check_name(name).map_err(|why| Failure::usage(format!("snapshot: {why}")))?;
    Ok(folder()?.join(name))
}

/// Returns the folder of a snapshot to be written, and creates its parent if it is pvmm's own.
pub fn new_place(name: &str) -> Result<PathBuf, Failure> {
    let place = place(name)?;
    if !name.contains('/') {
        let folder = folder()?;
        fs::create_dir_all(&folder).map_err(|error| {
            let why = io_text(&error);
            Failure::usage(format!("cannot make {}: {why}", folder.display()))
                .hint("set XDG_DATA_HOME to a directory that you can write to")
        })?;
    }
    Ok(place)
}

/// Lists all snapshots in the data directory by name; other files are skipped.
pub fn list() -> Result<Vec<(String, PathBuf, Manifest)>, Failure> {
    let folder = folder()?;
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') {
            continue;
        }
        if let Ok(manifest) = Manifest::read(&entry.path()) {
            found.push((name, entry.path(), manifest));
        }
    }
    found.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(found)
}

/// Returns the disk usage of a snapshot.
pub fn disk_bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let blocks = |entry: fs::DirEntry| {
        entry.metadata().map_or(0, |facts| std::os::unix::fs::MetadataExt::blocks(&facts) * 512)
    };
    entries.map(blocks).sum()
}

/// Returns the folders in which a snapshot may name files: pvmm's own, and those that the user
/// allows.
pub fn roots(allowed: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut roots = allowed;
    roots.extend(folder());
    roots.extend(Cache::open().map(|cache| cache.root().to_owned()));
    roots
}

fn folder() -> Result<PathBuf, Failure> {
    Ok(data_dir()?.join("snapshots"))
}

/// Notes that snapshots are in `folder` or below, outside of the data directory, so that
/// [`crate::prune`] finds the files that they name. A failure is logged: the snapshot is whole.
pub fn remember(folder: &Path) {
    if let Err(why) = try_remember(folder) {
        log::warn!("{}: what it needs may be pruned: {why}", folder.display());
    }
}

fn try_remember(folder: &Path) -> Result<(), String> {
    let known = everywhere().map_err(|failure| failure.message)?;
    let folder = fs::canonicalize(folder).map_err(|error| error.to_string())?;
    if known.iter().any(|root| folder.starts_with(root)) {
        return Ok(());
    }
    let roots = data_dir().map_err(|failure| failure.message)?.join(ELSEWHERE);
    let name = cache::key([folder.as_os_str().as_encoded_bytes()]);
    let made = fs::create_dir_all(&roots)
        .and_then(|()| std::os::unix::fs::symlink(&folder, roots.join(name)));
    match made {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// Returns the folders in or below which all known snapshots are. Forgets those that are gone.
pub(crate) fn everywhere() -> Result<Vec<PathBuf>, Failure> {
    let data = data_dir()?;
    let mut folders = Vec::new();
    for entry in fs::read_dir(data.join(ELSEWHERE)).into_iter().flatten().flatten() {
        match fs::canonicalize(entry.path()) {
            Ok(folder) => folders.push(folder),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let _ = fs::remove_file(entry.path());
            }
            // What cannot be looked at now may be there later.
            Err(error) => {
                let why = io_text(&error);
                let path = entry.path();
                return Err(Failure::fault(format!("cannot look into {}: {why}", path.display())));
            }
        }
    }
    folders.push(fs::canonicalize(&data).unwrap_or(data));
    Ok(folders)
}

/// Returns the folder of all that pvmm keeps for its user.
pub fn data_dir() -> Result<PathBuf, Failure> {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let data = absolute("XDG_DATA_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/share")))
        .ok_or_else(|| {
            Failure::usage("no place for snapshots and volumes")
                .hint("set HOME, or XDG_DATA_HOME to a directory")
        })?;
    Ok(data.join("pvmm"))
}
