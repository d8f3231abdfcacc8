//! The data directory: claimed by one server at a time, or replaced by one that goes with the
//! server.
//!
//! A server that was killed with a directory of its own leaves it behind, with its VMs. The next
//! server ends and removes them.

use std::fs;
use std::path::{Path, PathBuf};

use pvmm_sandbox::Failure;

use crate::announce::private_dir;
use crate::app::App;
use crate::ids::Instance;
use crate::options::ServeOptions;
use crate::store::{Store, StoreError};

/// The name of the database's fact that identifies the directory.
pub const INSTANCE: &str = "instance";
const DATABASE: &str = "service.redb";
/// The start of the names of directories that go with their servers.
const OWN: &str = "service-of-";

/// A directory that is removed when this is dropped.
pub struct OwnDir(PathBuf);

impl Drop for OwnDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn refuse(error: StoreError) -> Failure {
    match error {
        StoreError::InUse | StoreError::TooNew { .. } => Failure::usage(error.to_string()),
        error => Failure::fault(error.to_string()),
    }
}

/// Opens the database of the data directory. If another server has it, a directory of its own takes
/// its place in `options`, if that is allowed.
pub fn claim(options: &mut ServeOptions) -> Result<(Store, Option<OwnDir>), Failure> {
    match Store::open(&options.data_dir.join(DATABASE)) {
        Err(StoreError::InUse) if options.own_dir_if_taken => {}
        store => return store.map(|store| (store, None)).map_err(refuse),
    }
    let (store, own) = make_own(options)?;
    Ok((store, Some(own)))
}

/// Makes a directory that goes with the server, beside the data directory, whose place it takes in
/// `options`.
pub fn make_own(options: &mut ServeOptions) -> Result<(Store, OwnDir), Failure> {
    let name = format!("{OWN}{}", std::process::id());
    let own = OwnDir(options.data_dir.with_file_name(name));
    let _ = fs::remove_dir_all(&own.0);
    private_dir(&own.0)?;
    options.data_dir.clone_from(&own.0);
    let store = Store::open(&own.0.join(DATABASE)).map_err(refuse)?;
    Ok((store, own))
}

/// Ends the VMs of killed servers that had directories of their own, and removes the directories. A
/// failure is logged, and the next server tries again.
pub fn end_abandoned(app: &App) {
    let Some(parent) = app.options.data_dir.parent() else { return };
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_own = entry.file_name().to_str().is_some_and(|name| name.starts_with(OWN));
        if is_own && let Err(why) = end_one(app, &entry.path()) {
            log::warn!("{}: {why}", entry.path().display());
        }
    }
}

fn end_one(app: &App, dir: &Path) -> Result<(), String> {
    let store = match Store::open(&dir.join(DATABASE)) {
        // Its server lives.
        Err(StoreError::InUse) => return Ok(()),
        store => store.map_err(|error| error.to_string())?,
    };
    let instance = store.fact(INSTANCE, String::new).map_err(|error| error.to_string())?;
    let instance = Instance::from_text(&instance);
    for vm in app.sandboxes.list().map_err(|failure| failure.message)? {
        let name = vm.record().name.as_deref().unwrap_or_default();
        if instance.sandbox_of(name).is_some() {
            vm.end().map_err(|failure| failure.message)?;
        }
    }
    fs::remove_dir_all(dir).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Limits;

    fn options(data_dir: &Path, own_dir_if_taken: bool) -> ServeOptions {
        fs::create_dir_all(data_dir).unwrap();
        ServeOptions {
            listen: Vec::new(),
            token: None,
            tls: None,
            data_dir: data_dir.to_owned(),
            own_dir_if_taken,
            limits: Limits::default(),
            cpu: pvmm::CpuBaseline::Host,
            default_egress: Vec::new(),
            shells: 0,
            with_parent: true,
            json_log: None,
            traces: None,
            print_address: false,
        }
    }

    #[test]
    fn second_server_gets_a_directory_of_its_own_if_it_may() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("service");
        let _first = claim(&mut options(&data, true)).unwrap();
        assert!(
            claim(&mut options(&data, false)).err().unwrap().message.contains("data directory")
        );
        let mut second = options(&data, true);
        let (_, own) = claim(&mut second).unwrap();
        assert_ne!(second.data_dir, data);
        assert!(second.data_dir.is_dir());
        drop(own);
        assert!(!second.data_dir.exists());
    }
}
