//! Boot: from the start of the process to the answer of the first command. All contenders have one
//! kernel and one image.

use crate::board::{Act, Board, Outcome, Unit};
use crate::stage::Stage;

pub fn run(stage: &Stage, board: &mut Board) -> Outcome<()> {
    let mut acts: Vec<Act> = Vec::new();
    for (index, peer) in stage.peers().into_iter().enumerate() {
        let boot = move || {
            let (_machine, took) = peer.boot(&stage.spec(index + 1)?)?;
            Ok(took)
        };
        acts.push((peer.name().to_owned(), Box::new(boot)));
    }
    let counts = board.counts;
    board.interleave("boot → first exec", Unit::Millis, 1, counts.slow, acts)
}
