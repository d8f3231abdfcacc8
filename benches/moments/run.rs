//! The command itself: `pvmm run -- true` with a warm template, with and without the jail, and what
//! its process costs before it does anything.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::board::{Act, Board, Outcome, Unit, timed};
use crate::stage::Stage;

/// The commands that are timed: moment, contender, arguments.
const COMMANDS: [(&str, &str, &[&str]); 3] = [
    ("pvmm run -- true", "pvmm", &["run", "--", "true"]),
    ("pvmm run -- true", "without its jail", &["run", "--no-jail", "--", "true"]),
    ("pvmm --version", "pvmm", &["--version"]),
];

pub fn run(stage: &Stage, board: &mut Board) -> Outcome<()> {
    let Some(launcher) = &stage.launcher else {
        return Err("run: PVMM_BIN does not name the command pvmm".into());
    };
    call(launcher, &["template", "bake", "base"])?;
    let counts = board.counts;
    for commands in COMMANDS.chunk_by(|one, next| one.0 == next.0) {
        let mut acts: Vec<Act> = Vec::new();
        let mut timed_as = "";
        for (moment, contender, arguments) in commands {
            timed_as = moment;
            call(launcher, arguments)?;
            let act = move || Ok(timed(|| call(launcher, arguments))?.1);
            acts.push(((*contender).to_owned(), Box::new(act)));
        }
        board.interleave(timed_as, Unit::Millis, counts.warm_ups, counts.quick, acts)?;
    }
    Ok(())
}

fn call(launcher: &Path, arguments: &[&str]) -> Outcome<()> {
    let output = Command::new(launcher).args(arguments).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("pvmm {}: {}: {said}", arguments.join(" "), output.status).into())
}
