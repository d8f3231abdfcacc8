//! The main function of the monitor process: makes the VM, waits for its agent, runs the event
//! loop, ends.
//!
//! Everything that the process needs is opened before the VM's threads start, and every way to end
//! leads through `finish`.

use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, Refresh, ShutdownHow};
use pvmm::exec::ExitStatus;
use pvmm::{Console, ErrorKind, HostOptions, Kvm, Outcome, Overrides, Vm, Vsock};

use super::control::{Control, Effect};
use super::main_command::MainCommand;
use super::{Mode, Plan, Report, Reporter, Start, console, control};
use crate::exit::{FAULT, Failure, USAGE};
use crate::machine;
use crate::overrides::GUEST_CID;
use crate::ports::{self, BoundPort};
use crate::scratch;
use crate::sys::signals::{self, Signals};
use crate::sys::{poll, process};
use crate::vm_dir::{Base, Claim, Ending, Record, VmDir, now};

/// The time between SIGTERM and SIGKILL for processes in the guest when the VM is shut down.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// How long a guest may take to shut down before it is stopped.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(8);
/// How long the VM's threads and its console may take to finish.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

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
    /// The launcher is gone, and the VM ends with it.
    Orphaned,
    Failed(Failure),
}

/// Runs the monitor process. Never returns: the launcher's own exit path must not run twice.
pub fn run(
    plan: Plan,
    claim: &Claim,
    reporter: PipeWriter,
    lifeline: Option<PipeReader>,
    parent: u32,
) -> ! {
    let mut reporter = Reporter { pipe: reporter };
    let foreground = matches!(plan.mode, Mode::Foreground);
    let mut record = plan.record.clone();
    let dir = claim.dir().clone();
    let watched = set_up_process(&dir, foreground.then_some(parent)).and_then(|signals| {
        let lifeline = lifeline.filter(|_| foreground);
        watch(plan, &dir, &mut record, &signals, lifeline, &mut reporter)
    });
    let end = watched.unwrap_or_else(End::Failed);
    finish(end, &dir, claim.base(), foreground, &mut reporter);
    process::leave_now(0)
}

/// Detaches the process from its parent: no terminal, no inherited files, its own log.
fn set_up_process(dir: &VmDir, parent: Option<u32>) -> Result<Signals, Failure> {
    let failed =
        |error: io::Error| Failure::fault(format!("cannot set the VMM process up: {error}"));
    if let Some(parent) = parent {
        process::die_with_parent(parent).map_err(failed)?;
    }
    process::own_session().map_err(failed)?;
    process::set_name(c"pvmm-vmm");
    let null = File::open("/dev/null").map_err(failed)?;
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o600);
    let log = options.open(dir.vmm_log()).map_err(failed)?;
    process::redirect_stdio(&null, &log).map_err(failed)?;
    process::close_inherited().map_err(failed)?;
    std::env::set_current_dir("/").map_err(failed)?;
    crate::logger::start();
    signals::release_all();
    Signals::hold(&signals::FORWARDED).map_err(failed)
}

/// Makes the VM, waits until its agent answers, and runs until the first reason to end.
fn watch(
    plan: Plan,
    dir: &VmDir,
    record: &mut Record,
    signals: &Signals,
    lifeline: Option<PipeReader>,
    reporter: &mut Reporter,
) -> Result<End, Failure> {
    let boot_deadline = Instant::now() + plan.boot_patience;
    // Quiet: the launcher has already warned if the scratch folder is in memory.
    let scratch = scratch::place(true)?;
    let console = console::start(&dir.console_log(), plan.console_copy.as_ref()).map_err(fault)?;
    let control = Control::bind(&dir.control()).map_err(fault)?;
    let boot_patience = plan.boot_patience;
    record.pid = Some(std::process::id());
    // Without the record only `pvmm kill` cannot find the process, and reports that.
    let _ = dir.write_record(record);
    let memory_mib = record.memory_mib;
    let refuse = |error| boot_failure(error, memory_mib);
    let Plan { start, console_copy, mode, ports, extras, copy, .. } = plan;
    let template = match &start {
        Start::Boot(_) => None,
        Start::Template(template) => Some(template.clone()),
    };
    let booted = template.is_none();
    let mut vm = match start {
        Start::Boot(parts) => {
            let mut config = machine::config(*parts, record, console_copy.is_some());
            extras.add_to(&mut config);
            config.vsock = Some(Vsock::new(GUEST_CID, dir.vsock()));
            config.host.console = Console::File(console);
            config.host.scratch_dir = Some(scratch.dir);
            config.host.scratch_in_memory = scratch.in_memory;
            Kvm::open().and_then(|kvm| Vm::boot(&kvm, config))
        }
        Start::Template(template) => {
            if let Some(path) = copy.vsock() {
                // Where other commands look for the socket.
                symlink(path, dir.vsock()).map_err(fault)?;
            }
            let overrides = Overrides {
                host: HostOptions {
                    console: Console::File(console),
                    scratch_dir: Some(scratch.dir),
                    scratch_in_memory: scratch.in_memory,
                    ..HostOptions::default()
                },
                ..copy.overrides(&template, dir.vsock())
            };
            // The fork is refreshed below, before it is reported as ready.
            template.fork(overrides).map(pvmm::Forked::without_refresh)
        }
    }
    .map_err(refuse)?;
    record.taps = vm.taps().to_vec();
    let listener = vm.take_ready();
    vm.resume().map_err(refuse)?;
    if lifeline.is_some() {
        // From here on the lifeline pipe shows the launcher's end, which leaves time to clean up.
        process::outlive_parent().map_err(fault)?;
    }

    let mut machine = Watched::new(vm, dir, signals, lifeline, control);
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
            let hostname = record.name.as_deref().unwrap_or(&record.id);
            let mut refresh = Refresh::new(1).map_err(fault)?.hostname(hostname);
            if let Some(template) = &template {
                refresh = copy.tell(template, refresh);
            }
            control::refreshed(&machine.vm, &refresh, boot_deadline).map_err(refuse)?;
        }
    }
    drop((listener, template));
    if let Some(card) = extras.net.as_ref().filter(|card| booted && card.has_addresses()) {
        // The guest has just booted and keeps its identity; only its addresses are set.
        let refresh = card.tell(Refresh::new(0).map_err(fault)?.without_ids());
        control::refreshed(&machine.vm, &refresh, boot_deadline).map_err(refuse)?;
    }

    let command = match mode {
        Mode::Detached { command: Some(it) } => Some(MainCommand::start(dir, &it.0, &it.1)?),
        _ => None,
    };
    keep_ports(dir, ports)?;
    record.ready = true;
    dir.write_record(record)?;
    reporter.tell(&Report::Ready);
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
    Ok(machine.stop(end))
}

