//! pvmm in a process that holds one VM, as a launcher without a pool would run it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, Refresh};
use pvmm::snapshot::LoadOptions;
use pvmm::trace::{self, Step};
use pvmm::{Kvm, Overrides, Template, Vm, Vsock, next_trim};
use serde::{Deserialize, Serialize};

use super::{Machine, Peer, Process, Way};
use crate::board::Outcome;
use crate::guest::{self, Spec, deadline, exec_true};
use crate::sys;

/// The argument that makes this program a process that holds one VM.
pub const VERB: &str = "vmm";

/// The job of a process that holds one VM.
#[derive(Serialize, Deserialize)]
pub enum Job {
    Boot(Spec),
    Restore { snapshot: PathBuf, socket: PathBuf, tap: Option<String> },
}

/// The report that the process writes after its guest has answered and after it has told the
/// caller.
#[derive(Serialize, Deserialize)]
pub struct Report {
    /// When [`work`] began, in nanoseconds of the clock that all processes share.
    pub began_ns: u64,
    /// Each step, and when it was done, by the clock of `began_ns`.
    pub steps: Vec<(String, u64)>,
    pub minor_faults: i64,
    pub major_faults: i64,
    pub system_ms: f64,
    pub user_ms: f64,
}

/// Runs a process that holds one VM: boots or restores the VM, tells the caller, writes the report,
/// and ends when standard input ends.
pub fn work(job: &str) -> Outcome<()> {
    let began = (Instant::now(), sys::monotonic_ns());
    let job: Job = serde_json::from_str(job)?;
    let copied = matches!(job, Job::Restore { .. });
    let (vm, steps) = trace::record(|| match job {
        Job::Boot(spec) => boot(&spec),
        Job::Restore { snapshot, socket, tap } => restore(&snapshot, socket, tap.as_deref()),
    });
    let mut vm = vm?;
    // The measured time ends here, for the guest has answered. The report is only for the
    // benchmark.
    std::io::stdout().write_all(b"\n")?;
    report(began, steps)?;
    // The VM of a restore is trimmed as the launcher trims it.
    let (stdin, made) = (sys::stdin(), Instant::now());
    let mut at = next_trim(Duration::ZERO);
    while copied && !sys::is_readable_within(&stdin, at.saturating_sub(made.elapsed()))? {
        vm.trim()?;
        at = next_trim(at);
    }
    File::from(stdin.try_clone_to_owned()?).read_to_end(&mut Vec::new())?;
    drop(vm);
    Ok(())
}

fn report(began: (Instant, u64), steps: Vec<Step>) -> Outcome<()> {
    let at = |step: &Step| began.1 + step.done.duration_since(began.0).as_nanos() as u64;
    let (minor_faults, major_faults, system, user) = sys::usage();
    let report = Report {
        began_ns: began.1,
        steps: steps.iter().map(|step| (step.name.to_owned(), at(step))).collect(),
        minor_faults,
        major_faults,
        system_ms: crate::board::millis(system),
        user_ms: crate::board::millis(user),
    };
    let mut line = serde_json::to_vec(&report)?;
    line.push(b'\n');
    std::io::stdout().write_all(&line)?;
    Ok(())
}

fn boot(spec: &Spec) -> Outcome<Vm> {
    let mut vm = Vm::boot(&Kvm::open()?, spec.config())?;
    vm.resume()?;
    let agent = vm.agent(deadline())?;
    exec_true(&agent)?;
    Ok(vm)
}

fn restore(snapshot: &Path, socket: PathBuf, tap: Option<&str>) -> Outcome<Vm> {
    let template = Template::load(&Kvm::open()?, snapshot, LoadOptions::default())?;
    let (vm, _agent) = live(&template, socket, tap)?;
    Ok(vm)
}

/// Makes a VM from a template and waits for its first exec: everything that is called "create".
/// Returns the VM and a connection to its agent.
pub fn live(template: &Template, socket: PathBuf, tap: Option<&str>) -> Outcome<(Vm, Agent)> {
    let mut vm = template.fork(overrides(socket.clone(), tap))?.without_refresh();
    let agent = answer(&mut vm, &socket)?;
    Ok((vm, agent))
}

/// Resumes a paused VM, refreshes it and runs its first command. Returns a connection to its agent.
pub fn answer(vm: &mut Vm, socket: &Path) -> Outcome<Agent> {
    vm.resume()?;
    let agent = Agent::connect_refreshed(socket, &Refresh::new(1)?, deadline())?;
    exec_true(&agent)?;
    trace::step("exec /bin/true");
    Ok(agent)
}

pub fn overrides(socket: PathBuf, tap: Option<&str>) -> Overrides {
    Overrides {
        vsock: Some(Vsock::new(3, socket)),
        nets: tap.map(|tap| (0, guest::net(tap))).into_iter().collect(),
        ..Default::default()
    }
}

/// Starts a process with `job`. Returns it after its guest has answered, with the time of the
/// answer and the report. Fails if the process ends before its guest has answered.
pub fn start(program: &Path, job: &Job) -> Outcome<(Process, u64, Report)> {
    let mut command = Command::new(program);
    command.arg(VERB).arg(serde_json::to_string(job)?);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut process = Process(child);
    let mut line = String::new();
    let mut stdout = BufReader::new(process.0.stdout.take().ok_or("no stdout")?);
    stdout.read_line(&mut line)?;
    let answered = sys::monotonic_ns();
    line.clear();
    stdout.read_line(&mut line)?;
    let report = serde_json::from_str(&line).map_err(|_| "the process ended before its guest")?;
    Ok((process, answered, report))
}

pub struct Pvmm {
    /// This program, on tmpfs.
    pub program: PathBuf,
}

impl Peer for Pvmm {
    fn name(&self) -> &'static str {
        "pvmm"
    }

    fn boot(&self, spec: &Spec) -> Outcome<(Machine, f64)> {
        let begun = sys::monotonic_ns();
        let (process, answered, _) = start(&self.program, &Job::Boot(spec.clone()))?;
        let took = (answered - begun) as f64 / 1e6;
        let agent = Agent::connect(&spec.socket(), deadline())?;
        Ok((Machine { process, agent, way: Way::Unix(spec.socket()) }, took))
    }
}
