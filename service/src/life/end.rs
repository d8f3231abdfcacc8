//! Ends a sandbox: its VM, its folders, its row.
//!
//! The row goes last, so that a server that dies in between finds the sandbox again and ends it.

use std::sync::Arc;

use pvmm_sandbox::{Sandbox, Sandboxes};

use crate::app::{App, Entry};
use crate::blocking::Work;
use crate::error::ApiError;

use super::folders::remove_folders;

/// Ends a sandbox at once. Requests that run in it are cut off. Ending it twice is no error.
pub async fn end(app: &Arc<App>, entry: &Arc<Entry>) -> Result<(), ApiError> {
    let (row, vm) = {
        let mut fields = entry.lock();
        fields.ended = true;
        (fields.row.clone(), fields.vm.take())
    };
    let id = row.id.clone();
    // A wake that is under way has the lock, and its VM must not outlive the row.
    let _change = entry.change.lock().await;
    let vm = vm.or_else(|| entry.lock().vm.take());
    if let Some(vm) = &vm {
        app.count_last_denials(&row, vm).await;
    }
    let (sandboxes, folder) = (app.sandboxes.clone(), app.hibernation_dir(&id));
    let (name, shared, removed) = (app.instance.vm_name(&id), Arc::clone(app), id.clone());
    app.blocking
        .run(Work::Short, move || {
            match vm {
                Some(vm) => end_vm(&sandboxes, &vm)?,
                None => {
                    if let Ok(vm) = sandboxes.get(&name) {
                        end_vm(&sandboxes, &vm)?;
                    }
                }
            }
            remove_folders(&folder)?;
            shared.store.remove_sandbox(&removed)?;
            Ok(())
        })
        .await?;
    app.forget(&id);
    Ok(())
}

/// Ends a VM, which may have ended by itself meanwhile.
pub(super) fn end_vm(sandboxes: &Sandboxes, vm: &Sandbox) -> Result<(), ApiError> {
    let Err(failure) = vm.end() else { return Ok(()) };
    match sandboxes.get(vm.id()) {
        Ok(vm) if vm.status().is_alive() => Err(failure.into()),
        _ => Ok(()),
    }
}
