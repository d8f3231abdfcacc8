//! The supervisor of one VM: the small process that starts its monitor process and outlives it.
//!
//! The monitor process is in a jail and is not trusted: it reports through a pipe, and this process
//! writes what other commands read, ends the VM when its launcher is gone before the VM was handed
//! over, and removes what is left. If this process is killed, the kernel ends the monitor process.

use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use pvmm_jailer::confine::{self, Means};
use pvmm_jailer::group::Group;

use super::{Mode, Plan, Report, Reporter, Reports, Start, child};
use crate::egress::EgressProcess;
use crate::failure::{FAULT, Failure, FailureKind};
use crate::jail;
use crate::log_file;
use crate::net_card::TapWish;
use crate::scratch;
use crate::sys::process::{self, Child, Ended, Side};
use crate::sys::{poll, signals};
use crate::vm_dir::{Claim, Ending, Record, Ttl, VmDir, now};

/// How much longer than its time to live a VM's own process may take to end it.
const TTL_GRACE: Duration = Duration::from_secs(2);
/// How often the time to live is looked up.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// The byte that a launcher sends when the VM is to live on without it.
pub const KEEP: u8 = b'k';

/// Runs the supervisor. Never returns: the launcher's own exit path must not run twice.
pub fn run(plan: Plan, claim: &Claim, launcher: PipeWriter, lifeline: PipeReader) -> ! {
    let mut launcher = Reporter { pipe: launcher };
    let ephemeral = matches!(plan.mode, Mode::Foreground);
    let end_at = plan.ttl.map(|ttl| Instant::now() + ttl + TTL_GRACE);
    let record = plan.record.clone();
    match start(plan, claim.dir()) {
        Ok(Started::Supervisor { monitor, group, egress, reports, held }) => {
            let mut supervisor = Supervisor {
                monitor,
                group,
                egress,
                _held: held,
                reports,
                record,
                dir: claim.dir().clone(),
                launcher,
                lifeline: Some(lifeline),
                kept: false,
                last: None,
                end_at,
                ttl: None,
            };
            supervisor.watch();
            supervisor.clean_up(claim, ephemeral);
        }
        Ok(Started::Monitor(start)) => {
            drop((launcher, lifeline));
            child::run(*start)
        }
        Err(failure) => launcher.failed(failure),
    }
    process::leave_now(0)
}

/// The process that [`start`] returns in.
enum Started {
    Supervisor {
        monitor: Child,
        group: Option<Group>,
        egress: Option<Box<EgressProcess>>,
        reports: Reports,
        held: PipeWriter,
    },
    Monitor(Box<child::Begin>),
}

/// Detaches this process from its launcher and forks the monitor process.
fn start(mut plan: Plan, dir: &VmDir) -> Result<Started, Failure> {
    let failed =
        |error: io::Error| Failure::fault(format!("cannot set the supervisor up: {error}"));
    detach(dir).map_err(failed)?;
    let mut scratch = scratch::place()?;
    if plan.jailed {
        scratch.dir = jail::scratch(&scratch.dir, &plan.record)?;
    }
    let run_dir = dir.run();
    if let Some(path) = plan.copy.vsock() {
        dir.show_vsock_at(path)?;
    }
    let around = || jail::around(run_dir.path(), &scratch.dir, plan.copy.vsock(), &plan.record);
    let confinement = plan.jailed.then(around);
    let (reports, reporter) = io::pipe().map_err(failed)?;
    let (supervisor, held) = io::pipe().map_err(failed)?;
    let (group, no_group) = match confinement.as_ref().map(|_| jail::group(&plan.record)) {
        Some(Ok(group)) => (Some(group), None),
        Some(Err(error)) => (None, Some(format!("control group ({error})"))),
        None => (None, None),
    };
    let egress = start_egress(&mut plan, dir, group.as_ref()).inspect_err(|_| {
        group.iter().for_each(Group::remove);
    })?;
    let (side, means) = fork(confinement.is_some(), group.as_ref()).inspect_err(|_| {
        group.iter().for_each(Group::remove);
    })?;
    match side {
        Side::Parent(monitor) => {
            let reports = Reports::new(reports);
            Ok(Started::Supervisor { monitor, group, egress, reports, held })
        }
        Side::Child => {
            drop((reports, held, egress));
            let jail = confinement.map(|confinement| (confinement, means));
            let (reporter, missing) = (Reporter { pipe: reporter }, no_group.into_iter().collect());
            let begin =
                child::Begin { plan, run_dir, scratch, jail, missing, reporter, supervisor };
            Ok(Started::Monitor(Box::new(begin)))
        }
    }
}

