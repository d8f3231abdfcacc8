//! A store in a folder, which may be a network share or a disk that is carried.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};
use rustix::fs::{Mode, OFlags, open};

use crate::error::TravelError;

/// The folder of objects that are being written. Each is renamed when it is whole.
const UNFINISHED: &str = ".unfinished";
/// The age at which an unfinished object has lost its writer.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

pub struct Folder {
    root: PathBuf,
    /// Unfinished objects of lost writers were looked for.
    swept: AtomicBool,
}

impl Folder {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), swept: AtomicBool::new(false) }
    }

    pub fn has(&self, key: &str) -> Result<bool, TravelError> {
        match fs::symlink_metadata(self.root.join(key)) {
            Ok(facts) => Ok(facts.is_file() && facts.len() > 0),
            Err(error) if absent(&error) => Ok(false),
            Err(error) => Err(self.failed(key)(error)),
        }
    }

    pub fn get(&self, key: &str, most: u64) -> Result<Option<Vec<u8>>, TravelError> {
        // A pipe in the place of an object must not block, and a link may lead anywhere.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match open(self.root.join(key), flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(error) if absent(&error.into()) => return Ok(None),
            Err(error) => return Err(self.failed(key)(error.into())),
        };
        let mut bytes = Vec::new();
        let plain = file.metadata().is_ok_and(|facts| facts.is_file() && facts.len() <= most);
        if !plain {
            return Err(self.failed(key)(io::Error::other("it is no file, or it is too large")));
        }
        file.take(most).read_to_end(&mut bytes).map_err(self.failed(key))?;
        Ok(Some(bytes))
    }

    pub fn put(&self, key: &str, bytes: &[u8]) -> Result<(), TravelError> {
        let (path, unfinished) = (self.root.join(key), self.root.join(UNFINISHED));
        let first = !self.swept.swap(true, Ordering::Relaxed);
        let mut random = [0; 16];
        SystemRandom::new()
            .fill(&mut random)
            .map_err(|_| self.failed(key)(io::Error::other("no random bytes")))?;
        let part = unfinished.join(format!("{:032x}", u128::from_ne_bytes(random)));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&unfinished)?;
            fs::create_dir_all(path.parent().unwrap_or(&self.root))?;
            if first {
                sweep(&unfinished);
            }
            let mut file = File::create_new(&part)?;
            file.write_all(bytes)?;
            // A name without its bytes after a power cut would never be written again.
            file.sync_data()?;
            fs::rename(&part, &path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&part);
            self.failed(key)(error)
        })
    }

    fn failed(&self, key: &str) -> impl FnOnce(io::Error) -> TravelError {
        let (store, what) = (self.root.display().to_string(), key.to_owned());
        move |source| TravelError::Store { store, what, source }
    }
}

fn absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Removes objects whose writers are gone.
fn sweep(unfinished: &Path) {
    for entry in fs::read_dir(unfinished).into_iter().flatten().flatten() {
        let age = entry.metadata().ok().and_then(|facts| facts.modified().ok()?.elapsed().ok());
        if age.is_some_and(|age| age > ABANDONED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
