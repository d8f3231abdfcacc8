//! Snapshots and hibernated VMs that go to another host, or come from one.
//!
//! A library does the moving; here is which files go, and what is checked before files that came
//! get their name.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use pvmm::snapshot::{PortableContent, Roots, portable_files, settle_portable};
use pvmm_images::cache;
use pvmm_images::part::Part;

use crate::failure::{Failure, FailureKind, io_text};
use crate::hibernated::{self, Hibernated};
use crate::prepare;
use crate::snapshots;
use crate::vm_dir::{Record, check_name, is_id, read_document};

/// The folder of a hibernated VM's snapshot.
const SNAPSHOT: &str = "snapshot";
const RECORD: &str = "vm.json";
/// The network policy of a hibernated VM that came from another host. Nothing reads it unless the
/// user who pulls the VM wants it.
const POLICY: &str = "policy.json";

/// Returns the folder of unfinished pulls, beside those of snapshots and hibernated VMs.
pub fn pulls() -> Result<PathBuf, Failure> {
    Ok(snapshots::data_dir()?.join("pulls"))
}

/// Opens the files of the snapshot in `folder`, and of images that it names below `roots`.
pub fn snapshot_parts(folder: &Path, roots: &Roots) -> Result<Vec<Part>, Failure> {
    let files = portable_files(folder, roots).map_err(refuse)?;
    let part = |file: pvmm::snapshot::PortableFile| match file.content {
        PortableContent::Text(bytes) => Ok(Part::of_bytes(&file.path, bytes)),
        PortableContent::File(open) => {
            Part::of_file(&file.path, open).map_err(|error| unreadable(folder, &error))
        }
    };
    files.into_iter().map(part).collect()
}

/// Opens the files of a hibernated VM. One with volumes cannot go: they stay where they are.
pub fn hibernated_parts(vm: &Hibernated) -> Result<Vec<Part>, Failure> {
    if !vm.record.volumes.is_empty() {
        let message = format!("'{}' has volumes, which do not travel", vm.label());
        return Err(Failure::usage(message).hint("hibernate a VM without volumes"));
    }
    let folder = vm.folder();
    let policy = if vm.has_policy() { hibernated::EGRESS } else { POLICY };
    let mut parts = Vec::new();
    for (name, file) in [(RECORD, RECORD), (POLICY, policy)] {
        let path = folder.join(file);
        parts.push(Part::open(name, &path).map_err(|error| unreadable(&path, &error))?);
    }
    let roots = Some(snapshots::roots(vec![folder.to_owned()]));
    let files = snapshot_parts(&folder.join(SNAPSHOT), &roots)?.into_iter();
    parts.extend(files.map(|part| Part { path: format!("{SNAPSHOT}/{}", part.path), ..part }));
    Ok(parts)
}

/// Makes the files in `folder` the snapshot `name`. `paths` are all files that came.
pub fn adopt_snapshot(
    folder: &Path,
    paths: &[String],
    name: &str,
    replace: bool,
) -> Result<PathBuf, Failure> {
    check_name(name).map_err(|why| Failure::usage(format!("snapshot: {why}")))?;
    let place = resolved(&snapshots::new_place(name)?)?;
    if place.exists() && !replace {
        return Err(exists(name));
    }
    same(settle_portable(folder, &place).map_err(refuse)?, paths)?;
    cache::publish_folder(folder, &place).map_err(prepare::refuse)?;
    Ok(place)
}

/// Returns the failure for a snapshot whose name is taken.
pub fn exists(name: &str) -> Failure {
    Failure::usage(format!("another snapshot '{name}' exists already")).hint("use --replace")
}