/// Starts the egress process of a VM that has a network card without a tap.
fn start_egress(
    plan: &mut Plan,
    dir: &VmDir,
    group: Option<&Group>,
) -> Result<Option<Box<EgressProcess>>, Failure> {
    let mac = match &plan.start {
        Start::Boot(_) => {
            let card = plan.extras.net.as_ref().filter(|card| card.tap == TapWish::Egress);
            card.and_then(|card| card.mac)
        }
        Start::Template(template) => plan.copy.complete(template)?,
    };
    let Some(mac) = mac else { return Ok(None) };
    let (egress, frames) = EgressProcess::start(dir, &plan.record, group, plan.jailed, mac)?;
    plan.frames = Some(frames);
    Ok(Some(Box::new(egress)))
}

/// Forks the monitor process, into namespaces of its own if it is to be in a jail.
fn fork(jailed: bool, group: Option<&Group>) -> Result<(Side, Means), Failure> {
    let failed =
        |error: &dyn std::error::Error| Failure::fault(format!("cannot start the VMM: {error}"));
    if !jailed {
        let side = process::fork().map_err(|error| failed(&error))?;
        return Ok((side, Means::NoNamespace(0)));
    }
    let group = group.map(Group::open).transpose().map_err(|error| failed(&error))?;
    Ok(match confine::fork(group.as_ref().map(AsFd::as_fd)).map_err(|error| failed(&error))? {
        confine::Side::Parent(pid) => (Side::Parent(Child::of(pid)), Means::NoNamespace(0)),
        confine::Side::Child(means) => (Side::Child, means),
    })
}

/// Leaves the launcher's session, files and folder.
fn detach(dir: &VmDir) -> io::Result<()> {
    process::own_session()?;
    process::set_name(c"pvmm-supervisor");
    let null = File::open("/dev/null")?;
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o600);
    let log = options.open(dir.vmm_log())?;
    process::redirect_stdio(&null, &log)?;
    process::close_inherited()?;
    std::env::set_current_dir("/")?;
    crate::logger::start();
    signals::release_all();
    Ok(())
}

/// The VM as its supervisor sees it.
struct Supervisor {
    monitor: Child,
    group: Option<Group>,
    egress: Option<Box<EgressProcess>>,
    /// Closed when this process ends; the monitor process has the other end.
    _held: PipeWriter,
    reports: Reports,
    record: Record,
    dir: VmDir,
    launcher: Reporter,
    /// Readable when the launcher is gone or hands the VM over.
    lifeline: Option<PipeReader>,
    /// The VM lives on without its launcher.
    kept: bool,
    /// The report of the VM's end.
    last: Option<Report>,
    /// When a VM whose monitor process did not end it in time is killed.
    end_at: Option<Instant>,
    /// The time to live that was set last while the VM ran.
    ttl: Option<Ttl>,
}

impl Supervisor {
    /// Passes reports on until the monitor process has ended, or until the launcher is gone.
    fn watch(&mut self) {
        self.record.pid = Some(self.monitor.pid());
        // Without the record only `pvmm kill` cannot find the process, and reports that.
        let _ = self.dir.write_record(&self.record);
        loop {
            let sources = [
                Some(self.reports.as_fd()),
                self.lifeline.as_ref().map(AsFd::as_fd),
                self.egress.as_deref().map(AsFd::as_fd),
            ];
            let left = self.end_at.map(|at| at.saturating_duration_since(Instant::now()));
            let tick = left.map_or(LOOK_EVERY, |left| left.min(LOOK_EVERY));
            let Ok([reported, launcher, network]) = poll::readable_of(sources, Some(tick)) else {
                break;
            };
            self.read_ttl();
            if self.end_at.is_some_and(|at| at <= Instant::now()) {
                let reason = Ending::TTL_PASSED.to_owned();
                self.take(Report::Ended { exit_code: None, reason, hint: None });
                break;
            }
            if reported {
                match self.reports.next() {
                    Ok(Some(report)) => self.take(report),
                    Ok(None) | Err(_) => break,
                }
            }
            if network
                && let Some(egress) = &mut self.egress
                && egress.has_ended()
                && let Err(Failure { code, special: kind, message, hint, .. }) = egress.restart()
            {
                // Nothing passes without the process, and a VM that was given a network has one.
                self.take(Report::Failed { code, kind, message, hint });
                break;
            }
            if launcher && self.launcher_is_gone() {
                break;
            }
        }
        self.monitor.kill();
        if let Some(group) = &self.group {
            // The processes that the monitor process has made end with its PID namespace, too.
            let _ = group.kill();
        }
    }

