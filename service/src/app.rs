//! The state that all requests share: the library, the database, the known sandboxes, the limits.
//!
//! A sandbox is an `Entry`. Its fields are behind a mutex that is held for moments only; a change
//! of its state, such as a wake, is serialized by an asynchronous lock of its own.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use pvmm_sandbox::checkpoint_tree::Checkpoint;
use pvmm_sandbox::{Sandbox, Sandboxes};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::audit::Audit;
use crate::bake::Bakes;
use crate::blocking::Blocking;
use crate::builds::Builds;
use crate::clock;
use crate::error::ApiError;
use crate::ids::{self, Instance};
use crate::keys::Key;
use crate::limits::{Admission, Use};
use crate::metrics::{Metrics, Networked, Sample};
use crate::options::ServeOptions;
use crate::store::{SandboxRow, Store};
use crate::tokens::Tokens;

/// The name in the database of the key of sandboxes' credentials.
const KEY: &str = "e2b-key";
/// The number of ended sandboxes that are remembered, so that ending one twice is no error.
const MAX_ENDED: usize = 10_000;

/// The state that all requests share.
pub struct App {
    /// The options of the server.
    pub options: ServeOptions,
    /// The library that runs sandboxes.
    pub sandboxes: Sandboxes,
    /// The database.
    pub store: Store,
    /// The identity of the data directory.
    pub instance: Instance,
    /// The accepted tokens.
    pub tokens: Tokens,
    /// The key of the sandboxes' credentials.
    pub key: Key,
    /// The audit log.
    pub audit: Audit,
    /// The bounds on calls that wait.
    pub blocking: Blocking,
    /// The limits of tokens and of the host.
    pub admission: Admission,
    /// Warm templates that are being baked.
    pub bakes: Bakes,
    /// Templates that are being built.
    pub builds: Builds,
    /// Numbers for operators.
    pub metrics: Metrics,
    /// Cancelled when the server shuts down, so that open conversations end.
    pub stopping: CancellationToken,
    /// Conversations that are ending, for which a shutdown waits.
    pub last_acts: TaskTracker,
    /// The sandboxes by their id.
    entries: RwLock<HashMap<String, Arc<Entry>>>,
    /// The last sandboxes that have ended, oldest first.
    ended: Mutex<VecDeque<String>>,
}

impl App {
    /// Assembles the shared state, without any sandbox.
    pub fn new(
        options: ServeOptions,
        sandboxes: Sandboxes,
        store: Store,
        instance: Instance,
        audit: Audit,
    ) -> Result<Self, ApiError> {
        let tokens = Tokens::load(&store)?;
        let new = ids::new_token()?;
        let key = Key::from_text(store.fact(KEY, || new)?);
        let admission = Admission::new(options.limits.clone(), options.data_dir.clone());
        let (blocking, bakes) = (Blocking::default(), Bakes::default());
        let (entries, ended) = (RwLock::default(), Mutex::default());
        Ok(Self {
            options,
            sandboxes,
            store,
            instance,
            tokens,
            key,
            audit,
            blocking,
            admission,
            bakes,
            builds: Builds::default(),
            metrics: Metrics::default(),
            stopping: CancellationToken::new(),
            last_acts: TaskTracker::new(),
            entries,
            ended,
        })
    }

    /// Returns a sandbox.
    pub fn find(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.get(id).cloned();
        entry.ok_or_else(|| ApiError::not_found(format!("sandbox '{id}' not found")))
    }

