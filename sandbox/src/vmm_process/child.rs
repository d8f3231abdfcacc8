//! The main function of the monitor process: makes the VM, waits for its agent, runs the event
//! loop, ends.
//!
//! Everything that the process needs is opened before it enters its jail, where the VM's threads
//! start; every way to end leads through `finish`.

use std::io::{self, PipeReader};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::chown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, Refresh, ShutdownHow};
use pvmm::exec::ExitStatus;
use pvmm::{
    Adoption, Console, ErrorKind, HostOptions, Kvm, Outcome, Overrides, TapSource, Template, Vm,
    VmConfig, Vsock,
};
use pvmm_jailer::confine::{Confinement, Means};

use super::control::{Control, Effect};
use super::main_command::MainCommand;
use super::{Mode, Plan, Report, Reporter, Start, console, control, volume};
use crate::failure::{FAULT, Failure, USAGE};
use crate::jail;
use crate::machine;
use crate::ports::{self, BoundPort};
use crate::scratch::Place;
use crate::seccomp::Filters;
use crate::secrets;
use crate::sys::signals::{self, Signals};
use crate::sys::{poll, process};
use crate::vm_dir::{Ending, RunDir};

/// The time between SIGTERM and SIGKILL for processes in the guest when the VM is shut down.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// How long a guest may take to shut down before it is stopped.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(8);
/// How long the VM's threads and its console may take to finish.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

/// How long a workload stands still at most for a caller that ends the VM next.
pub const STILL_MAX: Duration = Duration::from_secs(300);

/// When a VM begins to share the memory that was copied for its forks, after their first steps.
const ADOPT_AFTER: Duration = Duration::from_millis(250);
/// The time between two such steps. The VM stands still during a step, which takes a millisecond or
/// two.
const ADOPT_EVERY: Duration = Duration::from_millis(20);
const ADOPT_BYTES: u64 = 4 << 20;

/// A kernel that does not load into less memory than this may simply lack memory.
const COMFORT_MIB: u64 = 128;

/// Why the process ends.
enum End {
    /// The guest ended.
    Guest(Outcome),
    /// The main command ended.
    Command(ExitStatus),
    /// A shutdown was requested, and the guest did not end in time.
    Forced,
    /// The time to live has passed.
    Ttl,
    Failed(Failure),
}

/// Everything that the process begins with.
pub struct Begin {
    pub plan: Plan,
    pub run_dir: RunDir,
    pub scratch: Place,
    /// The jail to enter, and the means for it.
    pub jail: Option<(Confinement, Means)>,
    /// Layers that are known to be missing.
    pub missing: Vec<String>,
    pub reporter: Reporter,
    /// The other end is closed when the supervisor ends.
    pub supervisor: PipeReader,
}

/// Runs the monitor process. Never returns: its parent's exit path must not run twice.
pub fn run(begin: Begin) -> ! {
    let Begin { plan, run_dir, scratch, jail, missing, mut reporter, supervisor } = begin;
    let watched = set_up_process(&supervisor).and_then(|signals| {
        let place = Surroundings { run_dir, scratch, jail, missing, supervisor, own_root: false };
        watch(plan, place, &signals, &mut reporter)
    });
    finish(watched.unwrap_or_else(End::Failed), &mut reporter);
    process::leave_now(0)
}

fn set_up_process(supervisor: &PipeReader) -> Result<Signals, Failure> {
    let failed =
        |error: io::Error| Failure::fault(format!("cannot set the VMM process up: {error}"));
    process::die_with_parent(supervisor.as_fd()).map_err(failed)?;
    process::set_name(c"pvmm-vmm");
    Signals::hold(&signals::FORWARDED).map_err(failed)
}

/// The part of the host that the process sees.
struct Surroundings {
    run_dir: RunDir,
    scratch: Place,
    jail: Option<(Confinement, Means)>,
    missing: Vec<String>,
    supervisor: PipeReader,
    /// The process has a root of its own, with other paths.
    own_root: bool,
}

impl Surroundings {
    /// Returns the path at which the process sees the sockets beside `vsock`.
    fn seen(&self, vsock: &Path) -> PathBuf {
        match vsock.file_name() {
            Some(name) if self.own_root => Path::new(jail::SOCKETS).join(name),
            _ => vsock.to_owned(),
        }
    }