/// Serves the forwarded ports of a detached VM on a thread that ends with the process.
fn keep_ports(dir: &VmDir, ports: Vec<BoundPort>) -> Result<(), Failure> {
    if ports.is_empty() {
        return Ok(());
    }
    let dir = dir.clone();
    let keep = move || {
        let stop = |time| {
            std::thread::sleep(time);
            false
        };
        if let Err(failure) = ports::keep(&dir, &ports, |text| log::warn!("{text}"), stop) {
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
    dir: &'a VmDir,
    signals: &'a Signals,
    lifeline: Option<PipeReader>,
    control: Control,
    /// When the guest is stopped by force; set when a shutdown begins.
    stop_at: Option<Instant>,
    made: Instant,
    trim_at: Option<Instant>,
    rolled_back: bool,
}

impl<'a> Watched<'a> {
    fn new(
        vm: Vm,
        dir: &'a VmDir,
        signals: &'a Signals,
        lifeline: Option<PipeReader>,
        control: Control,
    ) -> Self {
        let (made, stop_at, trim_at, rolled_back) = (Instant::now(), None, None, false);
        Self { vm, dir, signals, lifeline, control, stop_at, made, trim_at, rolled_back }
    }

    /// Runs the event loop until `own` is readable, `deadline` passes, or the VM must end.
    fn wait_for(&mut self, own: Option<BorrowedFd<'_>>, deadline: Option<Instant>) -> Event {
        loop {
            let until = [deadline, self.stop_at, self.trim_at].into_iter().flatten().min();
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            let lifeline = self.lifeline.as_ref().map(AsFd::as_fd);
            let sources = [
                Some(self.vm.outcome_fd()),
                lifeline,
                own,
                Some(self.signals.as_fd()),
                Some(self.control.as_fd()),
            ];
            let [outcome, orphaned, own_ready, signal, asked] =
                match poll::readable_of(sources, left) {
                    Ok(ready) => ready,
                    Err(error) => return Event::End(End::Failed(fault(error))),
                };
            if outcome {
                return Event::End(self.wait_for_guest());
            }
            if orphaned {
                return Event::End(End::Orphaned);
            }
            if asked {
                match self.control.serve(&mut self.vm) {
                    Effect::None => {}
                    Effect::RolledBack => self.rolled_back = true,
                    Effect::Paused(paused) => self.note_paused(paused),
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
            if self.stop_at.is_some_and(|at| at <= now) {
                return Event::End(End::Forced);
            }
            if deadline.is_some_and(|at| at <= now) {
                return Event::Late;
            }
        }
    }

    /// Writes the paused state to the record, where other commands read it.
    fn note_paused(&self, paused: bool) {
        if let Some(mut record) = self.dir.read_record() {
            record.paused = paused;
            // If this fails, `pvmm ps` shows the VM as running.
            let _ = self.dir.write_record(&record);
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

/// Reports the end to the launcher and leaves only the files that other commands need.
fn finish(end: End, dir: &VmDir, base: &Base, foreground: bool, reporter: &mut Reporter) {
    let (exit_code, reason) = match &end {
        End::Guest(outcome) => (None, describe(outcome)),
        End::Command(status) => (Some(status.shell_code()), "the command ended".to_owned()),
        End::Forced => (None, "it was told to end and did not in time".to_owned()),
        End::Orphaned => (None, "the launcher ended".to_owned()),
        End::Failed(failure) => (None, failure.message.clone()),
    };
    match end {
        End::Orphaned => {
            // No other process is left to do it; the next command sweeps what cannot be removed.
            let _ = dir.remove();
            base.leave();
            return;
        }
        End::Failed(failure) => reporter.failed(failure),
        end => {
            let reason = format!("the VM has ended: {reason}");
            reporter.tell(&Report::Ended { reason, hint: hint_for(&end) });
        }
    }
    if !foreground {
        dir.remove_sockets();
        // A VM without this file is shown as dead, which is close enough.
        let _ = dir.write_ending(&Ending { exit_code, reason, at: now() });
    }
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
        Outcome::Poweroff => "the guest powered itself off".to_owned(),
        Outcome::Reboot => "the guest asked for a reboot".to_owned(),
        Outcome::TripleFault => "the guest crashed (triple fault)".to_owned(),
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
