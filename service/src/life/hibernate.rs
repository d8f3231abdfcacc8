//! Hibernates a sandbox to a snapshot on disk, and wakes it from there.
//!
//! The folder is kept while the sandbox runs, so that a host that restarts still has that state. A
//! new one replaces it only when it is complete.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_sandbox::{CreateOptions, Sandbox, Sandboxes};

use crate::app::{App, Entry};
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::metrics::Operation;
use crate::store::State;

use super::folders::{new_folder, remove_folder, remove_folders, replace_folder};
use super::start::{egress_of, mounts};

/// How long a hibernation that was asked for waits for requests that still run.
const SETTLE: Duration = Duration::from_secs(5);
/// How often it looks.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Hibernates a sandbox on request; does nothing if it hibernates already. Requests that still run
/// after some seconds are cut off.
pub async fn hibernate(app: &Arc<App>, entry: &Arc<Entry>) -> Result<(), ApiError> {
    let _change = entry.change.lock().await;
    {
        let mut fields = entry.lock();
        match fields.row.state {
            _ if fields.ended => return Err(ApiError::not_found("sandbox not found")),
            State::Hibernated => return Ok(()),
            State::Failed => return Err(ApiError::conflict("the sandbox was lost with its host")),
            State::Running | State::Paused => fields.leaving = true,
        }
    }
    let deadline = Instant::now() + SETTLE;
    while entry.lock().active > 0 && Instant::now() < deadline {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    let work = hibernate_locked(app, entry);
    let outcome = app.metrics.timed(Operation::Hibernate, work).await;
    entry.lock().leaving = false;
    outcome
}

/// Hibernates a sandbox that nobody uses; returns whether it did.
pub(super) async fn hibernate_idle(app: &Arc<App>, entry: &Arc<Entry>) -> Result<bool, ApiError> {
    let Ok(_change) = entry.change.try_lock() else { return Ok(false) };
    {
        let mut fields = entry.lock();
        if fields.ended || fields.active > 0 || fields.row.state != State::Running {
            return Ok(false);
        }
        fields.leaving = true;
    }
    let work = hibernate_locked(app, entry);
    let outcome = app.metrics.timed(Operation::Hibernate, work).await;
    entry.lock().leaving = false;
    outcome.map(|()| true)
}

/// Hibernates a sandbox whose change is locked and which no new request enters.
async fn hibernate_locked(app: &Arc<App>, entry: &Arc<Entry>) -> Result<(), ApiError> {
    app.admission.require_disk()?;
    let (row, vm) = entry.row_and_vm();
    let paused = row.state == State::Paused;
    let sandboxes = app.sandboxes.clone();
    let vm = vm.ok_or_else(|| ApiError::conflict("the sandbox does not run"))?;
    app.count_last_denials(&row, &vm).await;
    let folder = app.hibernation_dir(&row.id);
    app.blocking
        .run(Work::Long, move || {
            let new = new_folder(&folder);
            remove_folder(&new)?;
            if let Some(parent) = folder.parent() {
                fs::create_dir_all(parent)?;
            }
            // A guest that stands still cannot make itself ready.
            let vm = if paused { resumed(&sandboxes, &vm)? } else { vm };
            vm.hibernate(&new)?;
            replace_folder(&folder)?;
            Ok(())
        })
        .await?;
    let mut fields = entry.lock();
    fields.vm = None;
    fields.row.vm = None;
    fields.row.state = State::Hibernated;
    fields.row.has_checkpoint = false;
    fields.checkpoints.clear();
    // A time to live counts while the sandbox runs, and begins anew when it wakes.
    fields.row.expires_ms = None;
    fields.kept_ms = clock::now_ms();
    app.store.put_sandboxes(&[&fields.row])?;
    Ok(())
}

/// Lets a paused VM go on, and returns it in its new state.
fn resumed(sandboxes: &Sandboxes, vm: &Sandbox) -> Result<Sandbox, ApiError> {
    vm.resume()?;
    Ok(sandboxes.get(vm.id())?)
}

/// Writes the state of a sandbox that nobody uses to disk while the sandbox goes on, so that little
/// is lost with the host. Does nothing if the sandbox is in use by now.
pub(super) async fn keep_state(app: &Arc<App>, entry: &Arc<Entry>) -> Result<(), ApiError> {
    let Ok(_change) = entry.change.try_lock() else { return Ok(()) };
    let (id, vm) = {
        let mut fields = entry.lock();
        if fields.ended || fields.active > 0 || fields.row.state != State::Running {
            return Ok(());
        }
        // Also if it fails: the next try is after the next use.
        fields.kept_ms = clock::now_ms();
        (fields.row.id.clone(), fields.vm.clone())
    };
    let Some(vm) = vm else { return Ok(()) };
    app.admission.require_disk()?;
    let folder = app.hibernation_dir(&id);
    let work = move || {
        let new = new_folder(&folder);
        remove_folder(&new)?;
        if let Some(parent) = folder.parent() {
            fs::create_dir_all(parent)?;
        }
        vm.snapshot(&new)?;
        replace_folder(&folder)?;
        Ok(())
    };
    app.blocking.run(Work::Long, work).await
}

/// Wakes a sandbox; does nothing if it runs.
pub async fn wake(app: &Arc<App>, entry: &Arc<Entry>) -> Result<(), ApiError> {
    let _change = entry.change.lock().await;
    let state = entry.lock().row.state;
    match state {
        State::Hibernated => wake_locked(app, entry).await,
        State::Failed => Err(ApiError::conflict("the sandbox was lost with its host")),
        State::Running | State::Paused => Ok(()),
    }
}

/// Wakes a hibernated sandbox whose change is locked.
pub(super) async fn wake_locked(app: &Arc<App>, entry: &Arc<Entry>) -> Result<(), ApiError> {
    app.metrics.timed(Operation::Wake, woken(app, entry)).await
}

async fn woken(app: &Arc<App>, entry: &Arc<Entry>) -> Result<(), ApiError> {
    let row = {
        let fields = entry.lock();
        if fields.ended {
            return Err(ApiError::not_found("sandbox not found: it has ended"));
        }
        fields.row.clone()
    };
    let folder = app.hibernation_dir(&row.id);
    let begun = Instant::now();
    let options = CreateOptions {
        name: Some(app.instance.vm_name(&row.id)),
        egress: row.egress.as_deref().map(egress_of).transpose()?,
        ttl: row.ttl_s.filter(|_| !row.persistent).map(Duration::from_secs),
        ..CreateOptions::of(&row.template)
    };
    let sandboxes = app.sandboxes.clone();
    let work = move || {
        let options = CreateOptions { volumes: mounts(&row.volumes, true)?, ..options };
        let vm = sandboxes.restore(&folder, &options)?;
        if !row.may_keep_state() {
            remove_folders(&folder)?;
        }
        Ok(vm)
    };
    let vm = app.blocking.run(Work::Start, work).await?;
    let mut fields = entry.lock();
    fields.row.vm = Some(vm.id().to_owned());
    fields.row.state = State::Running;
    fields.row.boot_ms = begun.elapsed().as_millis() as u64;
    fields.row.boot_mode = "restore".to_owned();
    fields.row.expires_ms = fields.row.ttl_s.map(|ttl| clock::now_ms() + ttl * 1000);
    fields.vm = Some(vm);
    fields.touch();
    app.store.put_sandboxes(&[&fields.row])?;
    Ok(())
}
