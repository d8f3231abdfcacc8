//! `pvmm run`: starts a VM for one command and removes it afterwards, or with `-d` leaves it
//! running.
//!
//! The code follows the order of a run: check, prepare, fork the monitor process, wait for the
//! guest, run the command, end everything.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pvmm::agent::AgentError;
use pvmm::exec::{ExecError, ExecRequest};

use super::image;
use crate::args::VolumeFlag;
use crate::attach;
use crate::cli::{Run, start};
use crate::exit::{self, Failure, Outcome};
use crate::interrupt;
use crate::output;
use crate::progress::Steps;
use pvmm_sandbox::copies::RunningVm;
use pvmm_sandbox::egress;
use pvmm_sandbox::guest_agent::{self, Names};
use pvmm_sandbox::kernel_file::KernelFile;
use pvmm_sandbox::machine::Extras;
use pvmm_sandbox::net_card::{NetCard, TapWish};
use pvmm_sandbox::overrides::CopyParts;
use pvmm_sandbox::ports::{self, BoundPort};
use pvmm_sandbox::prepare::Sources;
use pvmm_sandbox::secrets::{self, VmSecrets};
use pvmm_sandbox::sys::signals::Signals;
use pvmm_sandbox::vm_dir::{Base, Egress, Record, VmDir, VolumeMount, now};
use pvmm_sandbox::vmm_process::volume;
use pvmm_sandbox::vmm_process::{self, Mode, Plan, Start};
use pvmm_sandbox::volumes::Volumes;
use pvmm_sandbox::warm::{self, Shape};

const DEFAULT_BOOT_PATIENCE: Duration = Duration::from_secs(60);
/// A login shell for `run -it` without a command.
const SHELL: &str = "command -v bash >/dev/null && exec bash -l; exec sh -l";

