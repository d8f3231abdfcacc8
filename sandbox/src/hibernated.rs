//! Sandboxes that were written to disk and ended, to go on later under their names.
//!
//! Each is a folder in pvmm's data directory with a snapshot, the record and the network of its VM.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, FailureKind, io_text};
use crate::sandboxes::{CreateOptions, Sandbox, Sandboxes};
use crate::snapshots;
use crate::vm_dir::{Egress, Record, read_document, write_document};

const SNAPSHOT: &str = "snapshot";
const RECORD: &str = "vm.json";
/// The network policy of the VM.
pub(crate) const EGRESS: &str = "egress.json";

/// A sandbox on disk.
#[derive(Clone, Debug)]
pub struct Hibernated {
    pub record: Record,
    egress: Option<Egress>,
    folder: PathBuf,
}

impl Hibernated {
    /// Returns the sandbox's name, or the id that it had if it has no name.
    pub fn label(&self) -> &str {
        self.record.name.as_deref().unwrap_or(&self.record.id)
    }

    /// Returns the folder that the sandbox is in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether the sandbox may have a network when it wakes.
    pub fn has_policy(&self) -> bool {
        self.folder.join(EGRESS).exists()
    }

    /// Starts the sandbox again and removes what was kept of it. If that fails it stays on disk.
    pub fn wake(self, sandboxes: &Sandboxes) -> Result<Sandbox, Failure> {
        let mut volumes = self.record.volumes.clone();
        volumes.iter_mut().for_each(|volume| volume.mounted = true);
        let options = CreateOptions {
            name: self.record.name.clone(),
            egress: self.egress.clone(),
            volumes,
            ..CreateOptions::of(&self.record.template)
        };
        let sandbox = sandboxes.restore(&self.folder.join(SNAPSHOT), &options)?;
        self.remove()?;
        Ok(sandbox)
    }

    /// Removes the sandbox from the disk, for good.
    pub fn remove(&self) -> Result<(), Failure> {
        fs::remove_dir_all(&self.folder).map_err(|error| {
            let why = io_text(&error);
            Failure::fault(format!("cannot remove {}: {why}", self.folder.display()))
        })
    }
}

/// Writes a sandbox to disk and ends it.
pub fn hibernate(sandbox: &Sandbox) -> Result<Hibernated, Failure> {
    let folder = folder()?.join(sandbox.id());
    let failed = |error: std::io::Error| {
        Failure::fault(format!("cannot make {}: {}", folder.display(), io_text(&error)))
    };
    let hibernated = Hibernated {
        record: sandbox.record().clone(),
        egress: sandbox.egress(),
        folder: folder.clone(),
    };
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
    let written = write_document(&folder.join(EGRESS), &hibernated.egress)
        .and_then(|()| write_document(&folder.join(RECORD), &hibernated.record))
        .map_err(failed)
        .and_then(|()| sandbox.hibernate(&folder.join(SNAPSHOT)));
    if let Err(failure) = written {
        let _ = fs::remove_dir_all(&folder);
        return Err(failure);
    }
    Ok(hibernated)
}

/// Lists the sandboxes on disk, newest last. One without a whole snapshot is not listed.
pub fn list() -> Result<Vec<Hibernated>, Failure> {
    let mut found: Vec<Hibernated> = fs::read_dir(folder()?)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|it| read(it.path()))
        .collect();
    found.sort_by_key(|hibernated| hibernated.record.created);
    Ok(found)
}

/// Finds a sandbox on disk by its name or the id that it had.
pub fn find(reference: &str) -> Result<Hibernated, Failure> {
    let known = |it: &Hibernated| it.label() == reference || it.record.id == reference;
    list()?.into_iter().find(known).ok_or_else(|| {
        Failure::usage(format!("no hibernated VM is called '{reference}'"))
            .of_kind(FailureKind::NotFound)
            .hint("'pvmm ps' lists them, too")
    })
}

fn read(folder: PathBuf) -> Option<Hibernated> {
    folder.join(SNAPSHOT).join("manifest.json").exists().then_some(())?;
    let record = read_document(&folder.join(RECORD))?;
    let egress = read_document(&folder.join(EGRESS)).flatten();
    Some(Hibernated { record, egress, folder })
}

/// Returns the folder of all sandboxes on disk.
pub(crate) fn folder() -> Result<PathBuf, Failure> {
    Ok(snapshots::data_dir()?.join("hibernated"))
}
