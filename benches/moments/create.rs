//! Create: from the caller's request to the exit status of the first command, and each step
//! between.

use std::cell::RefCell;
use std::time::Instant;

use pvmm::trace;

use crate::board::{Act, Board, Outcome, Unit, durations, millis, timed};
use crate::guest::tap;
use crate::peers::pvmm::{Job, live, start};
use crate::stage::{Baking, Stage};
use crate::sys;

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let traces = RefCell::new(Vec::new());
    let process = || {
        let (dir, tap) = (stage.dir()?, tap(1));
        let snapshot = baking.snapshot.clone();
        let job = Job::Restore { snapshot, socket: dir.join("v"), tap };
        let begun = sys::monotonic_ns();
        let (_process, ended, report) = start(&stage.pvmm.program, &job)?;
        let mut steps = vec![("process start".to_owned(), begun, report.began_ns)];
        let mut from = report.began_ns;
        for (name, done) in report.steps {
            steps.push((name, from, done));
            from = done;
        }
        steps.push(("word to the caller".to_owned(), from, ended));
        let ms = |ns: u64| ns as f64 / 1e6;
        let mut steps: Vec<_> = steps.into_iter().map(|(n, a, b)| (n, ms(b - a))).collect();
        steps.push(("(minor faults of the process)".to_owned(), report.minor_faults as f64));
        steps.push(("(major faults of the process)".to_owned(), report.major_faults as f64));
        steps.push(("(CPU time in the kernel)".to_owned(), report.system_ms));
        steps.push(("(CPU time outside it)".to_owned(), report.user_ms));
        traces.borrow_mut().push(("create in a new process", steps));
        Ok(ms(ended - begun))
    };
    let held = || {
        let (socket, tap) = (stage.dir()?.join("v"), tap(2));
        let begun = Instant::now();
        let (live, steps) = trace::record(|| live(&baking.template, socket, tap.as_deref()));
        let took = millis(begun.elapsed());
        let _live = live?;
        traces.borrow_mut().push(("create from a held template", durations(begun, &steps)));
        Ok(took)
    };
    let mut acts: Vec<Act> = vec![
        ("pvmm, new process".to_owned(), Box::new(process)),
        ("pvmm, held template".to_owned(), Box::new(held)),
    ];
    if let (Some(peer), Some(baked)) = (&stage.firecracker, &baking.firecracker) {
        let restore = || {
            let (dir, tap) = (stage.dir()?, tap(3));
            let (_machine, took) = timed(|| peer.restore(baked, &dir, tap.as_deref()))?;
            Ok(took)
        };
        acts.push(("firecracker".to_owned(), Box::new(restore)));
    }
    let counts = board.counts;
    board.interleave("create", Unit::Millis, counts.warm_ups, counts.quick, acts)?;
    // The traces of the warm-up rounds come first, two for each round.
    for (title, steps) in traces.into_inner().into_iter().skip(2 * counts.warm_ups) {
        board.trace(title, &steps)?;
    }
    Ok(())
}