pub fn run(mut args: Run, quiet: bool) -> Outcome {
    let secrets = args.secrets.seal()?;
    if let Some(flag) = &args.image {
        let template = image::template(flag, quiet)?;
        args.argv = image::words(&template, args.argv);
        args.template = template.name().to_owned();
    }
    // All arguments are checked before anything is created.
    let argv = command(&args)?;
    attach::require_terminal(&args.command)?;
    let boot_patience = boot_patience()?;
    let base = Base::open()?;
    let sources =
        Sources::check(args.kernel.clone(), args.rootfs.clone(), &args.template, args.disk_size)?;
    if let Some(name) = &args.name {
        base.refuse_taken(name)?;
    }
    let (net, egress) = network(&args, secrets.as_ref())?;
    let volumes = volumes(&args)?;
    let ports = ports::bind(&args.ports)?;
    let console_copy = args.console.as_deref().map(create_console).transpose()?;

    args.jail.warn(quiet);
    args.egress.warn(quiet);
    interrupt::scratch_place(quiet)?;
    let start = start(&args, sources, egress.is_some(), &volumes, quiet)?;
    // From here on signals are for the guest; one that came just before is still handled.
    let signals = Signals::hold(args.command.signals())?;
    interrupt::or_interrupted(Ok(()))?;

    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    let names = attach::names(&argv, &args.command);
    let request = (!argv.is_empty()).then(|| attach::request(&argv, &args.command));
    let claim =
        base.create(record(&args, &argv, &start, &ports, volumes), args.jail.options().users())?;
    if let Some(egress) = &egress {
        claim.dir().write_egress(egress)?;
    }
    // The values are this VM's alone from here on, and no process is forked while they are open.
    let placeholders = match secrets {
        Some(VmSecrets { values, shown }) => {
            secrets::install(&values, claim.dir())?;
            shown
        }
        None => None,
    };
    let record = claim.dir().read_record().unwrap_or_default();
    let mode = if args.detach {
        Mode::Detached { command: request.clone().map(|it| Box::new((it, names.clone()))) }
    } else {
        Mode::Foreground
    };
    let (ports, detached_ports) =
        if args.detach { (Vec::new(), ports) } else { (ports, Vec::new()) };
    let plan = Plan {
        start: start.with,
        record,
        console_copy,
        boot_patience,
        mode,
        jailed: !args.jail.no_jail,
        ttl: args.jail.ttl,
        still: false,
        ports: detached_ports,
        copy: CopyParts::default(),
        frames: None,
        placeholders,
        extras: Extras {
            cpu: args.cpu.clone(),
            drives: args.drive.clone(),
            net,
            balloon: args.balloon,
        },
    };
    let process = vmm_process::spawn(plan, &claim)?;
    let mut vm = RunningVm::new(process, claim);
    // On failure `vm` is dropped, which ends the process and removes the directory.
    let missing = vm.wait_ready(Some(&signals), deadline)?;
    start::show_missing(&missing, quiet);

    match request {
        Some(request) if !args.detach => {
            if args.argv.is_empty() && !args.command.tty && io::stdin().is_terminal() {
                output::remark(
                    quiet,
                    "A shell without a terminal (-t gives it one): type commands, end with Ctrl-D.",
                );
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            serve_ports(vm.dir(), ports);
            foreground(vm, request, &names, left, signals)
        }
        _ => {
            output::line(&vm.keep()?)?;
            Ok(0)
        }
    }
}

/// Returns the network card of the VM, if it has one, and the policy of one without a tap.
fn network(
    args: &Run,
    secrets: Option<&VmSecrets>,
) -> Result<(Option<NetCard>, Option<Egress>), Failure> {
    match &args.net {
        Some(card) if card.tap != TapWish::Egress => {
            if args.egress.is_given() {
                return Err(Failure::usage("--allow: a card on a tap of this host has no policy")
                    .hint("write --net without a tap, or leave --allow out"));
            }
            if secrets.is_some() {
                return Err(Failure::usage("--secret: a card on a tap of this host has no policy")
                    .hint("write --net without a tap, or leave --secret out"));
            }
            Ok((Some(card.clone()), None))
        }
        None if !args.egress.is_given() && secrets.is_none() => Ok((None, None)),
        _ => {
            let mut egress = args.egress.egress(None)?;
            if let Some(secrets) = secrets {
                secrets.allow(&mut egress);
            }
            Ok((Some(egress::card()?), Some(egress)))
        }
    }
}

/// Returns the volumes of the VM, each of which must exist and be free.
fn volumes(args: &Run) -> Result<Vec<VolumeMount>, Failure> {
    if args.volume.is_empty() {
        return Ok(Vec::new());
    }
    let known = Volumes::open()?;
    let mount = |flag: &VolumeFlag| {
        let volume = known.get(&flag.name)?;
        if volume.in_use && !flag.read_only {
            return Err(Failure::usage(format!("--volume: '{}' is in use", flag.name))
                .hint("end the VM that uses it, or read it with ':ro'"));
        }
        let (at, read_only) = (flag.at.clone(), flag.read_only);
        Ok(VolumeMount { image: volume.image, at, read_only, mounted: false })
    };
    args.volume.iter().map(mount).collect()
}

/// The initial state of the VM, and the name of its kernel.
struct Begin {
    with: Start,
    kernel: String,
    kernel_file: Option<KernelFile>,
}

/// Returns a warm template if one matches this VM exactly, otherwise kernel, root filesystem and
/// disk.
fn start(
    args: &Run,
    sources: Sources,
    egress: bool,
    volumes: &[VolumeMount],
    quiet: bool,
) -> Result<Begin, Failure> {
    // A template is never baked with these.
    let special = args.kernel.is_some()
        || args.rootfs.is_some()
        || (args.net.is_some() && !egress)
        || args.balloon
        || args.console.is_some()
        || !args.drive.is_empty();
    if !args.cold && !special {
        let shape = Shape {
            template: args.template.clone(),
            cpus: args.cpus,
            memory_mib: args.memory,
            disk_mib: args.disk_size,
            cpu: args.cpu.clone(),
            net: egress,
            spare_drives: volumes.iter().map(|volume| volume.read_only).collect(),
        };
        if let Some(warm) = warm::find(&shape) {
            let with = Start::Template(Arc::new(warm.template));
            return Ok(Begin { with, kernel: warm.kernel, kernel_file: warm.kernel_file });
        }
    }
    let parts = interrupt::interruptible(|| sources.prepare(&mut Steps::new(quiet)))?;
    let kernel = parts.kernel.label.clone();
    let kernel_file = KernelFile::of(&parts.kernel.vmlinux);
    Ok(Begin { with: Start::Boot(Box::new(parts)), kernel, kernel_file })
}

/// Builds the record that other commands read.
fn record(
    args: &Run,
    argv: &[OsString],
    start: &Begin,
    ports: &[BoundPort],
    volumes: Vec<VolumeMount>,
) -> Record {
    let rootfs = args.rootfs.as_ref().map(|path| path.display().to_string());
    Record {
        name: args.name.clone(),
        created: now(),
        template: rootfs.unwrap_or_else(|| args.template.clone()),
        kernel: start.kernel.clone(),
        kernel_file: start.kernel_file.clone(),
        cpus: args.cpus,
        memory_mib: args.memory,
        // The shell that replaces a missing command was not given by the user.
        command: Record::command_of(if args.argv.is_empty() { &[] } else { argv }),
        ports: ports.iter().map(BoundPort::to_string).collect(),
        ephemeral: !args.detach,
        volumes,
        ..Record::default()
    }
}

/// Serves the forwarded ports of a foreground run, on a thread that ends with the process.
fn serve_ports(dir: &VmDir, ports: Vec<BoundPort>) {
    if ports.is_empty() {
        return;
    }
    let dir = dir.clone();
    let keep = move || {
        let stop = |time| {
            std::thread::sleep(time);
            false
        };
        // An error means that the VM has ended, which the main thread reports in more detail.
        let _ = ports::keep(
            &dir.run().vsock(),
            || dir.is_alive(),
            &ports,
            |text| output::remark(false, text),
            stop,
        );
    };
    attach::in_background("ports", keep);
}

fn create_console(path: &Path) -> Result<File, Failure> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path).map_err(|error| {
        let why = exit::io_text(&error);
        Failure::usage(format!("--console: cannot write {}: {why}", path.display()))
    })
}

