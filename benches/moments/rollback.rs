//! Rollback: from the request until a command has run at the checkpoint.

use std::time::Instant;

use pvmm::agent::{Agent, Refresh};
use pvmm::trace;

use crate::board::{Board, Outcome, Unit, durations, millis, timed};
use crate::guest::{deadline, exec_true, shell, tap};
use crate::stage::{Baking, SETTLE_MAX, Stage};

/// A shell line whose writes the rollback undoes.
const DIRTY: &str = "head -c 8388608 /dev/zero | tr '\\0' x > /dev/shm/undone";

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let (mut vm, agent) = stage.parent()?;
    let socket = vm.vsock_path().ok_or("no vsock")?.to_owned();
    drop(agent);
    vm.settle(SETTLE_MAX);
    vm.checkpoint()?;
    let mut agent = Agent::connect(&socket, deadline())?;
    let mut peer = match (&stage.firecracker, &baking.firecracker) {
        (Some(peer), Some(baked)) => {
            let machine = peer.restore(baked, &stage.dir()?, tap(3).as_deref())?;
            Some((peer, baked, Some(machine)))
        }
        _ => None,
    };
    let counts = board.counts;
    board.say(&format!("rollback: {} rounds", counts.quick));
    for round in 0..counts.warm_ups + counts.quick {
        shell(&agent, DIRTY)?;
        let begun = Instant::now();
        let (back, steps) = trace::record(|| -> Outcome<Agent> {
            vm.rollback()?;
            let agent = Agent::connect_refreshed(&socket, &Refresh::new(1)?, deadline())?;
            exec_true(&agent)?;
            trace::step("exec /bin/true");
            Ok(agent)
        });
        let took = millis(begun.elapsed());
        agent = back?;
        if round >= counts.warm_ups {
            board.add("rollback → exec", "pvmm", Unit::Millis, took)?;
            board.trace("rollback", &durations(begun, &steps))?;
        }
        if let Some((peer, baked, machine)) = &mut peer {
            if let Some(machine) = machine.as_ref() {
                shell(&machine.agent, DIRTY)?;
            }
            let dir = stage.dir()?;
            let (again, took) = timed(|| {
                *machine = None;
                peer.restore(baked, &dir, tap(3).as_deref())
            })?;
            *machine = Some(again);
            if round >= counts.warm_ups {
                board.add("rollback → exec", "firecracker kill+restore", Unit::Millis, took)?;
            }
        }
    }
    Ok(())
}
