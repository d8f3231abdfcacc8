//! The loop that ends and hibernates sandboxes by the clock, and notices those that ended by
//! themselves.
//!
//! The monitor of a sandbox also knows its time to live; here it is enforced for rows and folders
//! too.

use std::sync::Arc;
use std::time::Duration;

use pvmm_images::{Cache, Silent};
use pvmm_sandbox::prepare;
use pvmm_sandbox::prune::{self, PruneOptions};
use pvmm_sandbox::vm_dir::VmStatus;

use crate::app::{App, Entry};
use crate::audit::Act;
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::store::{SandboxRow, State};

use super::end::end;
use super::hibernate::{hibernate_idle, keep_state};

/// How often the clock is looked at.
const TICK: Duration = Duration::from_secs(1);
/// How many ticks pass between two looks at all VMs.
const TICKS_PER_LOOK: u32 = 5;
/// How many ticks pass before the cache is pruned, and between two times: a day.
const TICKS_BEFORE_PRUNE: u32 = 600;
const TICKS_PER_PRUNE: u32 = 24 * 3600;
/// The time without a request after which the state of a persistent sandbox is written to disk.
const KEEP_AFTER: Duration = Duration::from_secs(30);

/// The change that the clock asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Nothing,
    End,
    Hibernate,
    /// Write the state to disk; the sandbox goes on.
    Keep,
}

fn due(row: &SandboxRow, active: usize, kept_ms: u64, now_ms: u64, idle: Duration) -> Due {
    let expired = row.expires_ms.is_some_and(|at| at <= now_ms);
    let idle_ms = now_ms.saturating_sub(row.active_ms);
    match row.state {
        State::Running | State::Paused if expired && !row.persistent => Due::End,
        State::Running if expired && active == 0 => Due::Hibernate,
        State::Running if row.persistent && active == 0 && idle_ms >= idle.as_millis() as u64 => {
            Due::Hibernate
        }
        State::Running
            if row.persistent
                && row.may_keep_state()
                && active == 0
                && kept_ms <= row.active_ms
                && idle_ms >= KEEP_AFTER.as_millis() as u64 =>
        {
            Due::Keep
        }
        _ => Due::Nothing,
    }
}

/// Runs until the task is aborted.
pub async fn sweep(app: Arc<App>) {
    let mut ticks = 0u32;
    loop {
        tokio::time::sleep(TICK).await;
        for entry in app.list() {
            serve_clock(&app, &entry).await;
        }
        ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(TICKS_PER_LOOK)
            && let Err(error) = look(&app).await
        {
            log::error!("cannot look at the VMs: {}", error.message);
        }
        if ticks.is_multiple_of(TICKS_PER_LOOK)
            && let Err(error) = app.count_denials().await
        {
            log::warn!("cannot count denied attempts: {}", error.message);
        }
        if ticks % TICKS_PER_PRUNE == TICKS_BEFORE_PRUNE {
            tokio::spawn(prune_cache(Arc::clone(&app)));
        }
    }
}

/// Removes from the cache what nothing needs any more.
async fn prune_cache(app: Arc<App>) {
    let sweep = || {
        let cache = Cache::open().map_err(prepare::refuse)?;
        Ok(prune::prune(&cache, PruneOptions::default(), &mut Silent)?)
    };
    match app.blocking.run(Work::Long, sweep).await {
        Ok(pruned) => {
            let bytes: u64 = pruned.iter().map(|one| one.bytes).sum();
            log::info!("{} entries of the cache were not needed: {bytes} bytes", pruned.len());
        }
        Err(error) => log::warn!("cannot prune the cache: {}", error.message),
    }
}

async fn serve_clock(app: &Arc<App>, entry: &Arc<Entry>) {
    let (row, due) = {
        let fields = entry.lock();
        let idle = app.options.limits.idle;
        (fields.row.clone(), due(&fields.row, fields.active, fields.kept_ms, clock::now_ms(), idle))
    };
    let (act, outcome) = match due {
        Due::Nothing => return,
        Due::End => ("expire", end(app, entry).await),
        Due::Hibernate => ("hibernate", hibernate_idle(app, entry).await.map(drop)),
        Due::Keep => ("keep", keep_state(app, entry).await),
    };
    if let Err(error) = &outcome {
        log::error!("sandbox {}: {}", row.id, error.message);
        // Not again at each tick: a disk may stay full for long.
        entry.lock().touch();
    }
    app.audit.write(&Act::new(act, "", &row.id).outcome(&outcome));
}