    /// Enters the jail, if there is one: from here on the folders have other paths, and nothing
    /// else can be opened. Returns the layers that the jail lacks.
    fn enter_jail(&mut self) -> Result<Vec<String>, Failure> {
        let Some((confinement, means)) = self.jail.take() else { return Ok(Vec::new()) };
        if means != Means::Root {
            // The process keeps its user, so its folder must not belong to the one it would get.
            let (user, group) = process::effective_ids();
            chown(self.run_dir.path(), Some(user), Some(group)).map_err(fault)?;
        }
        let missing = confinement.enter(means).map_err(|error| {
            Failure::fault(format!("jail: {error}"))
                .hint("'pvmm doctor' says what this host lacks; --no-jail goes without")
        })?;
        if !matches!(means, Means::NoNamespace(_)) {
            self.own_root = true;
            self.run_dir = RunDir::at(jail::FOLDER);
            self.scratch.dir = jail::SCRATCH.into();
        }
        // The change of user has cancelled it.
        process::die_with_parent(self.supervisor.as_fd()).map_err(fault)?;
        let lines = missing.iter().map(|it| format!("{} ({})", it.layer, it.why));
        Ok(lines.chain(std::mem::take(&mut self.missing)).collect())
    }
}

/// A VM that has everything open that it needs.
enum Prepared {
    Boot(Kvm, Box<VmConfig>),
    Fork(Arc<Template>, Box<Overrides>),
}

