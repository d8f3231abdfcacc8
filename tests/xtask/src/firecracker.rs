//! The Firecracker that `FIRECRACKER_BIN` names, at a path that a nested host can read.
//!
//! The nested host has its own `/tmp` and `/run`. A file there would be found missing only in the
//! nested host, long after the start of the run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use crate::checkout;
use crate::probe::Found;

/// The name of the environment variable.
pub const VARIABLE: &str = "FIRECRACKER_BIN";

#[derive(Debug, thiserror::Error)]
pub enum FirecrackerError {
    #[error("{VARIABLE}={}: no such program; name a Firecracker, or unset it", .0.display())]
    Missing(PathBuf, #[source] io::Error),
    #[error("cannot copy {} to where the nested host sees it", .0.display())]
    Copy(PathBuf, #[source] io::Error),
}

/// Returns the words that begin a command so that it finds the named Firecracker, or no words if
/// the variable is not set. Fails if the program does not exist.
pub fn words(found: &Found) -> Result<Vec<OsString>, FirecrackerError> {
    let Some(named) = env::var_os(VARIABLE).map(PathBuf::from) else { return Ok(Vec::new()) };
    let inside = matches!(found, Found::NotHere(_)).then(checkout::scratch);
    let program = seen(&named, inside.as_deref())?;
    let mut variable = OsString::from(format!("{VARIABLE}="));
    variable.push(program);
    Ok(vec!["env".into(), variable])
}

/// Returns the path of the program, or of its copy in the folder that is shared with a nested host.
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
