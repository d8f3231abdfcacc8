//! Overhead: the memory that a VMM holds in addition to guest memory while the guest is idle.

use std::thread;
use std::time::Duration;

use crate::board::{Board, Outcome, Unit};
use crate::moments::processes;
use crate::stage::Stage;

const REST: Duration = Duration::from_secs(1);

pub fn run(stage: &Stage, board: &mut Board) -> Outcome<()> {
    board.say("what a VMM holds beside its guest's memory");
    for (index, peer) in stage.peers().into_iter().enumerate() {
        let (machine, _) = peer.boot(&stage.spec(index + 1)?)?;
        thread::sleep(REST);
        let pid = machine.process.pid();
        let (_, tables) = processes::private_mib(pid)?;
        let beside = processes::beside_guest_mib(pid)?;
        board.add("VMM beside its guest", peer.name(), Unit::Mib, beside)?;
        board.add("VMM page tables", peer.name(), Unit::Mib, tables)?;
    }
    Ok(())
}
