//! What may be asked when, in two lists, and what is done then: before there is a machine, and after.
//!
//! Apart from the loop in `door.rs`, because these lists are what one looks up when a client is refused.

use std::time::Instant;

use pvmm::{Vm, VmConfig};
use serde_json::json;

use super::args::VERSION;
use super::bodies::{MachineUpdate, SnapshotType};
use super::door::{Door, State};
use super::fork;
use super::http::{Answer, Refusal};
use super::keyboard::Keyboard;
use super::logger;
use super::routes::Request;
use super::running::{Running, refuse};
use super::server::ClientId;
use super::snapshot;

const NOT_BEFORE_BOOT: &str =
    "The requested operation is not supported before starting the microVM.";
const NOT_AFTER_BOOT: &str = "The requested operation is not supported after starting the microVM.";

/// What became of a request.
pub enum Done {
    Answer(Answer),
    /// The answer comes by itself.
    Later,
    /// The answer is the last one.
    Fatal(Answer),
}

impl From<()> for Done {
    fn from((): ()) -> Self {
        Self::Answer(Answer::done())
    }
}

impl From<Refusal> for Done {
    fn from(refusal: Refusal) -> Self {
        Self::Answer(refusal.into())
    }
}

impl From<Answer> for Done {
    fn from(answer: Answer) -> Self {
        Self::Answer(answer)
    }
}

impl Door {
    /// Carries a request out, if it may be asked now.
    pub(super) fn perform(&mut self, client: ClientId, request: Request) -> Result<Done, Refusal> {
        match request {
            Request::GetInstance => Ok(Answer::json(&self.instance()).into()),
            Request::GetVersion => {
                Ok(Answer::json(&json!({ "firecracker_version": VERSION })).into())
            }
            Request::Unsupported(what) => Err(what.refusal()),
            request => match &self.state {
                State::Before(_) => self.perform_before(request),
                State::Running(_) => self.perform_running(client, request),
            },
        }
    }

    fn instance(&self) -> serde_json::Value {
        let state = match &self.state {
            State::Before(_) => "Not started",
            State::Running(running) if running.is_paused() => "Paused",
            State::Running(_) => "Running",
        };
        json!({ "id": self.id, "state": state, "vmm_version": VERSION, "app_name": "Firecracker" })
    }

    /// What may be asked while there is no machine.
    fn perform_before(&mut self, request: Request) -> Result<Done, Refusal> {
        let State::Before(before) = &mut self.state else { return Err(after_boot()) };
        match request {
            Request::GetMachine => return Ok(Answer::json(&before.config.machine_config).into()),
            Request::GetConfig => return Ok(Answer::json(&before.config).into()),
            Request::GetBalloon => {
                let none = || Refusal::bad("Balloon: the machine has no balloon device.");
                return Ok(Answer::json(before.config.balloon.as_ref().ok_or_else(none)?).into());
            }
            Request::PutBootSource(source) => before.put_boot_source(source)?,
            Request::PutMachine(machine) => before.put_machine(machine)?,
            Request::PatchMachine(update) => {
                let update: MachineUpdate = update;
                before.put_machine(update.applied_to(&before.config.machine_config))?;
            }
            Request::PutDrive(drive) => before.put_drive(drive)?,
            Request::PutNet(net) => before.put_net(net)?,
            Request::PutVsock(vsock) => before.put_vsock(vsock)?,
            Request::PutEntropy(entropy) => before.put_entropy(entropy)?,
            Request::PutBalloon(balloon) => before.put_balloon(balloon)?,
            Request::PutMmdsConfig(config) => {
                before.put_mmds_config(config)?;
                self.mmds.make_present();
            }
            Request::PutSerial(serial) => before.put_serial(serial)?,
            Request::PutLogger(wish) => {
                logger::configure(&wish).map_err(|error| {
                    Refusal::bad(format!("Logger: log_path {:?}: {error}", wish.log_path))
                })?;
            }
            Request::PutMetrics(wish) => {
                self.metrics.configure(wish)?;
            }
            Request::GetMmds => {
                self.mmds.make_present();
                return Ok(Answer::json(&self.mmds.shown()).into());
            }
            Request::PutMmds(content) => self.mmds.put(content)?,
            Request::PatchMmds(patch) => self.mmds.patch(&patch)?,
            Request::InstanceStart => self.start()?,
            request @ (Request::LoadSnapshot(_) | Request::LoadFork(_)) => {
                if before.is_described() {
                    return Err(Refusal::bad(
                        "Load snapshot error: Loading a microVM snapshot not allowed after \
                         configuring boot-specific resources.",
                    ));
                }
                return Ok(self.load(&request));
            }
            _ => return Err(Refusal::bad(NOT_BEFORE_BOOT)),
        }
        Ok(().into())
    }

