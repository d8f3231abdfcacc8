//! Exec: the round trip of a command in a warm guest, which is fork, exec and exit of `/bin/true`.

use crate::board::{Act, Board, Outcome, Unit, timed};
use crate::guest::exec_true;
use crate::stage::Stage;

pub fn run(stage: &Stage, board: &mut Board) -> Outcome<()> {
    let mut machines = Vec::new();
    for (index, peer) in stage.peers().into_iter().enumerate() {
        machines.push((peer.name(), peer.boot(&stage.spec(index + 1)?)?.0));
    }
    let mut acts: Vec<Act> = Vec::new();
    for (name, machine) in &machines {
        let exec = || Ok(timed(|| exec_true(&machine.agent))?.1);
        acts.push(((*name).to_owned(), Box::new(exec)));
    }
    let counts = board.counts;
    let rounds = counts.quick * 3;
    board.interleave("warm exec of /bin/true", Unit::Millis, counts.warm_ups + 2, rounds, acts)
}
