//! The command itself: `pvmm run -- true` with a warm template, copies of a running VM and VMs of
//! a snapshot, each with and without the jail, and what its process costs before it does anything.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::board::{Act, Board, Outcome, Unit, timed};
use crate::stage::Stage;

/// The VM that is copied, and its snapshot.
const PARENT: &str = "pvmm-bench-parent";

/// The commands that are timed: moment, contender, arguments.
const COMMANDS: [(&str, &str, &[&str]); 7] = [
    ("pvmm run -- true", "pvmm", &["run", "--", "true"]),
    ("pvmm run -- true", "without its jail", &["run", "--no-jail", "--", "true"]),
    ("pvmm fork", "pvmm", &["fork", PARENT]),
    ("pvmm fork", "without its jail", &["fork", "--no-jail", PARENT]),
    ("pvmm restore", "pvmm", &["restore", PARENT]),
    ("pvmm restore", "without its jail", &["restore", "--no-jail", PARENT]),
    ("pvmm --version", "pvmm", &["--version"]),
];

pub fn run(stage: &Stage, board: &mut Board) -> Outcome<()> {
    let Some(launcher) = &stage.launcher else {
        return Err("run: PVMM_BIN does not name the command pvmm".into());
    };
    call(launcher, &["template", "bake", "base"])?;
    let _parent = Parent::start(launcher)?;
    let counts = board.counts;
    for commands in COMMANDS.chunk_by(|one, next| one.0 == next.0) {
        let mut acts: Vec<Act> = Vec::new();
        let mut timed_as = "";
        for (moment, contender, arguments) in commands {
            timed_as = moment;
            take(launcher, arguments)?;
            acts.push(((*contender).to_owned(), Box::new(move || take(launcher, arguments))));
        }
        board.interleave(timed_as, Unit::Millis, counts.warm_ups, counts.quick, acts)?;
    }
    Ok(())
}

/// A running VM and a snapshot of it, which are removed on drop.
struct Parent<'a> {
    launcher: &'a Path,
}

impl<'a> Parent<'a> {
    fn start(launcher: &'a Path) -> Outcome<Self> {
        let parent = Self { launcher };
        parent.remove();
        call(launcher, &["run", "-d", "--name", PARENT])?;
        call(launcher, &["snapshot", PARENT, PARENT])?;
        Ok(parent)
    }

    /// Removes the VM and the snapshot, where they are there.
    fn remove(&self) {
        let _ = call(self.launcher, &["rm", "-f", PARENT]);
        let _ = call(self.launcher, &["snapshots", "rm", PARENT]);
    }
}

impl Drop for Parent<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Runs a command, and removes the VM whose id it prints. Returns how many milliseconds the command
/// took.
fn take(launcher: &Path, arguments: &[&str]) -> Outcome<f64> {
    let (printed, took) = timed(|| call(launcher, arguments))?;
    if matches!(arguments[0], "fork" | "restore") {
        call(launcher, &["rm", "-f", printed.trim()])?;
    }
    Ok(took)
}

/// Runs a command, and returns what it prints.
fn call(launcher: &Path, arguments: &[&str]) -> Outcome<String> {
    let output = Command::new(launcher).args(arguments).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8(output.stdout)?);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("pvmm {}: {}: {said}", arguments.join(" "), output.status).into())
}
