//! In Firecracker's place: from the start of a process, through the API, to the exit status of the
//! first command in a VM that is loaded from two files. Clients do this, so the two programs get
//! the same requests.

use std::thread;
use std::time::Duration;

use crate::board::{Act, Board, Outcome, Unit, timed};
use crate::guest::tap;
use crate::peers::firecracker::{Baked, Firecracker};
use crate::stage::{Baking, Stage};

/// How long the first loaded VM lives: after a second its working set is kept for later ones.
const LEARNING: Duration = Duration::from_secs(3);

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let Some(launcher) = &stage.launcher else {
        return Err("api: PVMM_BIN does not name the command pvmm".into());
    };
    let ours = Firecracker::of_launcher(launcher, &stage.place)?;
    let baked = ours.bake(&stage.spec(0)?, &stage.place.join("two-files"))?;
    let restored = |peer: &Firecracker, baked: &Baked, index: usize| {
        let (dir, tap) = (stage.dir()?, tap(index));
        timed(|| peer.restore(baked, &dir, tap.as_deref()))
    };
    let (first, took) = restored(&ours, &baked, 1)?;
    board.add("api", "pvmm, first load", Unit::Millis, took)?;
    thread::sleep(LEARNING);
    drop(first);
    let mut acts: Vec<Act> =
        vec![("pvmm, later loads".to_owned(), Box::new(|| Ok(restored(&ours, &baked, 1)?.1)))];
    if let (Some(peer), Some(baked)) = (&stage.firecracker, &baking.firecracker) {
        acts.push(("firecracker".to_owned(), Box::new(move || Ok(restored(peer, baked, 2)?.1))));
    }
    let counts = board.counts;
    board.interleave("api", Unit::Millis, counts.warm_ups, counts.quick, acts)
}
