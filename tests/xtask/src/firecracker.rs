//! The Firecracker that a person has named by `FIRECRACKER_BIN`, where a nested host sees it.
//!
//! The nested host has a `/tmp` and a `/run` of its own, so a file there would not be found inside,
//! an hour after the run began.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use crate::checkout;
use crate::probe::Found;

/// The variable's name.
pub const VARIABLE: &str = "FIRECRACKER_BIN";

#[derive(Debug, thiserror::Error)]
pub enum FirecrackerError {
    #[error("{VARIABLE}={}: no such program; name a Firecracker, or unset it", .0.display())]
    Missing(PathBuf, #[source] io::Error),
    #[error("cannot copy {} to where the nested host sees it", .0.display())]
    Copy(PathBuf, #[source] io::Error),
}

/// Words to begin a command with so that it finds the Firecracker that is named: none if there is
/// none.
pub fn words(found: &Found) -> Result<Vec<OsString>, FirecrackerError> {
    let Some(named) = env::var_os(VARIABLE).map(PathBuf::from) else { return Ok(Vec::new()) };
    let inside = matches!(found, Found::NotHere(_)).then(checkout::scratch);
    let program = seen(&named, inside.as_deref())?;
    let mut variable = OsString::from(format!("{VARIABLE}="));
    variable.push(program);
    Ok(vec!["env".into(), variable])
}

/// The program's path, or that of its copy in the folder that is shared with a nested host.
fn seen(named: &Path, shared: Option<&Path>) -> Result<PathBuf, FirecrackerError> {
    let program = fs::canonicalize(named);
    let program = program.map_err(|e| FirecrackerError::Missing(named.to_owned(), e))?;
    let Some(shared) = shared else { return Ok(program) };
    let copy = shared.join("firecracker");
    let copied = fs::create_dir_all(shared).and_then(|()| fs::copy(&program, &copy));
    copied.map_err(|e| FirecrackerError::Copy(program, e))?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firecracker_under_tmp_is_passed_in_and_a_missing_one_is_told_before_the_run() {
        let place = tempfile::tempdir().unwrap();
        let (named, shared) = (place.path().join("fc"), place.path().join("shared"));
        let refused = seen(&named, Some(&shared)).unwrap_err().to_string();
        assert!(refused.starts_with("FIRECRACKER_BIN=") && !shared.exists(), "{refused}");
        fs::write(&named, "program").unwrap();
        let inside = seen(&named, Some(&shared)).unwrap();
        assert!(inside.starts_with(&shared));
        assert_eq!(fs::read_to_string(inside).unwrap(), "program");
        assert_eq!(seen(&named, None).unwrap(), fs::canonicalize(&named).unwrap());
    }
}