    /// Returns all sandboxes, newest first.
    pub fn list(&self) -> Vec<Arc<Entry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let mut list: Vec<_> = entries.values().cloned().collect();
        list.sort_by_key(|entry| std::cmp::Reverse(entry.lock().row.created_ms));
        list
    }

    /// Adds a sandbox whose row is written.
    pub fn add(&self, row: SandboxRow, vm: Option<Sandbox>) -> Arc<Entry> {
        let id = row.id.clone();
        let entry = Arc::new(Entry::new(row, vm));
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.insert(id, Arc::clone(&entry));
        entry
    }

    /// Forgets a sandbox whose row is removed.
    pub fn forget(&self, id: &str) {
        self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(id);
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push_back(id.to_owned());
        let excess = ended.len().saturating_sub(MAX_ENDED);
        ended.drain(..excess);
    }

    /// Returns whether a sandbox of this id has ended not long ago.
    pub fn has_ended(&self, id: &str) -> bool {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.iter().any(|other| other == id)
    }

    /// Returns what a token uses now.
    pub fn used_by(&self, owner: &str) -> Use {
        let mut used = Use::default();
        for entry in self.list() {
            let fields = entry.lock();
            if fields.row.owner == owner && fields.vm.is_some() {
                used.sandboxes += 1;
                used.memory_mib += fields.row.memory_mib;
            }
        }
        used
    }

    /// Looks at the memory and processor time of all sandboxes, at most once in a second.
    pub async fn sample(&self) -> Result<Arc<Sample>, ApiError> {
        let known = || self.list().iter().map(|entry| entry.row_and_vm()).collect();
        self.metrics.sampler.look(&self.blocking, known).await
    }

    /// Counts and logs what the network processes of sandboxes have denied since the last count.
    pub async fn count_denials(&self) -> Result<(), ApiError> {
        let known = self.list().into_iter().map(|entry| entry.row_and_vm());
        let sandboxes = known.filter_map(|(row, vm)| networked(&row, vm?)).collect();
        let denied = self.metrics.denials.look(&self.blocking, sandboxes).await?;
        denied.iter().for_each(|act| self.audit.write(act));
        Ok(())
    }

    /// Counts and logs what the network process of a sandbox has denied, before it ends.
    pub async fn count_last_denials(&self, row: &SandboxRow, vm: &Sandbox) {
        let Some(sandbox) = networked(row, vm.clone()) else { return };
        match self.metrics.denials.look_last(&self.blocking, sandbox).await {
            Ok(denied) => denied.iter().for_each(|act| self.audit.write(act)),
            Err(error) => log::warn!("sandbox {}: {}", row.id, error.message),
        }
    }

    /// Returns the folder of a hibernated sandbox.
    pub fn hibernation_dir(&self, id: &str) -> PathBuf {
        self.options.data_dir.join("hibernated").join(id)
    }

    /// Returns the folder of a snapshot.
    pub fn snapshot_dir(&self, id: &str) -> PathBuf {
        self.options.data_dir.join("snapshots").join(id)
    }
}

fn networked(row: &SandboxRow, vm: Sandbox) -> Option<Networked> {
    let has_network = row.egress.is_some();
    has_network.then(|| Networked { id: row.id.clone(), owner: row.owner.clone(), vm })
}

/// A sandbox that the server knows.
pub struct Entry {
    fields: Mutex<Fields>,
    /// Held while the state changes: pause, resume, hibernate, wake, rollback, end.
    pub change: tokio::sync::Mutex<()>,
}

/// The fields of a sandbox.
pub struct Fields {
    /// The row, as it is in the database apart from times.
    pub row: SandboxRow,
    /// The running VM.
    pub vm: Option<Sandbox>,
    /// The number of requests that use the guest now.
    pub active: usize,
    /// Whether the sandbox is hibernating, so that a new request must wait for it.
    pub leaving: bool,
    /// Whether the sandbox has ended.
    pub ended: bool,
    /// When the state on disk was written, in milliseconds since 1970; 0 for never.
    pub kept_ms: u64,
    /// The checkpoints when they were last asked for or changed, oldest first.
    pub checkpoints: Vec<Checkpoint>,
}

impl Entry {
    fn new(row: SandboxRow, vm: Option<Sandbox>) -> Self {
        let fields = Fields {
            row,
            vm,
            active: 0,
            leaving: false,
            ended: false,
            kept_ms: 0,
            checkpoints: Vec::new(),
        };
        Self { fields: Mutex::new(fields), change: tokio::sync::Mutex::new(()) }
    }

    /// Locks the fields, for a moment.
    pub fn lock(&self) -> MutexGuard<'_, Fields> {
        self.fields.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a copy of the row.
    pub fn row(&self) -> SandboxRow {
        self.lock().row.clone()
    }

    /// Returns copies of the row and of the running VM.
    pub fn row_and_vm(&self) -> (SandboxRow, Option<Sandbox>) {
        let fields = self.lock();
        (fields.row.clone(), fields.vm.clone())
    }
}

impl Fields {
    /// Notes that the sandbox was used now.
    pub fn touch(&mut self) {
        self.row.active_ms = clock::now_ms();
    }
}
