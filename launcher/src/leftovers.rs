//! Removes unfinished folders when a signal ends the process.
//!
//! For work that cannot check for signals itself: a bake waits for a guest, a snapshot for a disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::attach;
use crate::exit::{self, Failure};
use pvmm_sandbox::sys::signals::{FORWARDED, Signals};

/// How often to retry: a folder that another thread still writes to may need several attempts.
const TRIES: u32 = 20;
const REST: Duration = Duration::from_millis(10);

/// Folders to remove if a signal ends the process.
#[derive(Clone, Default)]
pub struct Leftovers {
    folders: Arc<Mutex<Vec<PathBuf>>>,
}

impl Leftovers {
    /// Starts a thread that, on a signal to end, removes the noted folders and exits at once.
    pub fn watch() -> Result<Self, Failure> {
        let signals = Signals::hold(&FORWARDED)?;
        let leftovers = Self::default();
        let noted = leftovers.clone();
        attach::in_background("signals", move || {
            if let Ok(signal) = signals.next() {
                noted.remove();
                exit::leave(Ok(exit::by_signal(signal)));
            }
        });
        Ok(leftovers)
    }

    /// Notes a folder as unfinished until it is renamed or removed.
    pub fn note(&self, folder: &Path) {
        self.folders.lock().unwrap_or_else(PoisonError::into_inner).push(folder.to_owned());
    }

    fn remove(&self) {
        for folder in self.folders.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            for _ in 0..TRIES {
                let gone = fs::remove_dir_all(folder);
                if gone.is_ok() || !folder.exists() {
                    break;
                }
                std::thread::sleep(REST);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_are_noted_are_removed_and_those_with_a_name_stay() {
        let place = tempfile::tempdir().unwrap();
        let (unfinished, named) = (place.path().join("unfinished"), place.path().join("named"));
        let leftovers = Leftovers::default();
        for folder in [&unfinished, &place.path().join("moved")] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("memory.bin"), "x").unwrap();
            leftovers.note(folder);
        }
        fs::rename(place.path().join("moved"), &named).unwrap();
        leftovers.remove();
        assert!(!unfinished.exists());
        assert!(named.join("memory.bin").exists());
    }
}
