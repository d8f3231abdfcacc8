//! The files that differ between two moments of a VM.
//!
//! Each moment, a checkpoint or the present, is forked into a VM whose workload never runs, and
//! whose agent lists its files; the VM itself is not touched. The forks end with the comparison, or
//! with this process.
//!
//! | file | subject |
//! | --- | --- |
//! | `walk.rs` | the files of a guest |
//! | `compare.rs` | two lists of files, and what differs |
//! | `patch.rs` | the contents of two files: whether they are equal, and the lines that differ |

mod compare;
mod patch;
mod walk;

pub use compare::{ChangeKind, Entry, FileChange, FileDiff};

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;

use crate::control;
use crate::copies::{Copies, RunningVm, StartOptions};
use crate::failure::{self, Failure, FailureKind};
use crate::guest_agent;
use crate::jail;
use crate::overrides::CopyFlags;
use crate::sys::signals;
use crate::vm_dir::{Base, Egress, Record, VmEntry, VmStatus};
use crate::vmm_process::copy::CopySource;

/// How long a comparison may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// When a fork ends at the latest, whatever becomes of the process that made it.
const FORK_TTL: Duration = Duration::from_secs(900);

/// The beginning of what a fork says about its origin. No template has a name with spaces.
const TEMPLATE: &str = "diff of ";

/// Two moments of a VM, and the part of its files that is compared.
#[derive(Clone, Debug)]
pub struct DiffOptions {
    /// The older moment: the name of a checkpoint.
    pub from: String,
    /// The newer moment: the name of a checkpoint, or the present.
    pub to: Option<String>,
    /// The directory to compare; all of the guest by default.
    pub root: PathBuf,
    /// Whether the lines of text files that differ are wanted.
    pub patch: bool,
    /// Whether the processes of the forks are left without a jail.
    pub unjailed: bool,
}

impl DiffOptions {
    /// All files, without the lines that differ.
    pub fn between(from: &str, to: Option<&str>) -> Self {
        let (from, to) = (from.to_owned(), to.map(str::to_owned));
        Self { from, to, root: "/".into(), patch: false, unjailed: false }
    }
}

/// Lists the files that differ between two moments of a VM. A caught interrupt ends it.
pub fn diff(base: &Base, vm: &VmEntry, options: &DiffOptions) -> Result<FileDiff, Failure> {
    discard_dead(base)?;
    let deadline = Instant::now() + PATIENCE;
    let mut old = fork(base, vm, Some(&options.from), options.unjailed)?;
    check(deadline)?;
    let mut new = fork(base, vm, options.to.as_deref(), options.unjailed)?;
    let (old, new) = (agent(&mut old, deadline)?, agent(&mut new, deadline)?);
    let walk = |agent: &Agent| walk::walk(agent, &options.root, deadline);
    let (old_files, new_files) = thread::scope(|scope| {
        let other = scope.spawn(|| walk(&old));
        let mine = walk(&new);
        (other.join().unwrap_or_else(|_| Err(Failure::fault("the comparison failed"))), mine)
    });
    let contents = patch::Contents::new(&old, &new, deadline);
    let mut diff =
        compare::compare(old_files?, new_files?, |path, sizes| contents.equal(path, sizes))?;
    diff.from.clone_from(&options.from);
    diff.to.clone_from(&options.to);
    if options.patch {
        contents.add_patches(&mut diff)?;
    }
    Ok(diff)
}

/// Removes what is left of forks whose maker was killed before their processes had begun.
fn discard_dead(base: &Base) -> Result<(), Failure> {
    let is_dead =
        |vm: &VmEntry| vm.state == VmStatus::Dead && vm.record.template.starts_with(TEMPLATE);
    for vm in base.list()?.iter().filter(|vm| is_dead(vm)) {
        base.discard(vm)?;
    }
    Ok(())
}

/// Refuses to go on after an interrupt or the deadline.
fn check(deadline: Instant) -> Result<(), Failure> {
    if let Some(signal) = signals::caught() {
        return Err(Failure::silent(failure::by_signal(signal)));
    }
    if Instant::now() > deadline {
        let message = "the files took too long to compare";
        return Err(Failure::fault(message).of_kind(FailureKind::Timeout));
    }
    Ok(())
}

/// Starts a VM with the state of a moment, in which nothing runs. It has no network.
fn fork(base: &Base, vm: &VmEntry, at: Option<&str>, unjailed: bool) -> Result<RunningVm, Failure> {
    let machine = control::hand_over_at(vm, at)?;
    let copies = Copies {
        machine: CopySource::Template(&machine),
        like: Record { template: format!("{TEMPLATE}{}", vm.label()), ..vm.record.clone() },
        flags: CopyFlags::default(),
        volumes: Vec::new(),
        makes_taps: true,
        start: StartOptions {
            jailed: !unjailed,
            users: jail::default_users()?,
            ttl: Some(FORK_TTL),
            still: true,
        },
        egress: Egress::default(),
        secrets: None,
        shells: None,
    };
    let started = copies.start(base, vec![None])?.pop();
    started.ok_or_else(|| Failure::fault("no VM was started"))
}

fn agent(fork: &mut RunningVm, deadline: Instant) -> Result<Agent, Failure> {
    fork.wait_ready(None, Some(deadline))?;
    guest_agent::connect(fork.dir(), guest_agent::PATIENCE).map_err(guest_agent::refuse)
}