    /// What may be asked of a machine.
    fn perform_running(&mut self, client: ClientId, request: Request) -> Result<Done, Refusal> {
        let State::Running(running) = &mut self.state else {
            return Err(Refusal::bad(NOT_BEFORE_BOOT));
        };
        let begun = Instant::now();
        match request {
            Request::GetMachine => return Ok(Answer::json(&running.config.machine_config).into()),
            Request::GetConfig => return Ok(Answer::json(&running.config).into()),
            Request::GetBalloon => return Ok(Answer::json(&running.balloon()?).into()),
            Request::GetBalloonStats => return Ok(Answer::json(&running.balloon_stats()?).into()),
            Request::GetHinting => return Ok(Answer::json(&running.hinting_status()?).into()),
            Request::PatchBalloon(update) => running.patch_balloon(update)?,
            Request::PatchBalloonStats(update) => running.patch_balloon_stats(update)?,
            Request::StartHinting(start) => running.start_hinting(start)?,
            Request::StopHinting => running.stop_hinting()?,
            Request::PatchDrive(update) => running.patch_drive(update)?,
            Request::Pause => {
                running.pause()?;
                self.metrics.took("pause_vm", begun.elapsed());
            }
            Request::Resume => {
                running.resume()?;
                self.metrics.took("resume_vm", begun.elapsed());
            }
            Request::GetMmds | Request::PutMmds(_) | Request::PatchMmds(_)
                if !self.mmds.is_present() =>
            {
                return Err(Refusal::bad("MMDS: the machine started without a metadata service."));
            }
            Request::GetMmds => return Ok(Answer::json(&self.mmds.shown()).into()),
            Request::PutMmds(content) => {
                self.mmds.put(content)?;
                running.set_metadata(&self.mmds)?;
            }
            Request::PatchMmds(patch) => {
                self.mmds.patch(&patch)?;
                running.set_metadata(&self.mmds)?;
            }
            Request::FlushMetrics => {
                let flushed = self.metrics.flush(Some(running));
                flushed.map_err(|error| Refusal::bad(format!("Metrics: {error}")))?;
            }
            Request::Checkpoint(moment) => running.checkpoint(moment.refresh)?,
            Request::Rollback(moment) => running.rollback(moment.refresh)?,
            Request::Exec(_) if running.is_paused() => {
                return Err(Refusal::bad("exec: the machine is paused; resume it first."));
            }
            Request::Exec(exec) => {
                let socket = running.agent_socket()?.to_owned();
                self.execs.start(client, socket, exec)?;
                return Ok(Done::Later);
            }
            Request::PatchNet(update) => running.patch_net(update)?,
            Request::SendCtrlAltDel => running.send_ctrl_alt_del(),
            Request::CreateSnapshot(wish) => {
                snapshot::create(running, &wish)?;
                let what = match wish.snapshot_type {
                    SnapshotType::Full => "full_create_snapshot",
                    SnapshotType::Diff => "diff_create_snapshot",
                };
                self.metrics.took(what, begun.elapsed());
            }
            Request::Fork(wish) => return Ok(Answer::json(&fork::fork(running, &wish)?).into()),
            _ => return Err(after_boot()),
        }
        Ok(().into())
    }

    /// Makes the machine that was described, and lets it run.
    pub(super) fn start(&mut self) -> Result<(), Refusal> {
        let State::Before(before) = &self.state else { return Err(after_boot()) };
        let machine = VmConfig { boot_timer: self.boot_timer, ..before.machine()? };
        let vm = Vm::boot(machine).map_err(refuse("Start microvm error"))?;
        let mut running = Running::new(vm, before.config.clone());
        running.resume()?;
        self.enter(running);
        Ok(())
    }

    /// Goes on with a machine that was; if that fails, what is left is no start for anything.
    fn load(&mut self, request: &Request) -> Done {
        let State::Before(before) = &self.state else { return after_boot().into() };
        let begun = Instant::now();
        let (loaded, resume) = match request {
            Request::LoadSnapshot(with) => {
                let roots = self.drive_root.clone().map(|root| vec![root]);
                (snapshot::load(with, &before.serial, &roots), with.load.resume_vm)
            }
            Request::LoadFork(wish) => (fork::load(wish, &before.serial), wish.resume_vm),
            _ => return after_boot().into(),
        };
        let resumed = loaded.and_then(|mut running| {
            if resume {
                running.resume()?;
            }
            Ok(running)
        });
        match resumed {
            Ok(running) => {
                if running.config.mmds_config.is_some() {
                    self.mmds.make_present();
                }
                self.enter(running);
                self.metrics.took("load_snapshot", begun.elapsed());
                ().into()
            }
            Err(refusal) => Done::Fatal(refusal.into()),
        }
    }

    /// From here on there is a machine.
    fn enter(&mut self, running: Running) {
        let State::Before(before) = &self.state else { return };
        if let Err(refusal) = running.set_metadata(&self.mmds) {
            log::error!("{}", refusal.message);
        }
        // A console in a file is not this terminal's.
        if before.serial.serial_out_path.is_none() {
            self.keyboard = Some(Keyboard::attach());
        }
        self.state = State::Running(Box::new(running));
    }
}

fn after_boot() -> Refusal {
    Refusal::bad(NOT_AFTER_BOOT)
}