/// Makes the VM, waits until its agent answers, and runs until the first reason to end.
fn watch(
    plan: Plan,
    mut place: Surroundings,
    signals: &Signals,
    reporter: &mut Reporter,
) -> Result<End, Failure> {
    let boot_deadline = Instant::now() + plan.boot_patience;
    let end_at = plan.ttl.map(|ttl| Instant::now() + ttl);
    let boot_patience = plan.boot_patience;
    let memory_mib = plan.record.memory_mib;
    let refuse = |error| boot_failure(error, memory_mib);
    let Plan {
        start, console_copy, mode, ports, extras, copy, record, frames, jailed, still, ..
    } = plan;
    let placeholders = plan.placeholders.as_ref();
    let volumes = &record.volumes;
    let template = match &start {
        Start::Boot(_) => None,
        Start::Template(template) => Some(template.clone()),
    };
    let booted = template.is_none();
    let used_disk = matches!(&start, Start::Boot(parts) if parts.used_disk);

    // Everything is opened, then the jail is closed, then the VM is made.
    let mut images = volumes.iter().map(volume::open).collect::<Result<Vec<_>, _>>()?;
    let prepared = match start {
        Start::Boot(parts) => {
            let mut config = machine::config(*parts, &record, console_copy.is_some());
            let drives = volumes.iter().zip(images.drain(..));
            config.drives.extend(drives.map(|(volume, image)| volume::drive(volume, image)));
            extras.add_to(&mut config);
            if let (Some(frames), Some(card)) = (frames, config.nets.first_mut()) {
                card.tap = TapSource::Socket(frames);
            }
            config.open_files().map_err(refuse)?;
            Prepared::Boot(Kvm::open().map_err(refuse)?, Box::new(config))
        }
        Start::Template(template) => {
            let mut overrides = copy.overrides(&template, frames);
            template.open_files(&mut overrides).map_err(refuse)?;
            Prepared::Fork(template, Box::new(overrides))
        }
    };
    let missing = place.enter_jail()?;
    let dir = &place.run_dir;
    let filters = jailed.then(Filters::of_monitor).transpose().map_err(fault)?;
    let log_filter = filters.as_ref().map(|all| all.log.clone());
    let console = console::start(&dir.console_log(), console_copy.as_ref(), log_filter);
    let console = console.map_err(fault)?;
    let control = Control::bind(&dir.control()).map_err(fault)?;
    let host = |options: &mut HostOptions| {
        options.console = Console::File(console);
        options.scratch_dir = Some(place.scratch.dir.clone());
        options.scratch_in_memory = place.scratch.in_memory;
        options.thread_filters = filters.as_ref().map(|all| all.threads.clone());
    };
    let mut vsock = Vsock::new(copy.cid(), dir.vsock());
    vsock.dial_path = copy.vsock().map(|path| place.seen(path));
    let mut vm = match prepared {
        Prepared::Boot(kvm, mut config) => {
            config.vsock = Some(vsock);
            host(&mut config.host);
            Vm::boot(&kvm, *config)
        }
        Prepared::Fork(template, mut overrides) => {
            overrides.vsock = Some(vsock);
            host(&mut overrides.host);
            // The fork is refreshed below, before it is reported as ready.
            template.fork(*overrides).map(pvmm::Forked::without_refresh)
        }
    }
    .map_err(refuse)?;
    for (place, source) in (machine::SPARE_DRIVE..).zip(images) {
        vm.replace_drive(place, source).map_err(refuse)?;
    }
    let taps = vm.taps().to_vec();
    let listener = vm.take_ready();
    vm.resume().map_err(refuse)?;
    if let Some(filters) = &filters {
        // The VM's threads exist and have filters of their own; threads from here on inherit this.
        filters.owner.install().map_err(fault)?;
    }

    let mut machine = Watched::new(vm, dir, signals, reporter, control);
    machine.end_at = end_at;
    match &listener {
        Some(listener) => match machine.wait_for(Some(listener.as_fd()), Some(boot_deadline)) {
            Event::Readable => listener.wait(boot_deadline).map(drop).map_err(fault)?,
            Event::Late => {
                return Err(Failure::fault(format!(
                    "the guest did not answer within {} s",
                    boot_patience.as_secs()
                ))
                .hint("give it longer with PVMM_BOOT_TIMEOUT=120s, or look at its console with --console FILE"));
            }
            Event::End(end) => return Ok(machine.stop(end)),
        },
        None if booted => return Err(Failure::fault("the VM has no vsock device")),
        // A fork must not be used before its refresh, so a failure here ends it.
        None => {
            let mut refresh = Refresh::new(1).map_err(fault)?;
            if still {
                // Nothing runs in it, and no file may change before somebody looks at it.
                refresh = refresh.without_ids().without_thaw();
            } else {
                refresh = refresh.hostname(record.name.as_deref().unwrap_or(&record.id));
                if let Some(template) = &template {
                    refresh = copy.tell(template, refresh);
                }
                refresh = secrets::tell(placeholders, refresh);
            }
            control::refreshed(&machine.vm, &refresh, boot_deadline).map_err(refuse)?;
        }
    }
    drop((listener, template));
    let card = extras.net.as_ref().filter(|card| booted && card.has_addresses());
    if card.is_some() || used_disk {
        let mut refresh = Refresh::new(0).map_err(fault)?;
        // A guest that has just booted keeps its identity, unless its disk has that of another VM.
        refresh = if used_disk {
            refresh.hostname(record.name.as_deref().unwrap_or(&record.id))
        } else {
            refresh.without_ids()
        };
        if let Some(card) = card {
            refresh = secrets::tell(placeholders, card.tell(refresh));
        }
        control::refreshed(&machine.vm, &refresh, boot_deadline).map_err(refuse)?;
    }

    volume::mount(dir, volumes)?;

    let command = match mode {
        Mode::Detached { command: Some(it) } => Some(MainCommand::start(dir, &it.0, &it.1)?),
        _ => None,
    };
    keep_ports(dir, ports)?;
    machine.reporter.tell(&Report::Ready { taps, missing });
    machine.trim_at = (!booted).then(|| machine.made + pvmm::next_trim(Duration::ZERO));
    let mut watched = command.as_ref();
    let end = loop {
        match machine.wait_for(watched.map(AsFd::as_fd), None) {
            Event::End(end) => break end,
            Event::Readable | Event::Late => match watched.and_then(MainCommand::status) {
                Some(status) => break End::Command(status),
                // The rollback broke the connection to the command, which may still run.
                None if machine.rolled_back => watched = None,
                // The guest itself may have ended, a moment before the VM reports it.
                None => break machine.wait_for_guest(),
            },
        }
    };
    if matches!(end, End::Ttl | End::Command(_)) {
        volume::flush(&dir.vsock(), volumes);
    }
    Ok(machine.stop(end))
}

/// Serves the forwarded ports of a detached VM on a thread that ends with the process.
fn keep_ports(dir: &RunDir, ports: Vec<BoundPort>) -> Result<(), Failure> {
    if ports.is_empty() {
        return Ok(());
    }
    let vsock = dir.vsock();
    let keep = move || {
        let stop = |time| {
            std::thread::sleep(time);
            false
        };
        if let Err(failure) =
            ports::keep(&vsock, || true, &ports, |text| log::warn!("{text}"), stop)
        {
            log::warn!("ports: {}", failure.message);
        }
    };
    std::thread::Builder::new().name("ports".to_owned()).spawn(keep).map(drop).map_err(fault)
}

fn fault(error: impl std::error::Error) -> Failure {
    let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
    Failure::fault(format!("{error}{cause}"))
}

