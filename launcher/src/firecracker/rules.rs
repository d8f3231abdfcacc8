//! Which API requests are allowed before and after boot, and what each does.
//!
//! Separate from the event loop in `api_server.rs`, because these two lists are what one looks up
//! when a client's request is refused.

use std::time::Instant;

use pvmm::{Kvm, Vm};
use serde_json::json;

use super::api_server::{ApiServer, MachineStage};
use super::args::VERSION;
use super::bodies::{MachineUpdate, SnapshotType};
use super::boot_timer::BootTimer;
use super::fork;
use super::http::{Answer, Refusal};
use super::http_server::ClientId;
use super::keyboard::Keyboard;
use super::logger;
use super::routes::ApiCall;
use super::running::{Running, refuse};
use super::snapshot;

const NOT_BEFORE_BOOT: &str =
    "The requested operation is not supported before starting the microVM.";
const NOT_AFTER_BOOT: &str = "The requested operation is not supported after starting the microVM.";

/// The result of a request.
pub enum Done {
    Answer(Answer),
    /// The answer is sent later, by a background thread.
    Later,
    /// The process ends after this answer.
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

impl ApiServer {
    /// Carries out a request if the current stage allows it.
    pub(super) fn perform(&mut self, client: ClientId, request: ApiCall) -> Result<Done, Refusal> {
        match request {
            ApiCall::GetInstance => Ok(Answer::json(&self.instance()).into()),
            ApiCall::GetVersion => {
                Ok(Answer::json(&json!({ "firecracker_version": VERSION })).into())
            }
            ApiCall::Unsupported(what) => Err(what.refusal()),
            request => match &self.state {
                MachineStage::Before(_) => self.perform_before(request),
                MachineStage::Running(_) => self.perform_running(client, request),
            },
        }
    }

    fn instance(&self) -> serde_json::Value {
        let state = match &self.state {
            MachineStage::Before(_) => "Not started",
            MachineStage::Running(running) if running.is_paused() => "Paused",
            MachineStage::Running(_) => "Running",
        };
        json!({ "id": self.id, "state": state, "vmm_version": VERSION, "app_name": "Firecracker" })
    }

