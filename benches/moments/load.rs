//! Load: from the request to a machine whose next call is `KVM_RUN`. The process is there already.

use pvmm::Template;
use pvmm::snapshot::LoadOptions;

use crate::board::{Act, Board, Outcome, Unit, timed};
use crate::guest::tap;
use crate::peers::firecracker;
use crate::peers::pvmm::overrides;
use crate::stage::{Baking, Stage};

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let folder = || {
        let (socket, tap) = (stage.dir()?.join("v"), tap(1));
        let (_vm, took) = timed(|| {
            let template = Template::load(&baking.snapshot, LoadOptions::default())?;
            Ok(template.fork(overrides(socket, tap.as_deref()))?)
        })?;
        Ok(took)
    };
    let held = || {
        let (socket, tap) = (stage.dir()?.join("v"), tap(2));
        let (_vm, took) = timed(|| Ok(baking.template.fork(overrides(socket, tap.as_deref()))?))?;
        Ok(took)
    };
    let mut acts: Vec<Act> = vec![
        ("pvmm, from its folder".to_owned(), Box::new(folder)),
        ("pvmm, held template".to_owned(), Box::new(held)),
    ];
    if let (Some(peer), Some(baked)) = (&stage.firecracker, &baking.firecracker) {
        let load = || {
            let (dir, tap) = (stage.dir()?, tap(3));
            let _process = peer.idle(&dir)?;
            let ((), took) = timed(|| firecracker::load(baked, &dir, tap.as_deref(), false))?;
            Ok(took)
        };
        acts.push(("firecracker".to_owned(), Box::new(load)));
    }
    let counts = board.counts;
    board.interleave("load → ready for KVM_RUN", Unit::Millis, counts.warm_ups, counts.quick, acts)
}
