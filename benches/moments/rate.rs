//! Sustained rate: VMs are created, run a command and are destroyed, one after the other. The time
//! of the destruction is included.

use std::time::Instant;

use crate::board::{Board, Outcome, Unit};
use crate::guest::tap;
use crate::peers::pvmm::{Job, live, start};
use crate::stage::{Baking, Stage};

const MOMENT: &str = "create + exec + destroy";

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let time = board.counts.sustained;
    board.say(&format!("sustained rate, {} s each", time.as_secs()));
    let sustained = |act: &dyn Fn() -> Outcome<()>| -> Outcome<f64> {
        let (begun, mut count) = (Instant::now(), 0);
        while begun.elapsed() < time {
            act()?;
            count += 1;
        }
        Ok(f64::from(count) / begun.elapsed().as_secs_f64())
    };
    let held =
        sustained(&|| live(&baking.template, stage.dir()?.join("v"), tap(2).as_deref()).map(drop))?;
    board.add(MOMENT, "pvmm, held template", Unit::PerSecond, held)?;
    let process = sustained(&|| {
        let (snapshot, socket) = (baking.snapshot.clone(), stage.dir()?.join("v"));
        start(&stage.pvmm.program, &Job::Restore { snapshot, socket, tap: tap(1) }).map(drop)
    })?;
    board.add(MOMENT, "pvmm, new process", Unit::PerSecond, process)?;
    if let (Some(peer), Some(baked)) = (&stage.firecracker, &baking.firecracker) {
        let rate = sustained(&|| peer.restore(baked, &stage.dir()?, tap(3).as_deref()).map(drop))?;
        board.add(MOMENT, "firecracker", Unit::PerSecond, rate)?;
    }
    Ok(())
}
