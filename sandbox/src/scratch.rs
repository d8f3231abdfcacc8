//! The scratch folder, where VMs' disk writes go: on a disk, not in the host's memory.
//!
//! A VM may fill its whole disk. In a tmpfs that would take the host's memory, so a tmpfs is used
//! only if the user asks for it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use pvmm::scratch::{self, ScratchError};
use pvmm_images::Cache;

use crate::failure::Failure;

/// Environment variable for a scratch folder other than pvmm's own.
const DIR: &str = "PVMM_SCRATCH_DIR";
/// Environment variable that, set to 1, allows a scratch folder in memory.
const IN_MEMORY: &str = "PVMM_SCRATCH_IN_MEMORY";

/// The scratch folder, and whether it is in memory by the user's choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub dir: PathBuf,
    pub in_memory: bool,
}

/// Returns the folder for the unnamed files that VMs write.
pub fn place() -> Result<Place, Failure> {
    let wished = std::env::var_os(DIR).filter(|dir| !dir.is_empty());
    let in_memory = std::env::var_os(IN_MEMORY).is_some_and(|value| value == "1");
    find(&candidates(wished), in_memory, &scratch::check)
}

/// Returns the folders to try: the cache, which is meant for large data, then temporary folders.
fn candidates(wished: Option<OsString>) -> Vec<PathBuf> {
    match wished {
        Some(dir) => vec![PathBuf::from(dir)],
        None => {
            let cache = Cache::open().ok().map(|cache| cache.root().to_owned());
            cache.into_iter().chain([std::env::temp_dir(), "/var/tmp".into()]).collect()
        }
    }
}

/// Returns the first folder on a disk, or with `in_memory` the first usable one.
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