    /// Looks whether the time to live was changed. The monitor process is told of a change, too,
    /// and this process only makes sure of it, so that a look now and then is enough.
    fn read_ttl(&mut self) {
        let Some(ttl) = self.dir.read_ttl().filter(|ttl| self.ttl != Some(*ttl)) else { return };
        self.ttl = Some(ttl);
        let left = |ends_at: u64| Duration::from_secs(ends_at.saturating_sub(now()));
        self.end_at = ttl.ends_at.map(|ends_at| Instant::now() + left(ends_at) + TTL_GRACE);
    }

    fn launcher_is_gone(&mut self) -> bool {
        let mut byte = [0];
        match self.lifeline.take().map(|mut lifeline| lifeline.read(&mut byte)) {
            Some(Ok(1)) if byte[0] == KEEP => {
                self.kept = true;
                false
            }
            _ => true,
        }
    }

    /// Takes a report of the monitor process, which may say anything.
    fn take(&mut self, report: Report) {
        match &report {
            Report::Ready { taps, .. } => {
                self.record.ready = true;
                self.record.taps.clone_from(taps);
            }
            Report::Paused(paused) => self.record.paused = *paused,
            Report::Failed { .. } | Report::Ended { .. } => self.last = Some(report.clone()),
        }
        if matches!(report, Report::Ready { .. } | Report::Paused(_))
            && let Err(error) = self.dir.write_record(&self.record)
        {
            log::warn!("{error}");
        }
        if !matches!(report, Report::Paused(_)) {
            self.launcher.tell(&report);
        }
    }

    /// Waits for the end of the monitor process and leaves only what other commands need.
    fn clean_up(mut self, claim: &Claim, ephemeral: bool) {
        let ended = self.monitor.wait();
        if let Some(egress) = &mut self.egress {
            egress.end();
        }
        let out_of_memory = self.group.as_ref().is_some_and(Group::ran_out_of_memory);
        self.group.iter().for_each(Group::remove);
        if out_of_memory {
            let message = "the VM used more of the host's memory than its limit (oom)".to_owned();
            let hint = Some("use more --memory, or fewer checkpoints and forks".to_owned());
            let report =
                Report::Failed { code: FAULT, kind: Some(FailureKind::NoMemory), message, hint };
            self.launcher.tell(&report);
            self.last = Some(report);
        } else if self.last.is_none() {
            let message = self.crash(ended);
            self.launcher.tell(&Report::Failed { code: FAULT, kind: None, message, hint: None });
        }
        self.dir.remove_sockets();
        if !self.kept && self.lifeline.is_none() {
            // The launcher is gone; the next command sweeps what cannot be removed.
            let _ = self.dir.remove();
            claim.base().leave();
            return;
        }
        let ending = match self.last {
            Some(Report::Ended { exit_code, reason, .. }) => {
                Ending { exit_code, reason, at: now() }
            }
            Some(Report::Failed { message: reason, .. }) => {
                Ending { exit_code: None, reason, at: now() }
            }
            // A VM without an ending is shown as dead, which it is.
            _ => return,
        };
        if !ephemeral {
            let _ = self.dir.write_ending(&ending);
        }
    }

    /// Describes the end of a process that reported none.
    fn crash(&self, ended: io::Result<Ended>) -> String {
        let how = match ended {
            Ok(Ended::Code(code)) => format!("with code {code}"),
            Ok(Ended::Signal(libc::SIGSYS)) => {
                "because it used a system call that its filter forbids".to_owned()
            }
            Ok(Ended::Signal(signal)) => format!("by signal {signal}"),
            Err(error) => format!("({error})"),
        };
        let said = log_file::tail(&self.dir.vmm_log(), 1);
        if said.is_empty() {
            format!("the VMM process ended {how}")
        } else {
            format!("the VMM process ended {how}: {said}")
        }
    }
}
