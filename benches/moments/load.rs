//! Load: from the request to a VM whose next call is `KVM_RUN`, in a process that runs already.

use std::cell::RefCell;
use std::time::Instant;

use pvmm::snapshot::LoadOptions;
use pvmm::{Template, trace};

use crate::board::{Act, Board, Outcome, Unit, durations, millis, timed};
use crate::guest::tap;
use crate::peers::firecracker;
use crate::peers::pvmm::overrides;
use crate::stage::{Baking, Stage};

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let traces = RefCell::new(Vec::new());
    let folder = || {
        let (socket, tap) = (stage.dir()?.join("v"), tap(1));
        let begun = Instant::now();
        let (made, steps) = trace::record(|| -> Outcome<_> {
            let template = Template::load(&stage.kvm, &baking.snapshot, LoadOptions::default())?;
            let vm = template.fork(overrides(socket, tap.as_deref()))?;
            Ok((template, vm))
        });
        let took = millis(begun.elapsed());
        let _made = made?;
        traces.borrow_mut().push(("load from a folder", durations(begun, &steps)));
        Ok(took)
    };
    let held = || {
        let (socket, tap) = (stage.dir()?.join("v"), tap(2));
        let begun = Instant::now();
        let (vm, steps) = trace::record(|| baking.template.fork(overrides(socket, tap.as_deref())));
        let took = millis(begun.elapsed());
        let _vm = vm?;
        traces.borrow_mut().push(("load of a held template", durations(begun, &steps)));
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
    let moment = "load → ready for KVM_RUN";
    board.interleave(moment, Unit::Millis, counts.warm_ups, counts.quick, acts)?;
    // The traces of the warm-up rounds come first, two for each round.
    for (title, steps) in traces.into_inner().into_iter().skip(2 * counts.warm_ups) {
        board.trace(title, &steps)?;
    }
    Ok(())
}