fn boot_failure(error: pvmm::Error, memory_mib: u64) -> Failure {
    let code = if error.kind() == ErrorKind::InvalidConfig { USAGE } else { FAULT };
    let failure = Failure { code, ..Failure::fault(format!("{error:#}")) };
    match error.kind() {
        ErrorKind::HostUnsupported => failure.hint("'pvmm doctor' says what this host lacks"),
        ErrorKind::InvalidConfig if failure.message.starts_with("network card") => {
            failure.hint("use another with --net tap=NAME, or one that is made with --net tap=auto")
        }
        ErrorKind::HostResource => failure.hint("free some memory or files, or use less --memory"),
        ErrorKind::InvalidConfig if memory_mib < COMFORT_MIB => {
            failure.hint(format!("{memory_mib} MiB may be too little: try --memory {COMFORT_MIB}M"))
        }
        _ => failure,
    }
}

/// The reason why a wait ended.
enum Event {
    /// The caller's file descriptor is readable.
    Readable,
    /// The caller's deadline has passed.
    Late,
    End(End),
}

/// A running VM and everything that can end it.
struct Watched<'a> {
    vm: Vm,
    dir: &'a RunDir,
    signals: &'a Signals,
    reporter: &'a mut Reporter,
    control: Control,
    /// When the guest is stopped by force; set when a shutdown begins.
    stop_at: Option<Instant>,
    /// When the time to live has passed.
    end_at: Option<Instant>,
    made: Instant,
    trim_at: Option<Instant>,
    /// Memory to share with the last forks, and when to go on with that.
    adoption: Option<(Adoption, Instant)>,
    /// Who has asked that the workload stands still, and when it goes on at the latest.
    still: Option<(UnixStream, Instant)>,
    rolled_back: bool,
}

impl<'a> Watched<'a> {
    fn new(
        vm: Vm,
        dir: &'a RunDir,
        signals: &'a Signals,
        reporter: &'a mut Reporter,
        control: Control,
    ) -> Self {
        let (made, stop_at, trim_at, rolled_back) = (Instant::now(), None, None, false);
        Self {
            vm,
            dir,
            signals,
            reporter,
            control,
            stop_at,
            end_at: None,
            made,
            trim_at,
            adoption: None,
            still: None,
            rolled_back,
        }
    }

    /// Runs the event loop until `own` is readable, `deadline` passes, or the VM must end.
    fn wait_for(&mut self, own: Option<BorrowedFd<'_>>, deadline: Option<Instant>) -> Event {
        loop {
            let thaw_at = self.still.as_ref().map(|(_, at)| *at);
            let adopt_at = self.adoption.as_ref().map(|(_, at)| *at);
            let all = [deadline, self.stop_at, self.end_at, self.trim_at, thaw_at, adopt_at];
            let until = all.into_iter().flatten().min();
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            let sources = [
                Some(self.vm.outcome_fd()),
                own,
                Some(self.signals.as_fd()),
                Some(self.control.as_fd()),
                self.still.as_ref().map(|(client, _)| client.as_fd()),
            ];
            let [outcome, own_ready, signal, asked, client_gone] =
                match poll::readable_of(sources, left) {
                    Ok(ready) => ready,
                    Err(error) => return Event::End(End::Failed(fault(error))),
                };
            if outcome {
                return Event::End(self.wait_for_guest());
            }
            // Looked at before the next request, which may ask for a standstill of its own.
            if client_gone {
                self.thaw();
            }
            if asked {
                match self.control.serve(&mut self.vm) {
                    Effect::None => {}
                    Effect::RolledBack => self.rolled_back = true,
                    Effect::Paused(paused) => self.reporter.tell(&Report::Paused(paused)),
                    Effect::Still(client) => {
                        self.still = client.map(|client| (client, Instant::now() + STILL_MAX));
                    }
                    Effect::Thawed => self.still = None,
                    Effect::Frozen(adoption) => {
                        self.adoption = Some((adoption, Instant::now() + ADOPT_AFTER));
                    }
                    Effect::Ttl(ttl) => self.end_at = ttl.map(|ttl| Instant::now() + ttl),
                }
            }
            if own_ready {
                return Event::Readable;
            }
            if signal {
                if self.stop_at.is_some() {
                    return Event::End(End::Forced);
                }
                self.shut_down();
            }
            let now = Instant::now();
            if self.trim_at.is_some_and(|at| at <= now) {
                self.trim_at = Some(self.made + pvmm::next_trim(now - self.made));
                match self.vm.trim() {
                    Ok(bytes) => log::info!("gave {} KiB back", bytes >> 10),
                    Err(error) => log::warn!("trim: {error:#}"),
                }
                process::trim_heap();
            }
            if adopt_at.is_some_and(|at| at <= now) {
                self.adopt();
            }
            if self.still.as_ref().is_some_and(|(_, at)| *at <= now) {
                self.thaw();
            }
            if self.end_at.is_some_and(|at| at <= now) {
                return Event::End(End::Ttl);
            }
            if self.stop_at.is_some_and(|at| at <= now) {
                return Event::End(End::Forced);
            }
            if deadline.is_some_and(|at| at <= now) {
                return Event::Late;
            }
        }
    }

