//! Enters a sandbox for a request: wakes it if it hibernates, and keeps it awake meanwhile.
//!
//! Two requests to a hibernated sandbox wake it once: the second waits for the first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm_sandbox::{Sandbox, Sandboxes};

use crate::app::{App, Entry};
use crate::error::ApiError;
use crate::store::{SandboxRow, State};

use super::hibernate::wake_locked;

/// How long a request waits for a sandbox that hibernates or wakes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A sandbox in use by a request. It does not hibernate by itself until this is dropped.
pub struct InUse {
    entry: Arc<Entry>,
    vm: Sandbox,
    sandboxes: Sandboxes,
}

impl InUse {
    /// Returns the running VM.
    pub fn vm(&self) -> &Sandbox {
        &self.vm
    }

    /// Returns the sandbox.
    pub fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }

    /// Returns the row of the sandbox.
    pub fn row(&self) -> SandboxRow {
        self.entry.row()
    }

    /// Connects to the agent in the guest; refused while the sandbox is paused. Waits.
    pub fn agent(&self) -> Result<Agent, ApiError> {
        self.require_awake()?;
        self.vm.agent().map_err(|failure| self.explain(failure.into()))
    }

    /// Replaces an error that only says that nobody answers, if the sandbox has ended. Waits.
    pub fn explain(&self, error: ApiError) -> ApiError {
        if !["internal", "overdue", "unavailable"].contains(&error.code) {
            return error;
        }
        let ended = self.entry.lock().ended;
        let alive = || self.sandboxes.get(self.vm.id()).is_ok_and(|vm| vm.status().is_alive());
        if !ended && alive() {
            return error;
        }
        ApiError::not_found(format!("sandbox '{}' not found: it has ended", self.row().id))
    }

    /// Refuses a sandbox whose vCPUs stand still.
    pub fn require_awake(&self) -> Result<(), ApiError> {
        match self.entry.lock().row.state {
            State::Paused => Err(ApiError::conflict("the sandbox is paused: resume it first")),
            _ => Ok(()),
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut fields = self.entry.lock();
        fields.active = fields.active.saturating_sub(1);
        fields.touch();
    }
}

/// Enters a sandbox, and wakes it first if it hibernates.
pub async fn enter(app: &Arc<App>, id: &str) -> Result<InUse, ApiError> {
    let entry = app.find(id)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(in_use) = enter_now(app, &entry)? {
            return Ok(in_use);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let change = tokio::time::timeout(left, entry.change.lock()).await;
        let _change = change.map_err(|_| ApiError::overdue("the sandbox did not wake in time"))?;
        let asleep = entry.lock().row.state == State::Hibernated;
        if asleep {
            wake_locked(app, &entry).await?;
        }
    }
}

/// Enters a sandbox that runs; returns `None` if it must be waited for or woken.
fn enter_now(app: &App, entry: &Arc<Entry>) -> Result<Option<InUse>, ApiError> {
    let mut fields = entry.lock();
    let gone = |id: &str| ApiError::not_found(format!("sandbox '{id}' not found: it has ended"));
    if fields.ended {
        return Err(gone(&fields.row.id));
    }
    if fields.leaving {
        return Ok(None);
    }
    match (fields.row.state, fields.vm.clone()) {
        (State::Running | State::Paused, Some(vm)) => {
            fields.active += 1;
            fields.touch();
            let (entry, sandboxes) = (Arc::clone(entry), app.sandboxes.clone());
            Ok(Some(InUse { entry, vm, sandboxes }))
        }
        (State::Hibernated, _) => Ok(None),
        (State::Failed, _) | (_, None) => {
            let message = "the sandbox was lost with its host, and no snapshot was left: delete it";
            Err(ApiError::conflict(message))
        }
    }
}
