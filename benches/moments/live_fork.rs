//! Live fork: how long the parent is paused, and the time until all of its children have answered.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use pvmm::agent::Agent;
use pvmm::{Template, trace};

use crate::board::{Board, Failure, Outcome, Unit, durations, millis, timed};
use crate::guest::{TAPS, deadline, shell, tap};
use crate::peers::firecracker::{self, Baked, Firecracker, SOCKET};
use crate::peers::pvmm::live;
use crate::peers::{Machine, Peer};
use crate::stage::{Baking, SETTLE_MAX, Stage};

/// A shell line that rewrites 64 MiB of guest memory, always in one file.
const DIRTY: &str = "yes $RANDOM | head -c 67108864 1<> /dev/shm/dirty";
type Child = (pvmm::Vm, Agent);
type Durations = Vec<(String, f64)>;

const PAUSE: &str = "live fork: parent's pause";
const ANSWERED: &str = "live fork: children answered";
/// A second fork of a parent that has rewritten its 64 MiB since the first fork.
const AGAIN_PAUSE: &str = "live fork again: parent's pause";
const AGAIN_ANSWERED: &str = "live fork again: children answered";

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let peer = match (&stage.firecracker, &baking.firecracker) {
        (Some(peer), Some(baked)) => {
            let dir = stage.dir()?;
            let machine = peer.restore(baked, &dir, tap(TAPS - 1).as_deref())?;
            Some((peer, machine, dir))
        }
        _ => None,
    };
    let counts = board.counts;
    board.say(&format!("live fork: {} rounds of {} children", counts.slow, counts.children));
    let children = counts.children.min(TAPS - 2);
    for round in 0..counts.slow + 1 {
        let mut kept = Vec::new();
        {
            // The parent is itself a fork of a template, as most parents are: only the pages that
            // it has written since are new.
            let socket = stage.dir()?.join("v");
            let (mut vm, _) = live(&baking.template, socket.clone(), tap(0).as_deref())?;
            for moments in [(PAUSE, ANSWERED), (AGAIN_PAUSE, AGAIN_ANSWERED)] {
                // This is a new connection, because a freeze may cut older ones.
                shell(&Agent::connect(&socket, deadline())?, DIRTY)?;
                kept.push((
                    moments,
                    fork(stage, board, &mut vm, children, round > 0 && moments.0 == PAUSE)?,
                ));
            }
        }
        if let Some((peer, _machine, dir)) = &peer {
            // This is a new connection, because a snapshot of Firecracker cuts older ones.
            shell(&Agent::connect(&dir.join(SOCKET), deadline())?, DIRTY)?;
            let took = fork_firecracker(stage, peer, dir, children)?;
            let name = peer.name();
            for ((pause, answered), _) in &kept {
                record(board, round, (pause, answered), name, took)?;
            }
        }
        for (moments, took) in kept {
            record(board, round, moments, "pvmm", took)?;
        }
    }
    Ok(())
}

/// Adds the pause and the time until all children have answered, except in the warm-up round.
fn record(
    board: &mut Board,
    round: usize,
    (pause, answered): (&'static str, &'static str),
    name: &str,
    (paused, all): (f64, f64),
) -> Outcome<()> {
    if round > 0 {
        board.add(pause, name, Unit::Millis, paused)?;
        board.add(answered, name, Unit::Millis, all)?;
    }
    Ok(())
}

/// Forks a running VM. Returns, in milliseconds, its pause and the time until all children have
/// answered.
fn fork(
    stage: &Stage,
    board: &mut Board,
    vm: &mut pvmm::Vm,
    children: usize,
    traced: bool,
) -> Outcome<(f64, f64)> {
    let begun = Instant::now();
    let (template, steps) = trace::record(|| {
        vm.settle(SETTLE_MAX);
        vm.freeze()
    });
    let frozen = millis(begun.elapsed());
    let template = template?;
    let (machines, children_took) =
        timed(|| all(children, |index| child(stage, &template, index + 1)))?;
    let (machines, traces): (Vec<_>, Vec<_>) = machines.into_iter().unzip();
    drop(machines);
    if traced {
        board.trace("a parent's pause", &durations(begun, &steps))?;
        for steps in &traces {
            board.trace("a child of a running machine", steps)?;
        }
    }
    Ok((millis(template.pause()), frozen + children_took))
}

/// Makes a child. Returns the child after it has answered, and the duration of each step.
fn child(stage: &Stage, template: &Template, index: usize) -> Outcome<(Child, Durations)> {
    let (socket, tap) = (stage.place.join(format!("c{index}")), tap(index));
    let begun = Instant::now();
    let (child, steps) = trace::record(|| live(template, socket, tap.as_deref()));
    Ok((child?, durations(begun, &steps)))
}

/// Forks a running VM of Firecracker: pause, full snapshot, resume, and then a process for each
/// child. Returns, in milliseconds, the pause and the time until all children have answered.
fn fork_firecracker(
    stage: &Stage,
    peer: &Firecracker,
    parent: &std::path::Path,
    children: usize,
) -> Outcome<(f64, f64)> {
    let dir = stage.dir()?;
    let dirs = (0..children).map(|_| stage.dir()).collect::<Outcome<Vec<_>>>()?;
    let ((), pause) = timed(|| {
        firecracker::pause(parent)?;
        firecracker::snapshot(parent, &dir)?;
        firecracker::resume(parent)
    })?;
    let baked = Baked { dir: dir.clone(), has_net: tap(0).is_some() };
    let restore = |index: usize| peer.restore(&baked, &dirs[index], tap(index + 1).as_deref());
    let (machines, took): (Vec<Machine>, f64) = timed(|| all(children, restore))?;
    drop(machines);
    std::fs::remove_dir_all(dir)?;
    Ok((pause, pause + took))
}

/// Calls `make` with each number below `count`, on as many threads as there are processors. Returns
/// the made values in no particular order. Fails if a call fails.
fn all<T: Send>(count: usize, make: impl Fn(usize) -> Outcome<T> + Sync) -> Outcome<Vec<T>> {
    let (next, made) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let workers = thread::available_parallelism().map_or(1, usize::from).min(count);
    let work = || -> Outcome<()> {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return Ok(());
            }
            let thing = make(index)?;
            made.lock().map_err(|_| "a worker panicked")?.push(thing);
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, Outcome<()>>| {
            worker.join().unwrap_or_else(|_| Err(Failure::from("a worker panicked")))
        };
        workers.into_iter().try_for_each(join)
    })?;
    made.into_inner().map_err(|_| "a worker panicked".into())
}
