//! `pvmm run`: a fresh VM for one command, gone afterwards, or with `-d` one that stays.
//!
//! Reads top to bottom as the run goes: check, prepare, fork the VMM process, wait for the guest, run
//! the command, end everything.

use std::ffi::OsString;
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::attach::{self, Names};
use crate::cli::Run;
use crate::exit::{self, Failure, Outcome};
use crate::output;
use crate::prepare::{self, RootfsSource, Sources};
use crate::sys::signals::{FORWARDED, Signals};
use crate::vm_dir::{Base, Claim, Record, now};
use crate::vmm_process::{self, Mode, Plan, VmmProcess};

const DEFAULT_BOOT_PATIENCE: Duration = Duration::from_secs(60);
/// How long an agent that has said that it is ready may take to answer.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// A login shell for `run -i` without a command.
const SHELL: &str = "command -v bash >/dev/null && exec bash -l; exec sh -l";

pub fn run(args: Run, quiet: bool) -> Outcome {
    let argv = command(&args)?;
    let boot_patience = boot_patience()?;
    let base = Base::open()?;
    let template =
        args.rootfs.as_ref().map_or(args.template.clone(), |path| path.display().to_string());
    let sources = Sources::check(args.kernel, args.rootfs, &args.template, args.disk_size)?;
    if let Some(name) = &args.name {
        base.refuse_taken(name)?;
    }
    let console_copy = args.console.map(|path| {
        File::create(&path).map_err(|error| {
            let why = exit::io_text(&error);
            Failure::usage(format!("--console: cannot write {}: {why}", path.display()))
        })
    });
    let console_copy = console_copy.transpose()?;

    let is_base = matches!(sources.rootfs, RootfsSource::Base);
    let parts = sources.prepare(quiet)?;
    // From here on signals are for the guest; one that came just before still counts.
    let signals = Signals::hold(&FORWARDED)?;
    prepare::or_interrupted(Ok(()))?;
    let started = Instant::now();
    let record = Record {
        name: args.name,
        created: now(),
        template: if is_base { args.template } else { template },
        kernel: parts.kernel.label.clone(),
        cpus: args.cpus,
        memory_mib: args.memory,
        command: Record::command_of(&argv),
        ephemeral: !args.detach,
        ..Record::default()
    };
    let claim = base.create(record)?;
    let record = claim.dir().read_record().unwrap_or_default();
    let id = record.id.clone();
    let names = Names::of(&argv, &args.command);
    let request = (!argv.is_empty()).then(|| attach::request(&argv, &args.command));
    let mode = match args.detach {
        true => Mode::Detached { command: request.clone().map(|it| Box::new((it, names.clone()))) },
        false => Mode::Foreground,
    };
    let plan = Plan { parts, record, console_copy, boot_patience, mode };
    let process = vmm_process::spawn(plan, &claim)?;
    let mut vm = RunningVm { process, claim, kept: false };
    let deadline = args.timeout.map(|timeout| started + timeout);
    // On failure `vm` is dropped: the process ends and the directory goes.
    vm.process.wait_ready(&signals, deadline)?;

    match request {
        Some(request) if !args.detach => {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            foreground(vm, request, &names, left, signals)
        }
        _ => {
            vm.keep();
            output::line(&id)?;
            Ok(0)
        }
    }
}

fn command(args: &Run) -> Result<Vec<OsString>, Failure> {
    if args.argv.is_empty() && !args.detach {
        if args.command.interactive {
            return Ok(["/bin/sh", "-c", SHELL].map(OsString::from).to_vec());
        }
        return Err(Failure::usage("there is no command to run").hint(
            "write it after '--', as in: pvmm run -- python3 -V; or use -i for a shell, -d for a VM that stays",
        ));
    }
    Ok(args.argv.clone())
}

fn boot_patience() -> Result<Duration, Failure> {
    let Some(text) = std::env::var_os("PVMM_BOOT_TIMEOUT").filter(|text| !text.is_empty()) else {
        return Ok(DEFAULT_BOOT_PATIENCE);
    };
    crate::args::duration(&text.to_string_lossy())
        .map_err(|why| Failure::usage(format!("PVMM_BOOT_TIMEOUT: {why}")))
}

/// Runs the command and takes the VM away, whichever of the two ends first.
fn foreground(
    vm: RunningVm,
    request: pvmm::exec::ExecRequest,
    names: &Names,
    timeout: Option<Duration>,
    signals: Signals,
) -> Outcome {
    let vm = Arc::new(Mutex::new(Some(vm)));
    let take =
        |vm: &Mutex<Option<RunningVm>>| vm.lock().unwrap_or_else(PoisonError::into_inner).take();
    let socket = vm.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(dir) = socket.as_ref().map(|vm| vm.claim.dir().clone()) else {
        return Err(Failure::fault("the VM is gone"));
    };
    drop(socket);
    let abort = {
        let vm = vm.clone();
        move |code| {
            // Whoever takes it ends it; the other thread is then only waiting for the exit.
            if let Some(vm) = take(&vm) {
                drop(vm);
                exit::leave(Ok(code))
            }
        }
    };
    let attached = attach::connect(&dir, CONNECT_PATIENCE)
        .map_err(Into::into)
        .and_then(|agent| attach::attach(&agent, request, timeout, signals, abort));
    let Some(mut vm) = take(&vm) else {
        // The other thread is ending the process.
        loop {
            std::thread::park();
        }
    };
    match attached {
        Ok(end) => end.outcome(names),
        Err(pvmm::exec::ExecError::InvalidRequest { field, why }) => {
            Err(Failure::usage(format!("{field}: {why}")))
        }
        // The VMM process knows better than the broken connection what happened.
        Err(pvmm::exec::ExecError::Agent(pvmm::agent::AgentError::Lost(_))) => {
            Err(vm.process.why_gone())
        }
        Err(error) => Err(attach::refuse(error)),
    }
}

/// A VM that is taken away when it is dropped: first its process, then its directory.
struct RunningVm {
    process: VmmProcess,
    claim: Claim,
    kept: bool,
}

impl RunningVm {
    /// Lets it live on without us.
    fn keep(mut self) {
        self.kept = true;
        self.claim.keep();
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        if !self.kept {
            self.process.end();
        }
    }
}
