//! Runs cargo on this workspace, with its output where a person sees it.
//!
//! The verbs share it so that they all mean the same workspace and the same cargo.

use std::collections::BTreeMap;
use std::env;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::{checkout, progress};

#[derive(Debug, thiserror::Error)]
pub enum CargoError {
    #[error("cannot run cargo")]
    Run(#[source] io::Error),
    #[error("cargo {command} failed ({status})")]
    Failed { command: String, status: ExitStatus },
    #[error("cargo built no test called {0}")]
    NoTest(String),
}

/// Builds the command that everything else runs.
pub const BUILD_PVMM: [&str; 4] = ["build", "--release", "--package", "pvmm-launcher"];

fn command(arguments: &[&str]) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).current_dir(checkout::root()).stdin(Stdio::null());
    cargo
}

/// Where cargo puts what it builds.
pub fn target_dir() -> PathBuf {
    let root = checkout::root();
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// Runs cargo and says so.
pub fn run(arguments: &[&str]) -> Result<(), CargoError> {
    progress::step(format!("cargo {}", arguments.join(" ")));
    let status = command(arguments).status().map_err(CargoError::Run)?;
    if status.success() {
        return Ok(());
    }
    Err(CargoError::Failed { command: arguments.join(" "), status })
}

/// Each crate that `package` is built from, with the features that it is built with.
pub fn features(package: &str) -> Result<BTreeMap<String, String>, CargoError> {
    let arguments = ["tree", "--package", package, "--edges", "no-dev", "--prefix", "none"];
    let output =
        command(&arguments).args(["--format", "{p}\t{f}"]).output().map_err(CargoError::Run)?;
    if !output.status.success() {
        return Err(CargoError::Failed { command: arguments.join(" "), status: output.status });
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines = text.lines().filter_map(|line| line.split_once('\t'));
    Ok(lines.map(|(name, rest)| (name.into(), rest.trim_end_matches(" (*)").into())).collect())
}

/// A cargo that works beside this program. Dropping it ends it.
pub struct Beside {
    cargo: Child,
    command: String,
}

/// Starts cargo and says so; [`Beside::wait`] says how it ended.
pub fn start(arguments: &[&str]) -> Result<Beside, CargoError> {
    let text = arguments.join(" ");
    progress::step(format!("cargo {text}"));
    let cargo = command(arguments).spawn().map_err(CargoError::Run)?;
    Ok(Beside { cargo, command: text })
}

impl Beside {
    pub fn wait(mut self) -> Result<(), CargoError> {
        let status = self.cargo.wait().map_err(CargoError::Run)?;
        if status.success() {
            return Ok(());
        }
        Err(CargoError::Failed { command: std::mem::take(&mut self.command), status })
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Both fail for one that has ended.
        let _ = self.cargo.kill();
        let _ = self.cargo.wait();
    }
}

/// Builds a program as it is shipped and returns where it is: optimised as a whole, and static, so
/// that it starts without a loader and runs in an empty jail. Only its own link is told so: build
/// scripts and procedural macros cannot be static.
pub fn ship(package: &str, name: &str) -> Result<PathBuf, CargoError> {
    ship_with(package, name, &[])
}

/// Builds a program as [`ship`] does, with these features of its package.
pub fn ship_with(package: &str, name: &str, features: &[&str]) -> Result<PathBuf, CargoError> {
    let arguments = ["rustc", "--profile", "shipped", "--package", package, "--bin", name];
    let features: Vec<_> = features.iter().flat_map(|feature| ["--features", feature]).collect();
    run(&[&arguments[..], &features, &["--", "-C", "target-feature=+crt-static"]].concat())?;
    Ok(target_dir().join("shipped").join(name))
}

/// Builds a program that runs in an empty jail, optimised no more than tests need.
pub fn build_static(package: &str, name: &str) -> Result<PathBuf, CargoError> {
    let arguments = ["rustc", "--release", "--package", package, "--bin", name];
    run(&[&arguments[..], &["--", "-C", "target-feature=+crt-static"]].concat())?;
    Ok(target_dir().join("release").join(name))
}

/// Builds the test target `name` of `package` in release and returns its program.
pub fn build_test(package: &str, name: &str) -> Result<PathBuf, CargoError> {
    // Together with the launcher, so that the libraries below both are built once.
    let arguments =
        ["test", "--release", "--no-run", "-p", package, "-p", "pvmm-launcher", "--test", name];
    progress::step(format!("cargo {}", arguments.join(" ")));
    let output = command(&arguments)
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .map_err(CargoError::Run)?;
    if !output.status.success() {
        return Err(CargoError::Failed { command: arguments.join(" "), status: output.status });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let program = text.lines().filter_map(|line| test_program(line, name)).next_back();
    program.ok_or_else(|| CargoError::NoTest(name.to_string()))
}

/// The program that one of cargo's messages announces for the test target `name`.
pub fn test_program(message: &str, name: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    let target = message.get("target")?;
    if target.get("name")? != name || !target.get("kind")?.as_array()?.contains(&"test".into()) {
        return None;
    }
    message.get("executable")?.as_str().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_program_of_another_target_is_none() {
        let message = |name: &str, kind: &str| {
            format!(
                r#"{{"target":{{"name":"{name}","kind":["{kind}"]}},"executable":"/t/{name}-1"}}"#
            )
        };
        let found = test_program(&message("suite", "test"), "suite");
        assert_eq!(found, Some(PathBuf::from("/t/suite-1")));
        assert_eq!(test_program(&message("other", "test"), "suite"), None);
        assert_eq!(test_program(&message("suite", "bin"), "suite"), None);
        assert_eq!(test_program("not JSON", "suite"), None);
    }
}
