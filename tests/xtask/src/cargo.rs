//! Runs cargo on this workspace, with its output on the terminal.
//!
//! All verbs use this module, so that they use one workspace and one cargo.

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

/// The arguments that build `pvmm`.
pub const BUILD_PVMM: [&str; 4] = ["build", "--release", "--package", "pvmm-launcher"];

fn command(arguments: &[&str]) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).current_dir(checkout::root()).stdin(Stdio::null());
    for (name, _) in env::vars_os().filter(|(name, _)| is_of_one_package(&name.to_string_lossy())) {
        cargo.env_remove(name);
    }
    cargo
}

/// Returns whether `cargo run` sets the variable for the package that it runs. Build scripts that
/// look at such variables would run again after each change between `cargo` and `cargo xtask`.
fn is_of_one_package(name: &str) -> bool {
    name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
}

/// Returns the folder for cargo's output.
pub fn target_dir() -> PathBuf {
    let root = checkout::root();
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// Prints the command and runs cargo. Fails if cargo fails.
pub fn run(arguments: &[&str]) -> Result<(), CargoError> {
    progress::step(format!("cargo {}", arguments.join(" ")));
    let status = command(arguments).status().map_err(CargoError::Run)?;
    if status.success() {
        return Ok(());
    }
    Err(CargoError::Failed { command: arguments.join(" "), status })
}

/// Runs cargo and returns its standard output.
pub fn output(arguments: &[&str]) -> Result<Vec<u8>, CargoError> {
    let mut cargo = command(arguments);
    let output = cargo.stderr(Stdio::inherit()).output().map_err(CargoError::Run)?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(CargoError::Failed { command: arguments.join(" "), status: output.status })
}

/// Returns each crate that `package` is built from, with its features.
pub fn features(package: &str) -> Result<BTreeMap<String, String>, CargoError> {
    let arguments = ["tree", "--package", package, "--edges", "no-dev", "--prefix", "none"];
    let stdout = output(&[&arguments[..], &["--format", "{p}\t{f}"]].concat())?;
    let text = String::from_utf8_lossy(&stdout).into_owned();
    let lines = text.lines().filter_map(|line| line.split_once('\t'));
    Ok(lines.map(|(name, rest)| (name.into(), rest.trim_end_matches(" (*)").into())).collect())
}

/// A cargo that runs in parallel with this program, and is killed on drop.
pub struct Beside {
    cargo: Child,
    command: String,
}

/// Prints the command and starts cargo. [`Beside::wait`] returns its result.
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
        // Both calls fail if cargo has ended.
        let _ = self.cargo.kill();
        let _ = self.cargo.wait();
    }
}

/// Builds a program as it is shipped, and returns its path. It is optimised as a whole, and static,
/// so that it starts without a loader and runs in an empty jail. Only the final link is static:
/// build scripts and procedural macros cannot be.
pub fn ship(package: &str, name: &str) -> Result<PathBuf, CargoError> {
    ship_with(package, name, &[])
}

/// Builds a program as [`ship`] does, with the given features of its package.
pub fn ship_with(package: &str, name: &str, features: &[&str]) -> Result<PathBuf, CargoError> {
    let arguments = ["rustc", "--profile", "shipped", "--package", package, "--bin", name];
    let features: Vec<_> = features.iter().flat_map(|feature| ["--features", feature]).collect();
    run(&[&arguments[..], &features, &["--", "-C", "target-feature=+crt-static"]].concat())?;
    Ok(target_dir().join("shipped").join(name))
}

/// Builds a static program, which runs in an empty jail, with the optimisation of the release
/// profile. Returns its path.
pub fn build_static(package: &str, name: &str) -> Result<PathBuf, CargoError> {
    let arguments = ["rustc", "--release", "--package", package, "--bin", name];
    run(&[&arguments[..], &["--", "-C", "target-feature=+crt-static"]].concat())?;
    Ok(target_dir().join("release").join(name))
}

/// Builds the test target `name` of `package` in release and returns the path of its program.
pub fn build_test(package: &str, name: &str) -> Result<PathBuf, CargoError> {
    // The launcher is built in the same command, so that the common libraries are built once.
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

/// Returns the program that a message of cargo announces for the test target `name`.
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
