//! The loop that ends and hibernates sandboxes by the clock, and notices those that ended by
//! themselves.
//!
//! The monitor of a sandbox also knows its time to live; here it is enforced for rows and folders
//! too.

use std::sync::Arc;
use std::time::Duration;

use pvmm_sandbox::vm_dir::VmStatus;

use crate::app::{App, Entry};
use crate::audit::Act;
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::store::{SandboxRow, State};

use super::end::end;
use super::hibernate::hibernate_idle;

/// How often the clock is looked at.
const TICK: Duration = Duration::from_secs(1);
/// How many ticks pass between two looks at all VMs.
const TICKS_PER_LOOK: u32 = 5;

/// The change that the clock asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Nothing,
    End,
    Hibernate,
}

fn due(row: &SandboxRow, active: usize, now_ms: u64, idle: Duration) -> Due {
    let expired = row.expires_ms.is_some_and(|at| at <= now_ms);
    let idle_ms = now_ms.saturating_sub(row.active_ms);
    match row.state {
        State::Running | State::Paused if expired && !row.persistent => Due::End,
        State::Running if expired && active == 0 => Due::Hibernate,
        State::Running if row.persistent && active == 0 && idle_ms >= idle.as_millis() as u64 => {
            Due::Hibernate
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
    }
}

async fn serve_clock(app: &Arc<App>, entry: &Arc<Entry>) {
    let (row, due) = {
        let fields = entry.lock();
        let idle = app.options.limits.idle;
        (fields.row.clone(), due(&fields.row, fields.active, clock::now_ms(), idle))
    };
    let (act, outcome) = match due {
        Due::Nothing => return,
        Due::End => ("expire", end(app, entry).await),
        Due::Hibernate => ("hibernate", hibernate_idle(app, entry).await.map(drop)),
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
        let status = vms.iter().find(|vm| vm.id() == id).map(|vm| vm.status().clone());
        // A VM that was made after the list was taken is not in it.
        let younger = clock::now_ms().saturating_sub(entry.lock().row.created_ms) < 10_000;
        match status {
            Some(status) if status.is_alive() => {}
            None if younger => {}
            _ => lost(app, &entry, &id, status).await,
        }
    }
    Ok(())
}

/// Handles a sandbox whose VM has ended by itself.
async fn lost(app: &Arc<App>, entry: &Arc<Entry>, vm: &str, status: Option<VmStatus>) {
    let Ok(_change) = entry.change.try_lock() else { return };
    let row = {
        let fields = entry.lock();
        if fields.ended || fields.vm.as_ref().is_none_or(|now| now.id() != vm) {
            return;
        }
        fields.row.clone()
    };
    let reason = match status {
        Some(VmStatus::Exited(ending)) => ending.reason,
        _ => "its monitor process is gone".to_owned(),
    };
    log::warn!("sandbox {} has ended: {reason}", row.id);
    let mut act = Act::new("lost", "", &row.id);
    act.what = Some(reason);
    app.audit.write(&act);
    if !row.persistent {
        drop(_change);
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

    const IDLE: Duration = Duration::from_secs(10);

    #[test]
    fn expired_sandbox_ends_and_persistent_one_hibernates() {
        let row = SandboxRow { expires_ms: Some(100), active_ms: 100, ..SandboxRow::default() };
        assert_eq!(due(&row, 0, 99, IDLE), Due::Nothing);
        assert_eq!(due(&row, 1, 100, IDLE), Due::End);
        let kept = SandboxRow { persistent: true, ..row };
        assert_eq!(due(&kept, 0, 100, IDLE), Due::Hibernate);
        assert_eq!(due(&kept, 1, 100, IDLE), Due::Nothing);
    }

    #[test]
    fn only_idle_persistent_sandbox_hibernates() {
        let row = SandboxRow { persistent: true, ..SandboxRow::default() };
        assert_eq!(due(&row, 0, 9_999, IDLE), Due::Nothing);
        assert_eq!(due(&row, 0, 10_000, IDLE), Due::Hibernate);
        assert_eq!(due(&row, 1, 10_000, IDLE), Due::Nothing);
        let ordinary = SandboxRow { persistent: false, ..row };
        assert_eq!(due(&ordinary, 0, 10_000, IDLE), Due::Nothing);
    }
}
