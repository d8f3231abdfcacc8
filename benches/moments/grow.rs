//! Growing into new memory: a guest writes 64 MiB that it has never touched, after a boot, after a
//! restore and in a fork of a running VM; and memory that was touched and freed before the fork.
//!
//! The page faults of the process are counted too, because each page that the host supplies singly
//! is one fault.

use crate::board::{Act, Board, Outcome, Unit, timed};
use crate::guest::{deadline, shell, tap};
use crate::peers::firecracker::SOCKET;
use crate::peers::pvmm::live;
use crate::stage::{Baking, SETTLE_MAX, Stage};
use crate::sys;
use pvmm::agent::Agent;

const MIB: usize = 64;
const WRITE: &str = "head -c 67108864 /dev/zero > /dev/shm/new";

const TIME: &str = "grow by 64 MiB";
const FAULTS: &str = "grow: faults per MiB";

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let counts = board.counts;
    for round in 0..counts.slow + 1 {
        let mut measured = Vec::new();
        {
            let (_vm, agent) = stage.parent()?;
            measured.push(("pvmm, booted", grow(&agent)?));
        }
        {
            let socket = stage.dir()?.join("v");
            let (mut vm, agent) = live(&baking.template, socket.clone(), tap(0).as_deref())?;
            vm.settle(SETTLE_MAX);
            let forked = vm.freeze()?;
            measured.push(("pvmm, restored", grow(&agent)?));
            shell(&agent, "rm /dev/shm/new")?;
            drop(agent);
            vm.settle(SETTLE_MAX);
            let reused = vm.freeze()?;
            drop(vm);
            for (name, template) in [("pvmm, forked", forked), ("pvmm, forked, reused", reused)] {
                let child = stage.dir()?.join("v");
                let (_child, agent) = live(&template, child, tap(1).as_deref())?;
                measured.push((name, grow(&agent)?));
            }
        }
        if round > 0 {
            for (name, (took, faults)) in measured {
                board.add(TIME, name, Unit::Millis, took)?;
                board.add(FAULTS, name, Unit::Count, faults)?;
            }
        }
    }
    let (Some(peer), Some(baked)) = (&stage.firecracker, &baking.firecracker) else {
        return Ok(());
    };
    let restored = || {
        let dir = stage.dir()?;
        let _machine = peer.restore(baked, &dir, tap(2).as_deref())?;
        let agent = Agent::connect(&dir.join(SOCKET), deadline())?;
        Ok(timed(|| shell(&agent, WRITE))?.1)
    };
    let acts: Vec<Act> = vec![("firecracker".to_owned(), Box::new(restored))];
    board.interleave(TIME, Unit::Millis, 1, counts.slow, acts)
}

/// Makes the guest write 64 MiB. Returns the milliseconds that the write took, and the page faults
/// of this process for each MiB.
fn grow(agent: &Agent) -> Outcome<(f64, f64)> {
    let (before, ..) = sys::usage();
    let (_, took) = timed(|| shell(agent, WRITE))?;
    let (after, ..) = sys::usage();
    Ok((took, (after - before) as f64 / MIB as f64))
}