/// Looks at all VMs once, and corrects sandboxes whose VM has ended or whose state has changed.
async fn look(app: &Arc<App>) -> Result<(), ApiError> {
    let sandboxes = app.sandboxes.clone();
    let vms = app.blocking.run(Work::Short, move || Ok(sandboxes.list()?)).await?;
    for entry in app.list() {
        let Some(id) = entry.lock().vm.as_ref().map(|vm| vm.id().to_owned()) else { continue };
        let alive = vms.iter().any(|vm| vm.id() == id && vm.status().is_alive());
        if !alive {
            perhaps_lost(app, &entry, &id).await;
        }
    }
    Ok(())
}

/// Handles a sandbox whose VM has ended by itself. Looks again first: a VM that was made after the
/// list was taken is not in it.
async fn perhaps_lost(app: &Arc<App>, entry: &Arc<Entry>, vm: &str) {
    let Ok(change) = entry.change.try_lock() else { return };
    let row = {
        let fields = entry.lock();
        if fields.ended || fields.vm.as_ref().is_none_or(|now| now.id() != vm) {
            return;
        }
        fields.row.clone()
    };
    let (sandboxes, vm) = (app.sandboxes.clone(), vm.to_owned());
    let status = move || Ok(sandboxes.get(&vm).map(|vm| vm.status().clone()).ok());
    let Ok(status) = app.blocking.run(Work::Short, status).await else { return };
    let reason = match status {
        Some(status) if status.is_alive() => return,
        Some(VmStatus::Exited(ending)) => ending.reason,
        _ => "its monitor process is gone".to_owned(),
    };
    log::warn!("sandbox {} has ended: {reason}", row.id);
    app.metrics.count_end(&reason);
    let mut act = Act::new("lost", "", &row.id);
    act.what = Some(reason);
    app.audit.write(&act);
    if !row.persistent {
        drop(change);
        if let Err(error) = end(app, entry).await {
            log::error!("sandbox {}: {}", row.id, error.message);
        }
        return;
    }
    let has_folder = app.hibernation_dir(&row.id).is_dir();
    let mut fields = entry.lock();
    fields.row.state = if has_folder { State::Hibernated } else { State::Failed };
    (fields.vm, fields.row.vm, fields.row.expires_ms) = (None, None, None);
    if let Err(error) = app.store.put_sandboxes(&[&fields.row]) {
        log::error!("sandbox {}: {error}", row.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::VolumeUse;

    const IDLE: Duration = Duration::from_secs(10);

    #[test]
    fn expired_sandbox_ends_and_persistent_one_hibernates() {
        let row = SandboxRow { expires_ms: Some(100), active_ms: 100, ..SandboxRow::default() };
        assert_eq!(due(&row, 0, 0, 99, IDLE), Due::Nothing);
        assert_eq!(due(&row, 1, 0, 100, IDLE), Due::End);
        let kept = SandboxRow { persistent: true, ..row };
        assert_eq!(due(&kept, 0, 0, 100, IDLE), Due::Hibernate);
        assert_eq!(due(&kept, 1, 0, 100, IDLE), Due::Nothing);
    }

    #[test]
    fn only_idle_persistent_sandbox_hibernates() {
        let row = SandboxRow { persistent: true, ..SandboxRow::default() };
        assert_eq!(due(&row, 0, 0, 9_999, IDLE), Due::Nothing);
        assert_eq!(due(&row, 0, 0, 10_000, IDLE), Due::Hibernate);
        assert_eq!(due(&row, 1, 0, 10_000, IDLE), Due::Nothing);
        let ordinary = SandboxRow { persistent: false, ..row };
        assert_eq!(due(&ordinary, 0, 0, 10_000, IDLE), Due::Nothing);
    }

    #[test]
    fn state_is_kept_once_after_each_use() {
        let idle = Duration::from_secs(300);
        let row = SandboxRow { persistent: true, active_ms: 1000, ..SandboxRow::default() };
        assert_eq!(due(&row, 0, 0, 30_999, idle), Due::Nothing);
        assert_eq!(due(&row, 0, 0, 31_000, idle), Due::Keep);
        assert_eq!(due(&row, 0, 31_000, 40_000, idle), Due::Nothing);
        let volume = VolumeUse { name: "v".to_owned(), ..VolumeUse::default() };
        let with_volume = SandboxRow { volumes: vec![volume], ..row };
        assert_eq!(due(&with_volume, 0, 0, 31_000, idle), Due::Nothing);
    }
}
