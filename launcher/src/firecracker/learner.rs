//! The working set of a snapshot: kept when the snapshot is loaded for the first time, used by all
//! later loads.
//!
//! Clients know nothing of it. The file lies next to the state file, or in the user's cache where
//! that folder cannot be written.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pvmm::{Template, Vm};
use pvmm_images::cache::{self, Cache};

/// When a VM has answered its first request, and has done little else.
const LEARN_AFTER: Duration = Duration::from_secs(1);

/// Waits for the first use of a loaded VM.
pub struct Learner {
    state: PathBuf,
    due: Option<Instant>,
}

impl Learner {
    /// Lets `template`, which was loaded from the state file `state`, use the working set that an
    /// earlier load has kept. Returns a learner if there is none yet.
    pub fn of(template: &mut Template, state: &Path) -> Option<Self> {
        let state = state.canonicalize().unwrap_or_else(|_| state.to_owned());
        let known = template.use_working_set(&neighbour(&state))
            || cached(&state).is_some_and(|file| template.use_working_set(&file));
        if known {
            log::debug!("The working set of {} is prefaulted.", state.display());
        }
        (!known).then_some(Self { state, due: None })
    }

    /// Notes that the VM runs. Only the first time counts.
    pub fn resumed(&mut self) {
        self.due.get_or_insert_with(|| Instant::now() + LEARN_AFTER);
    }

    /// Returns when the working set should be kept; `None` before the VM has run.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Keeps the pages that the VM has touched, next to the state file or in the cache.
    pub fn keep(self, vm: &Vm) {
        let kept = vm.keep_working_set(&neighbour(&self.state)).or_else(|error| {
            let Some(file) = cached(&self.state) else { return Err(error) };
            if let Some(folder) = file.parent() {
                // Where this fails, so does the next line, which says why.
                let _ = fs::create_dir_all(folder);
            }
            vm.keep_working_set(&file)
        });
        match kept {
            Ok(()) => log::debug!("The working set of {} is kept.", self.state.display()),
            Err(error) => {
                log::debug!("The working set of {} is not kept: {error:#}", self.state.display());
            }
        }
    }
}

fn neighbour(state: &Path) -> PathBuf {
    let mut name = state.as_os_str().to_owned();
    name.push(".working-set");
    PathBuf::from(name)
}

fn cached(state: &Path) -> Option<PathBuf> {
    let name = cache::key([state.as_os_str().as_encoded_bytes()]);
    Some(Cache::open().ok()?.path("working-sets", &name))
}
