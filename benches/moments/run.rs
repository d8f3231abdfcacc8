//! The command itself: `pvmm run -- true` with a warm template, and what its process costs before
//! it does anything.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::board::{Act, Board, Outcome, Unit, timed};
use crate::stage::Stage;

pub fn run(stage: &Stage, board: &mut Board) -> Outcome<()> {
    let Some(launcher) = &stage.launcher else {
        return Err("run: PVMM_BIN does not name the command pvmm".into());
    };
    call(launcher, &["template", "bake", "base"])?;
    call(launcher, &["run", "--", "true"])?;
    let acts: Vec<Act> = vec![
        (
            "pvmm run -- true".to_owned(),
            Box::new(|| Ok(timed(|| call(launcher, &["run", "--", "true"]))?.1)),
        ),
        ("pvmm --version".to_owned(), Box::new(|| Ok(timed(|| call(launcher, &["--version"]))?.1))),
    ];
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