    /// Lets the workload go on, because whoever asked that it stands still is gone or too slow.
    fn thaw(&mut self) {
        self.still = None;
        if let Err(error) = control::thaw(&self.vm) {
            log::warn!("thaw: {error:#}");
        }
    }

    /// Shares some more memory with the last forks.
    fn adopt(&mut self) {
        let Some((mut adoption, _)) = self.adoption.take() else { return };
        match self.vm.adopt(&mut adoption, ADOPT_BYTES) {
            Ok(true) => self.adoption = Some((adoption, Instant::now() + ADOPT_EVERY)),
            Ok(false) => {}
            Err(error) => log::warn!("sharing memory with forks: {error:#}"),
        }
    }

    /// Asks the guest to power off, in the background, and sets the time after which it is stopped.
    fn shut_down(&mut self) {
        // The signal is consumed, so that a second one is noticed.
        let _ = self.signals.next();
        self.stop_at = Some(Instant::now() + SHUTDOWN_PATIENCE);
        // A paused guest cannot shut down; one that cannot be resumed is stopped at `stop_at`.
        let _ = self.vm.resume();
        let socket = self.dir.vsock();
        let ask = move || {
            let agent = Agent::connect(&socket, Instant::now() + SHUTDOWN_GRACE)?;
            agent.shutdown(ShutdownHow::Poweroff, Some(SHUTDOWN_GRACE))
        };
        let thread = std::thread::Builder::new().name("shutdown".to_owned());
        // A guest that cannot be asked is stopped at `stop_at`.
        let _ = thread.spawn(move || ask().inspect_err(|error| log::warn!("shutdown: {error}")));
    }

    fn wait_for_guest(&self) -> End {
        self.vm.wait(Some(STOP_PATIENCE)).map_or(End::Forced, End::Guest)
    }

    /// Ends the VM's threads, so that the console's last output is kept; waits at most
    /// `STOP_PATIENCE`.
    fn stop(self, end: End) -> End {
        let (done, stopped) = mpsc::channel();
        let vm = self.vm;
        let thread = std::thread::Builder::new().name("stop".to_owned());
        let stopping = thread.spawn(move || {
            drop(vm);
            let _ = done.send(());
        });
        if stopping.is_ok() {
            let _ = stopped.recv_timeout(STOP_PATIENCE);
        }
        end
    }
}

/// Reports the end to the supervisor.
fn finish(end: End, reporter: &mut Reporter) {
    let hint = hint_for(&end);
    let (exit_code, reason) = match end {
        End::Guest(outcome) => (None, describe(&outcome)),
        End::Command(status) => (Some(status.shell_code()), "the command ended".to_owned()),
        End::Ttl => (None, Ending::TTL_PASSED.to_owned()),
        End::Forced => (None, "it was told to end and did not in time".to_owned()),
        End::Failed(failure) => return reporter.failed(failure),
    };
    reporter.tell(&Report::Ended { exit_code, reason, hint });
}

/// Returns what to try when the end was not the guest's own decision.
fn hint_for(end: &End) -> Option<String> {
    let End::Guest(outcome) = end else { return None };
    let hint = match outcome {
        Outcome::Poweroff | Outcome::Reboot => return None,
        Outcome::TripleFault => "the kernel may have too little --memory, or not be made for VMs",
        _ => "'pvmm doctor' says whether this host can run guests",
    };
    Some(hint.to_owned())
}

fn describe(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Poweroff => Ending::POWEROFF.to_owned(),
        Outcome::Reboot => Ending::REBOOT.to_owned(),
        Outcome::TripleFault => Ending::TRIPLE_FAULT.to_owned(),
        Outcome::InternalError { suberror } => {
            format!("KVM could not go on with the guest (internal error {suberror})")
        }
        Outcome::EntryFailed { reason } => {
            format!("the processor refused the guest's state (reason {reason:#x})")
        }
        Outcome::MemoryLost => {
            "the page server that supplied the guest's memory is gone".to_owned()
        }
        Outcome::Broken { why } => format!("the machine broke and was ended ({why})"),
        Outcome::UnexpectedExit { exit } => format!("KVM stopped the guest ({exit})"),
    }
}