/// Makes the files in `folder` a hibernated VM of this host, which may reach the network only if
/// `keep_policy` is set and its policy allows it. Returns its label.
pub fn adopt_hibernated(
    folder: &Path,
    paths: &[String],
    keep_policy: bool,
) -> Result<String, Failure> {
    let refused = |why: &str| Failure::usage(format!("the hibernated VM is refused: {why}"));
    let record: Record =
        read_document(&folder.join(RECORD)).ok_or_else(|| refused("vm.json cannot be read"))?;
    let label =
        label(&record).ok_or_else(|| refused("vm.json has a wrong id or name, or volumes"))?;
    let all = hibernated::folder()?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&all);
    made.map_err(|error| unwritable(&all, &error))?;
    let place = resolved(&all.join(&record.id))?;
    if place.exists() || hibernated::find(&label).is_ok() {
        return Err(Failure::usage(format!("another hibernated VM '{label}' exists already"))
            .of_kind(FailureKind::Conflict)
            .hint(format!("wake it, or remove it with 'pvmm rm {label}'")));
    }
    let own = settle_portable(&folder.join(SNAPSHOT), &place.join(SNAPSHOT)).map_err(refuse)?;
    let own = own.into_iter().map(|path| format!("{SNAPSHOT}/{path}"));
    same(own.chain([RECORD, POLICY].map(str::to_owned)).collect(), paths)?;
    if keep_policy {
        let to = folder.join(hibernated::EGRESS);
        fs::rename(folder.join(POLICY), &to).map_err(|error| unwritable(&to, &error))?;
    }
    cache::publish_folder(folder, &place).map_err(prepare::refuse)?;
    Ok(label)
}

/// Returns the name of a VM whose record may come from anybody, or its id; `None` if it is refused.
fn label(record: &Record) -> Option<String> {
    let named = record.name.as_deref().is_none_or(|name| check_name(name).is_ok());
    let good = is_id(&record.id) && named && record.volumes.is_empty();
    good.then(|| record.name.as_ref().unwrap_or(&record.id).clone())
}

/// Refuses files that belong to nothing.
fn same(own: Vec<String>, came: &[String]) -> Result<(), Failure> {
    let own: BTreeSet<_> = own.iter().collect();
    match came.iter().find(|path| !own.contains(path)) {
        None if own.len() == came.len() => Ok(()),
        None => Err(Failure::usage("a file of the snapshot is missing in the store")),
        Some(path) => Err(Failure::usage(format!("{path} is no file of the snapshot"))),
    }
}

/// Returns a path whose parent has no links, as those in snapshots have none.
fn resolved(path: &Path) -> Result<PathBuf, Failure> {
    let parent = path.parent().unwrap_or(path);
    let parent = fs::canonicalize(parent).map_err(|error| unreadable(parent, &error))?;
    Ok(parent.join(path.file_name().unwrap_or_default()))
}

fn refuse(error: pvmm::Error) -> Failure {
    Failure::usage(format!("{error:#}"))
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::fault(format!("cannot read {}: {}", path.display(), io_text(error)))
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    Failure::fault(format!("cannot write {}: {}", path.display(), io_text(error)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_dir::VolumeMount;

    #[test]
    fn h17_record_with_a_path_for_its_id_or_name_or_with_volumes_is_refused() {
        let good = Record { id: "0123456789ab".into(), ..Record::default() };
        assert_eq!(label(&good).as_deref(), Some("0123456789ab"));
        let (image, at) = ("/etc/shadow".into(), "/x".into());
        let volume = VolumeMount { image, at, read_only: true, mounted: true };
        for bad in [
            Record { id: "../../../x/y".into(), ..good.clone() },
            Record { name: Some("../x".into()), ..good.clone() },
            Record { volumes: vec![volume], ..good },
        ] {
            assert_eq!(label(&bad), None);
        }
    }

    #[test]
    fn h17_file_that_belongs_to_no_snapshot_or_that_is_missing_is_refused() {
        let own = || vec!["manifest.json".to_owned(), "state.bin".to_owned()];
        same(own(), &own()).unwrap();
        let more = [own(), vec!["verified".to_owned()]].concat();
        assert!(same(own(), &more).unwrap_err().message.contains("verified"));
        assert!(same(own(), &own()[..1]).is_err());
    }
}