    /// Carries out a request while no VM exists.
    fn perform_before(&mut self, request: ApiCall) -> Result<Done, Refusal> {
        let MachineStage::Before(before) = &mut self.state else { return Err(after_boot()) };
        match request {
            ApiCall::GetMachine => return Ok(Answer::json(&before.config.machine_config).into()),
            ApiCall::GetConfig => return Ok(Answer::json(&before.config).into()),
            ApiCall::GetBalloon => {
                let none = || Refusal::bad("Balloon: the machine has no balloon device.");
                return Ok(Answer::json(before.config.balloon.as_ref().ok_or_else(none)?).into());
            }
            ApiCall::PutBootSource(source) => before.put_boot_source(source)?,
            ApiCall::PutMachine(machine) => before.put_machine(machine)?,
            ApiCall::PutCpuConfig(modifiers) => before.put_cpu_config(modifiers),
            ApiCall::PatchMachine(update) => {
                let update: MachineUpdate = update;
                before.put_machine(update.applied_to(&before.config.machine_config))?;
            }
            ApiCall::PutDrive(drive) => before.put_drive(drive)?,
            ApiCall::PutNet(net) => before.put_net(net)?,
            ApiCall::PutVsock(vsock) => before.put_vsock(vsock)?,
            ApiCall::PutEntropy(entropy) => before.put_entropy(entropy)?,
            ApiCall::PutBalloon(balloon) => before.put_balloon(balloon)?,
            ApiCall::PutMmdsConfig(config) => {
                before.put_mmds_config(config)?;
                self.mmds.make_present();
            }
            ApiCall::PutSerial(serial) => before.put_serial(serial)?,
            ApiCall::PutLogger(wish) => {
                logger::configure(&wish).map_err(|error| {
                    Refusal::bad(format!("Logger: log_path {:?}: {error}", wish.log_path))
                })?;
            }
            ApiCall::PutMetrics(wish) => {
                self.metrics.configure(wish)?;
            }
            ApiCall::GetMmds => {
                self.mmds.make_present();
                return Ok(Answer::json(&self.mmds.shown()).into());
            }
            ApiCall::PutMmds(content) => self.mmds.put(content)?,
            ApiCall::PatchMmds(patch) => self.mmds.patch(&patch)?,
            ApiCall::InstanceStart => self.start()?,
            request @ (ApiCall::LoadSnapshot(_) | ApiCall::LoadFork(_)) => {
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

    /// Carries out a request to an existing VM.
    fn perform_running(&mut self, client: ClientId, request: ApiCall) -> Result<Done, Refusal> {
        let MachineStage::Running(running) = &mut self.state else {
            return Err(Refusal::bad(NOT_BEFORE_BOOT));
        };
        let begun = Instant::now();
        match request {
            ApiCall::GetMachine => return Ok(Answer::json(&running.config.machine_config).into()),
            ApiCall::GetConfig => return Ok(Answer::json(&running.config).into()),
            ApiCall::GetBalloon => return Ok(Answer::json(&running.balloon()?).into()),
            ApiCall::GetBalloonStats => return Ok(Answer::json(&running.balloon_stats()?).into()),
            ApiCall::GetHinting => return Ok(Answer::json(&running.hinting_status()?).into()),
            ApiCall::PatchBalloon(update) => running.patch_balloon(update)?,
            ApiCall::PatchBalloonStats(update) => running.patch_balloon_stats(update)?,
            ApiCall::StartHinting(start) => running.start_hinting(start)?,
            ApiCall::StopHinting => running.stop_hinting()?,
            ApiCall::PatchDrive(update) => running.patch_drive(update)?,
            ApiCall::Pause => {
                running.pause()?;
                self.metrics.took("pause_vm", begun.elapsed());
            }
            ApiCall::Resume => {
                running.resume()?;
                self.metrics.took("resume_vm", begun.elapsed());
            }
            ApiCall::GetMmds | ApiCall::PutMmds(_) | ApiCall::PatchMmds(_)
                if !self.mmds.is_present() =>
            {
                return Err(Refusal::bad("MMDS: the machine started without a metadata service."));
            }
            ApiCall::GetMmds => return Ok(Answer::json(&self.mmds.shown()).into()),
            ApiCall::PutMmds(content) => {
                self.mmds.put(content)?;
                running.set_metadata(&self.mmds)?;
            }
            ApiCall::PatchMmds(patch) => {
                self.mmds.patch(&patch)?;
                running.set_metadata(&self.mmds)?;
            }
            ApiCall::FlushMetrics => {
                let flushed = self.metrics.flush(Some(running));
                flushed.map_err(|error| Refusal::bad(format!("Metrics: {error}")))?;
            }
            ApiCall::Checkpoint(moment) => running.checkpoint(moment.refresh)?,
            ApiCall::Rollback(moment) => running.rollback(moment.refresh)?,
            ApiCall::Exec(_) if running.is_paused() => {
                return Err(Refusal::bad("exec: the machine is paused; resume it first."));
            }
            ApiCall::Exec(exec) => {
                let socket = running.agent_socket()?.to_owned();
                self.execs.start(client, socket, exec)?;
                return Ok(Done::Later);
            }
            ApiCall::PatchNet(update) => running.patch_net(update)?,
            ApiCall::SendCtrlAltDel => running.send_ctrl_alt_del(),
            ApiCall::CreateSnapshot(wish) => {
                snapshot::create(running, &wish)?;
                let what = match wish.snapshot_type {
                    SnapshotType::Full => "full_create_snapshot",
                    SnapshotType::Diff => "diff_create_snapshot",
                };
                self.metrics.took(what, begun.elapsed());
            }
            ApiCall::Fork(wish) => return Ok(Answer::json(&fork::fork(running, &wish)?).into()),
            _ => return Err(after_boot()),
        }
        Ok(().into())
    }

    /// Boots the configured VM and runs it.
    pub(super) fn start(&mut self) -> Result<(), Refusal> {
        let MachineStage::Before(before) = &self.state else { return Err(after_boot()) };
        let mut machine = before.machine()?;
        machine.host.thread_filters = self.filters.as_ref().map(|all| all.threads.clone());
        machine.registers.extend(self.boot_timer.then(BootTimer::registers));
        let refused = refuse("Start microvm error");
        let kvm = Kvm::open().map_err(&refused)?;
        before.check_vendor(&kvm.cpu_vendor())?;
        let vm = Vm::boot(&kvm, machine).map_err(&refused)?;
        let mut running = Running::new(vm, before.config.clone());
        running.resume()?;
        self.enter(running);
        Ok(())
    }

    /// Loads a snapshot or a fork. A failure is fatal, because the process cannot start another VM
    /// after it.
    fn load(&mut self, request: &ApiCall) -> Done {
        let MachineStage::Before(before) = &self.state else { return after_boot().into() };
        let begun = Instant::now();
        let filters = self.filters.as_ref().map(|all| all.threads.clone());
        let (loaded, resume) = match request {
            ApiCall::LoadSnapshot(with) => {
                let roots = self.drive_root.clone().map(|root| vec![root]);
                (snapshot::load(with, &before.serial, &roots, filters), with.load.resume_vm)
            }
            ApiCall::LoadFork(wish) => (fork::load(wish, &before.serial, filters), wish.resume_vm),
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

    /// Switches to the running stage, with `running` as the VM.
    fn enter(&mut self, running: Running) {
        let MachineStage::Before(before) = &self.state else { return };
        if let Err(refusal) = running.set_metadata(&self.mmds) {
            log::error!("{}", refusal.message);
        }
        // Standard input is for the console only if its output is standard output.
        if before.serial.serial_out_path.is_none() {
            self.keyboard = Some(Keyboard::attach());
        }
        self.state = MachineStage::Running(Box::new(running));
    }
}

fn after_boot() -> Refusal {
    Refusal::bad(NOT_AFTER_BOOT)
}
