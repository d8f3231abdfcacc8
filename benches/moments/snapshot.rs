//! Snapshot: a full snapshot of a running guest into a folder on tmpfs, with and without waiting
//! for the disk.

use std::cell::RefCell;
use std::fs;
use std::time::Instant;

use pvmm::snapshot::{Durability, WriteOptions};
use pvmm::trace;

use crate::board::{Act, Board, Outcome, Unit, durations, millis, timed};
use crate::guest::TAPS;
use crate::peers::{Peer, firecracker};
use crate::stage::{Baking, SETTLE_MAX, Stage};

pub fn run(stage: &Stage, _: &Baking, board: &mut Board) -> Outcome<()> {
    let (vm, _agent) = stage.parent()?;
    let vm = RefCell::new(vm);
    let traces = RefCell::new(Vec::new());
    let write = |durability: Durability| {
        let (vm, traces) = (&vm, &traces);
        move || {
            let dir = stage.dir()?.join("s");
            let options = WriteOptions { durability, ..Default::default() };
            let begun = Instant::now();
            let (written, steps) = trace::record(|| {
                let mut vm = vm.borrow_mut();
                vm.settle(SETTLE_MAX);
                vm.freeze()?.write(&dir, options)
            });
            let took = millis(begun.elapsed());
            written?;
            if durability == Durability::Full {
                traces.borrow_mut().push(durations(begun, &steps));
            }
            fs::remove_dir_all(dir)?;
            Ok(took)
        }
    };
    let peer = match &stage.firecracker {
        Some(peer) => {
            let spec = stage.spec(TAPS - 1)?;
            Some((peer.boot(&spec)?.0, spec.dir))
        }
        None => None,
    };
    let mut acts: Vec<Act> = vec![
        ("pvmm, sync none".to_owned(), Box::new(write(Durability::None))),
        ("pvmm, sync full".to_owned(), Box::new(write(Durability::Full))),
    ];
    if let Some((_machine, parent)) = &peer {
        let write = || {
            let dir = stage.dir()?;
            let ((), took) = timed(|| {
                firecracker::pause(parent)?;
                firecracker::snapshot(parent, &dir)?;
                firecracker::resume(parent)
            })?;
            fs::remove_dir_all(dir)?;
            Ok(took)
        };
        acts.push(("firecracker".to_owned(), Box::new(write)));
    }
    let counts = board.counts;
    board.interleave("full snapshot", Unit::Millis, 1, counts.slow, acts)?;
    // The first trace is of the warm-up.
    for steps in traces.into_inner().into_iter().skip(1) {
        board.trace("a snapshot with sync", &steps)?;
    }
    Ok(())
}
