//! Where the disk writes of VMs go: pvmm's own folder, on a disk and not in this host's memory.
//!
//! A VM may write as much as its disk is large. Into a tmpfs that would be the host's memory, so it is only
//! done for a user who says so.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use pvmm::scratch::{self, ScratchError};
use pvmm_sandbox::Cache;

use crate::exit::Failure;
use crate::output;

/// The folder to use instead of pvmm's own.
const DIR: &str = "PVMM_SCRATCH_DIR";
/// Set to 1 by who wants disks in memory.
const IN_MEMORY: &str = "PVMM_SCRATCH_IN_MEMORY";

/// The folder, and whether it is in memory by the user's own wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub dir: PathBuf,
    pub in_memory: bool,
}

/// The folder for nameless files that VMs write; a remark says it if that is memory.
pub fn place(quiet: bool) -> Result<Place, Failure> {
    let wished = std::env::var_os(DIR).filter(|dir| !dir.is_empty());
    let in_memory = std::env::var_os(IN_MEMORY).is_some_and(|value| value == "1");
    let place = find(&candidates(wished), in_memory, &scratch::check)?;
    if place.in_memory {
        let dir = place.dir.display();
        output::remark(quiet, &format!("warning: VM disks are in this host's memory ({dir})"));
    }
    Ok(place)
}

/// The cache is where a user keeps much; a temporary place serves where that cannot be written.
fn candidates(wished: Option<OsString>) -> Vec<PathBuf> {
    match wished {
        Some(dir) => vec![PathBuf::from(dir)],
        None => {
            let cache = Cache::open().ok().map(|cache| cache.root().to_owned());
            cache.into_iter().chain([std::env::temp_dir(), "/var/tmp".into()]).collect()
        }
    }
}

/// The first folder that is on a disk, or with `in_memory` the first that can be used at all.
fn find(
    dirs: &[PathBuf],
    in_memory: bool,
    check: &dyn Fn(&Path) -> Result<(), ScratchError>,
) -> Result<Place, Failure> {
    let mut first = None;
    for dir in dirs {
        match check(dir) {
            Ok(()) => return Ok(Place { dir: dir.clone(), in_memory: false }),
            Err(ScratchError::InMemory { .. }) if in_memory => {
                return Ok(Place { dir: dir.clone(), in_memory: true });
            }
            Err(error) => drop(first.get_or_insert(error)),
        }
    }
    let message = match &first {
        Some(error) => match std::error::Error::source(error) {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        },
        None => "there is no folder for the disk writes of VMs".to_owned(),
    };
    let mut hint = format!("set {DIR} to a folder on a disk");
    if matches!(first, Some(ScratchError::InMemory { .. })) {
        hint += &format!(", or {IN_MEMORY}=1 to let VMs use the memory");
    }
    Err(Failure::usage(message).hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(dir: &Path) -> Result<(), ScratchError> {
        match dir.to_str() {
            Some("/disk") => Ok(()),
            Some("/memory") => Err(ScratchError::InMemory { dir: dir.to_owned(), kind: "tmpfs" }),
            _ => Err(ScratchError::NoUnnamed { dir: dir.to_owned() }),
        }
    }

    fn find(dirs: &[&str], in_memory: bool) -> Result<Place, Failure> {
        let dirs: Vec<PathBuf> = dirs.iter().map(PathBuf::from).collect();
        super::find(&dirs, in_memory, &fake)
    }

    #[test]
    fn folder_on_a_disk_comes_before_one_in_memory() {
        let place = find(&["/memory", "/odd", "/disk"], false).unwrap();
        assert_eq!(place, Place { dir: "/disk".into(), in_memory: false });
    }

    #[test]
    fn folder_in_memory_alone_is_refused_with_both_ways_out() {
        let refused = find(&["/memory", "/odd"], false).unwrap_err();
        assert!(refused.message.contains("/memory is on tmpfs"), "{refused:?}");
        let hint = refused.hint.unwrap();
        assert!(hint.contains(DIR) && hint.contains(IN_MEMORY), "{hint}");
        assert!(find(&["/odd", "/memory"], true).unwrap().in_memory);
    }
}