fn command(args: &Run) -> Result<Vec<OsString>, Failure> {
    if args.argv.is_empty() && !args.detach {
        if args.command.interactive || args.command.tty {
            return Ok(["/bin/sh", "-c", SHELL].map(OsString::from).to_vec());
        }
        return Err(Failure::usage("there is no command to run").hint(
            "write it after '--', as in: pvmm run -- python3 -V; or use -it for a shell, -d for a VM that stays",
        ));
    }
    Ok(args.argv.clone())
}

/// Returns how long a guest may take to boot.
pub fn boot_patience() -> Result<Duration, Failure> {
    let Some(text) = std::env::var_os("PVMM_BOOT_TIMEOUT").filter(|text| !text.is_empty()) else {
        return Ok(DEFAULT_BOOT_PATIENCE);
    };
    crate::args::duration(&text.to_string_lossy())
        .map_err(|why| Failure::usage(format!("PVMM_BOOT_TIMEOUT: {why}")))
}

/// Runs the command and removes the VM, whichever of the two ends first.
fn foreground(
    vm: RunningVm,
    request: ExecRequest,
    names: &Names,
    timeout: Option<Duration>,
    signals: Signals,
) -> Outcome {
    let dir = vm.dir().clone();
    let vm = Arc::new(Mutex::new(Some(vm)));
    let take =
        |vm: &Mutex<Option<RunningVm>>| vm.lock().unwrap_or_else(PoisonError::into_inner).take();
    let abort = {
        let vm = vm.clone();
        move |code| {
            // The thread that takes the VM ends it; the other thread only waits for the exit.
            if let Some(vm) = take(&vm) {
                drop(vm);
                exit::leave(Ok(code))
            }
        }
    };
    let attached = guest_agent::connect(&dir, guest_agent::PATIENCE)
        .map_err(Into::into)
        .and_then(|agent| attach::attach(&agent, request, timeout, signals, abort));
    let Some(mut vm) = take(&vm) else {
        // The other thread is ending the process.
        loop {
            std::thread::park();
        }
    };
    match attached {
        Ok(end) => {
            let volumes = dir.read_record().unwrap_or_default().volumes;
            volume::flush(&dir.run().vsock(), &volumes);
            end.outcome(names)
        }
        // The monitor process's report says more than the broken connection.
        Err(ExecError::Agent(AgentError::Lost(_))) => Err(vm.process.why_gone()),
        Err(error) => Err(guest_agent::refuse_exec(error)),
    }
}
