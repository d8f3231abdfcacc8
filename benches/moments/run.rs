//! The command itself: `pvmm run -- true` with a warm template, with and without the jail, and what
//! its process costs before it does anything.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::board::{Act, Board, Outcome, Unit, timed};
use crate::stage::Stage;

/// The commands that are timed, and their arguments.
const COMMANDS: [(&str, &[&str]); 3] = [
    ("pvmm run -- true", &["run", "--", "true"]),
    ("pvmm run -- true, no jail", &["run", "--no-jail", "--", "true"]),
    ("pvmm --version", &["--version"]),
];

pub fn run(stage: &Stage, board: &mut Board) -> Outcome<()> {
    let Some(launcher) = &stage.launcher else {
        return Err("run: PVMM_BIN does not name the command pvmm".into());
    };
    call(launcher, &["template", "bake", "base"])?;
    let mut acts: Vec<Act> = Vec::new();
    for (contender, arguments) in COMMANDS {
        call(launcher, arguments)?;
        let act = move || Ok(timed(|| call(launcher, arguments))?.1);
        acts.push((contender.to_owned(), Box::new(act)));
    }
    let counts = board.counts;
    board.interleave("run", Unit::Millis, counts.warm_ups, counts.quick, acts)
}

fn call(launcher: &Path, arguments: &[&str]) -> Outcome<()> {
    let output = Command::new(launcher).args(arguments).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("pvmm {}: {}: {said}", arguments.join(" "), output.status).into())
}
