//! Takes up what an earlier server left: running sandboxes, hibernated ones, and half-made ones,
//! which are removed.
//!
//! VMs and folders are the truth. A VM belongs to a row by its name, which has the sandbox's id.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use pvmm_sandbox::Sandbox;
use pvmm_sandbox::vm_dir::VmStatus;

use crate::app::App;
use crate::error::ApiError;
use crate::store::{SandboxRow, State};

use super::end::end_vm;
use super::folders::{new_folder, remove_folder, remove_folders, replace_folder};

/// The end of the search for a row's sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Its VM lives.
    Live(State),
    /// Its VM is gone, and a snapshot of it is there.
    Hibernated,
    /// A persistent sandbox is gone. Its row stays, so that its client learns of it.
    Failed,
    /// An ordinary sandbox is gone.
    Gone,
}

fn fate(row: &SandboxRow, vm: Option<&VmStatus>, has_folder: bool) -> Fate {
    match vm {
        Some(VmStatus::Paused) => Fate::Live(State::Paused),
        Some(status) if status.is_alive() => Fate::Live(State::Running),
        _ if has_folder => Fate::Hibernated,
        _ if row.persistent => Fate::Failed,
        _ => Fate::Gone,
    }
}

/// Brings rows, VMs and folders into agreement and adds the sandboxes to `app`. Waits; called once,
/// before the first request.
pub fn reconcile(app: &App) -> Result<(), ApiError> {
    let mut vms = own_vms(app)?;
    let rows = app.store.sandboxes()?;
    let known: HashSet<String> = rows.iter().map(|row| row.id.clone()).collect();
    for row in rows {
        let vm = vms.remove(&row.id);
        take_up(app, row, vm)?;
    }
    for (id, vm) in vms {
        log::warn!("sandbox {id} was never finished: its VM is ended");
        if let Err(error) = end_vm(&app.sandboxes, &vm) {
            log::error!("cannot end VM {}: {}", vm.id(), error.message);
        }
    }
    let data = &app.options.data_dir;
    keep_only(&data.join("hibernated"), |name| known.contains(name))?;
    let snapshots = app.store.snapshots()?;
    for row in &snapshots {
        if !app.snapshot_dir(&row.id).is_dir() {
            app.store.remove_snapshot(&row.id)?;
        }
    }
    keep_only(&data.join("snapshots"), |name| snapshots.iter().any(|row| row.id == name))?;
    Ok(())
}

/// Returns the VMs that a server over this data directory made, by sandbox.
fn own_vms(app: &App) -> Result<HashMap<String, Sandbox>, ApiError> {
    let mut vms = HashMap::new();
    for vm in app.sandboxes.list()? {
        let id = vm.record().name.as_deref().and_then(|name| app.instance.sandbox_of(name));
        if let Some(id) = id.map(str::to_owned) {
            vms.insert(id, vm);
        }
    }
    Ok(vms)
}

fn take_up(app: &App, mut row: SandboxRow, vm: Option<Sandbox>) -> Result<(), ApiError> {
    let folder = app.hibernation_dir(&row.id);
    let alive = vm.as_ref().is_some_and(|vm| vm.status().is_alive());
    settle_folders(&folder, alive)?;
    let fate = fate(&row, vm.as_ref().map(Sandbox::status), folder.is_dir());
    if let Some(vm) = vm.as_ref().filter(|_| !alive) {
        end_vm(&app.sandboxes, vm)?;
    }
    match fate {
        Fate::Live(state) => {
            row.state = state;
            // Without them the page shows only that there are some.
            let known = vm.as_ref().filter(|_| row.has_checkpoint).map(Sandbox::checkpoints);
            let entry = app.add(row, vm);
            if let Some(Ok(checkpoints)) = known {
                entry.lock().checkpoints = checkpoints;
            }
        }
        Fate::Hibernated | Fate::Failed => {
            row.state = if fate == Fate::Failed { State::Failed } else { State::Hibernated };
            (row.vm, row.expires_ms) = (None, None);
            app.store.put_sandboxes(&[&row])?;
            app.add(row, None);
        }
        Fate::Gone => {
            app.store.remove_sandbox(&row.id)?;
            app.forget(&row.id);
        }
    }
    Ok(())
}

/// Finishes or undoes a hibernation that was cut off. A folder appears whole, so a new one of a VM
/// that is gone is its last state; that of a VM which lives is old by now.
fn settle_folders(folder: &Path, alive: bool) -> std::io::Result<()> {
    let (new, old) = (new_folder(folder), folder.with_extension("old"));
    if new.is_dir() && !alive {
        return replace_folder(folder);
    }
    remove_folder(&new)?;
    if old.is_dir() && !folder.exists() {
        return fs::rename(&old, folder);
    }
    remove_folder(&old)
}

/// Removes the folders of a directory that nothing refers to.
fn keep_only(dir: &Path, keep: impl Fn(&str) -> bool) -> std::io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if !keep(stem) {
            remove_folders(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(persistent: bool) -> SandboxRow {
        SandboxRow { persistent, ..SandboxRow::default() }
    }

    #[test]
    fn live_vm_is_taken_up_in_its_state() {
        assert_eq!(fate(&row(false), Some(&VmStatus::Running), true), Fate::Live(State::Running));
        assert_eq!(fate(&row(true), Some(&VmStatus::Paused), false), Fate::Live(State::Paused));
    }

    #[test]
    fn sandbox_without_vm_is_its_folder_or_gone() {
        for vm in [None, Some(&VmStatus::Dead)] {
            assert_eq!(fate(&row(false), vm, true), Fate::Hibernated);
            assert_eq!(fate(&row(true), vm, true), Fate::Hibernated);
            assert_eq!(fate(&row(true), vm, false), Fate::Failed);
            assert_eq!(fate(&row(false), vm, false), Fate::Gone);
        }
    }

    #[test]
    fn hibernation_cut_off_after_its_snapshot_counts() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a");
        fs::create_dir(&folder).unwrap();
        fs::create_dir(dir.path().join("a.new")).unwrap();
        fs::write(dir.path().join("a.new/x"), "new").unwrap();
        settle_folders(&folder, false).unwrap();
        assert_eq!(fs::read_to_string(folder.join("x")).unwrap(), "new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn hibernation_of_a_vm_that_lives_is_undone() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a");
        fs::create_dir(dir.path().join("a.new")).unwrap();
        fs::create_dir(dir.path().join("a.old")).unwrap();
        settle_folders(&folder, true).unwrap();
        assert!(folder.is_dir());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn folders_of_unknown_sandboxes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "b.new"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        keep_only(dir.path(), |name| name == "a").unwrap();
        assert!(dir.path().join("a").is_dir());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        keep_only(&dir.path().join("none"), |_| true).unwrap();
    }
}
