//! A VM that exists, running or paused, and the requests to it.

use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError, FreezeOptions, Refresh};
use pvmm::{DeviceCounters, DriveSource, ErrorKind, Hinting, Vm};

use super::before_boot;
use super::bodies::{
    Balloon, BalloonStats, BalloonUpdate, Config, DriveUpdate, HintingStart, HintingStatus,
    NetUpdate, RateLimiter, RefreshBy, StatsUpdate, limits_of,
};
use super::http::Refusal;
use super::learner::Learner;
use super::mmds::Mmds;
use pvmm_sandbox::machine::SETTLE_MAX;

/// How long the guest may take to report its memory statistics; all clients wait meanwhile.
const STATS_PATIENCE: Duration = Duration::from_millis(200);
/// How long the agent may take to refresh a fork.
const REFRESH_PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to connect to the agent, and for the agent to freeze or thaw the workload.
const AGENT_PATIENCE: Duration = Duration::from_secs(10);
/// Free page hinting commands: no run yet, and the pages of the last run may be reused.
const HINT_STOP: u32 = 0;
const HINT_DONE: u32 = 1;

pub struct Running {
    pub vm: Vm,
    pub config: Config,
    paused: bool,
    /// The refresh that the agent must do before the workload may run.
    owed: Option<Owed>,
    /// 1 plus the number of rollbacks; the guest gets it with each refresh.
    generation: u64,
    last_stats: Option<BalloonStats>,
    hinting: Option<Search>,
    hint_status: HintingStatus,
    /// Present until the working set of the loaded snapshot is known.
    pub learner: Option<Learner>,
}

/// Why a VM must be refreshed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owed {
    /// The VM is a fork, and gets a new identity.
    Copied,
    /// The VM was rolled back: its identity stays, its clock and random numbers must be new.
    RolledBack,
}

/// A free page hinting run, and whether it ends by itself.
struct Search {
    hinting: Hinting,
    acknowledge: bool,
}

impl Running {
    /// Takes ownership of a paused VM.
    pub fn new(vm: Vm, config: Config) -> Self {
        let hint_status = HintingStatus::default();
        Self {
            vm,
            config,
            paused: true,
            owed: None,
            generation: 1,
            last_stats: None,
            hinting: None,
            hint_status,
            learner: None,
        }
    }

    /// Lets the first use of the VM be learned, if `learner` is there for it.
    pub fn learning(self, learner: Option<Learner>) -> Self {
        Self { learner, ..self }
    }

    /// Requires the agent to refresh the VM, at resume, before its workload runs.
    pub fn refreshed_at_resume(self) -> Self {
        Self { owed: Some(Owed::Copied), ..self }
    }

    pub fn is_paused(&self) -> bool {
        self.paused
    }

    pub fn pause(&mut self) -> Result<(), Refusal> {
        self.vm.pause().map_err(refuse("Pause"))?;
        self.paused = true;
        Ok(())
    }

    pub fn resume(&mut self) -> Result<(), Refusal> {
        self.vm.resume().map_err(refuse("Resume"))?;
        self.paused = false;
        if let Some(learner) = &mut self.learner {
            learner.resumed();
        }
        self.settle("Resume")
    }

    /// Keeps the working set of a snapshot that was loaded for the first time, once the VM has had
    /// time for a first use.
    pub fn learn_if_due(&mut self) {
        let due = self.learner.as_ref().and_then(Learner::due);
        if due.is_some_and(|due| due <= Instant::now())
            && let Some(learner) = self.learner.take()
        {
            learner.keep(&self.vm);
        }
    }

    /// Refreshes a running VM if that is pending. On failure the VM is paused again.
    fn settle(&mut self, what: &str) -> Result<(), Refusal> {
        let Some(owed) = self.owed else { return Ok(()) };
        if let Err(refusal) = self.refresh(owed) {
            self.pause()?;
            return Err(Refusal::bad(format!(
                "{what}: the agent did not make the machine its own, so it is paused: {}",
                refusal.message
            )));
        }
        self.owed = None;
        Ok(())
    }

    fn refresh(&self, owed: Owed) -> Result<(), Refusal> {
        let failed = |error: AgentError| Refusal::bad(error.to_string());
        let refresh = Refresh::new(self.generation).map_err(failed)?.clock_of(&self.vm);
        let refresh = match owed {
            Owed::Copied => refresh,
            Owed::RolledBack => refresh.without_ids(),
        };
        let deadline = Instant::now() + REFRESH_PATIENCE;
        Agent::connect_refreshed(self.agent_socket()?, &refresh, deadline).map_err(failed)?;
        Ok(())
    }

    /// Keeps the VM's current state as its checkpoint.
    pub fn checkpoint(&mut self, refresh: RefreshBy) -> Result<(), Refusal> {
        // Only this VM itself continues from the checkpoint, so it may keep its secrets.
        let options = FreezeOptions { keep_secrets: true, ..FreezeOptions::default() };
        self.standing_still("Checkpoint", refresh, options, Vm::checkpoint)
    }

    /// Returns to the checkpoint. The refresh of a paused VM is done when it is resumed.
    pub fn rollback(&mut self, refresh: RefreshBy) -> Result<(), Refusal> {
        self.vm.rollback().map_err(refuse("Rollback"))?;
        self.generation += 1;
        self.owed = (refresh == RefreshBy::Agent).then_some(Owed::RolledBack);
        if self.paused { Ok(()) } else { self.settle("Rollback") }
    }

    /// Calls `act` while the agent holds the workload frozen, so that a VM made from that state is
    /// refreshed before any of its processes runs an instruction. Fails if no agent answers, unless
    /// the request asks for no refresh.
    pub fn standing_still<T>(
        &mut self,
        what: &'static str,
        by: RefreshBy,
        options: FreezeOptions,
        act: impl FnOnce(&mut Vm) -> Result<T, pvmm::Error>,
    ) -> Result<T, Refusal> {
        if by == RefreshBy::None {
            self.vm.settle(SETTLE_MAX);
            return act(&mut self.vm).map_err(refuse(what));
        }
        let refuse_agent = |why: String| {
            Refusal::bad(format!(
                "{what}: {why}; without it nobody can make a copy its own. Say \"refresh\": \"none\" \
                 if copies may share random numbers and ids."
            ))
        };
        if self.paused {
            return Err(refuse_agent("the machine is paused and its agent cannot answer".into()));
        }
        let socket = self.agent_socket().map_err(|refusal| refuse_agent(refusal.message))?;
        let agent = Agent::connect_control(socket, Instant::now() + AGENT_PATIENCE)
            .map_err(|error| refuse_agent(error.to_string()))?;
        let failed = |error: AgentError| Refusal::bad(format!("{what}: {error}"));
        agent.freeze_with(options, Instant::now() + AGENT_PATIENCE).map_err(failed)?;
        self.vm.settle(SETTLE_MAX);
        let done = act(&mut self.vm).map_err(refuse(what));
        // The original VM continues in any case; only its forks wait for a refresh.
        agent.thaw(Instant::now() + AGENT_PATIENCE).map_err(failed)?;
        done
    }

    /// Replaces the image behind a drive, or reopens the current one if its size has changed; sets
    /// limits.
    pub fn patch_drive(&mut self, update: DriveUpdate) -> Result<(), Refusal> {
        let DriveUpdate { drive_id, path_on_host, rate_limiter } = update;
        let place = self.config.drives.iter().position(|drive| drive.drive_id == drive_id);
        let Some(index) = place else {
            return Err(Refusal::bad(format!("Drive config: there is no drive {drive_id:?}.")));
        };
        if path_on_host.is_none() && rate_limiter.is_none() {
            let what = "Drive config: neither path_on_host nor rate_limiter is given.";
            return Err(Refusal::bad(what));
        }
        let drive = &mut self.config.drives[index];
        let limits =
            rate_limiter.map(|change| drive.rate_limiter.unwrap_or_default().changed_by(change));
        // Validated first: either the whole request takes effect or none of it.
        limits_of(limits)
            .validate()
            .map_err(|error| Refusal::bad(format!("Drive config: rate_limiter: {error}")))?;
        if let Some(path) = path_on_host {
            before_boot::check_image(&path, drive.read_only())?;
            let source = DriveSource::Path(before_boot::resolved(&path));
            self.vm.replace_drive(index, source).map_err(refuse("Drive config"))?;
            drive.path_on_host = Some(path);
        }
        if let Some(limits) = limits {
            self.vm.limit_drive(index, limits.config()).map_err(refuse("Drive config"))?;
            drive.rate_limiter = shown(limits);
        }
        Ok(())
    }

    /// Passes the metadata content to the network devices' metadata services.
    pub fn set_metadata(&self, mmds: &Mmds) -> Result<(), Refusal> {
        self.vm.set_metadata(&mmds.content()).map(drop).map_err(refuse("MMDS"))
    }

    /// Changes the rate limits of a network device; a bucket that is not named keeps its value.
    pub fn patch_net(&mut self, update: NetUpdate) -> Result<(), Refusal> {
        let NetUpdate { iface_id, rx_rate_limiter, tx_rate_limiter } = update;
        let place = self.config.network_interfaces.iter().position(|net| net.iface_id == iface_id);
        let Some(index) = place else {
            return Err(Refusal::bad(format!(
                "Network config: there is no interface {iface_id:?}."
            )));
        };
        let net = &mut self.config.network_interfaces[index];
        let changed = |old: Option<RateLimiter>, change: Option<RateLimiter>| {
            change.map(|change| old.unwrap_or_default().changed_by(change))
        };
        let rx = changed(net.rx_rate_limiter, rx_rate_limiter);
        let tx = changed(net.tx_rate_limiter, tx_rate_limiter);
        let config = |limits: Option<RateLimiter>| limits.map(RateLimiter::config);
        self.vm.limit_net(index, config(rx), config(tx)).map_err(refuse("Network config"))?;
        net.rx_rate_limiter = rx.map_or(net.rx_rate_limiter, shown);
        net.tx_rate_limiter = tx.map_or(net.tx_rate_limiter, shown);
        Ok(())
    }

    /// Presses Ctrl+Alt+Del on the guest's keyboard, which asks its kernel to restart.
    pub fn send_ctrl_alt_del(&self) {
        self.vm.press_ctrl_alt_del();
    }

    pub fn balloon(&self) -> Result<Balloon, Refusal> {
        self.config.balloon.clone().ok_or_else(no_balloon)
    }

    pub fn patch_balloon(&mut self, update: BalloonUpdate) -> Result<(), Refusal> {
        let balloon = self.config.balloon.as_mut().ok_or_else(no_balloon)?;
        if u64::from(update.amount_mib) > self.config.machine_config.mem_size_mib {
            return Err(Refusal::bad("Balloon config: amount_mib is more than the memory."));
        }
        let target = u64::from(update.amount_mib);
        self.vm.set_balloon(target).map_err(refuse("Balloon config"))?;
        balloon.amount_mib = update.amount_mib;
        Ok(())
    }

    pub fn patch_balloon_stats(&mut self, update: StatsUpdate) -> Result<(), Refusal> {
        let balloon = self.config.balloon.as_mut().ok_or_else(no_balloon)?;
        let (before, after) = (balloon.stats_polling_interval_s, update.stats_polling_interval_s);
        if (before == 0) != (after == 0) {
            let what = "Balloon config: statistics cannot be turned on or off after boot.";
            return Err(Refusal::bad(what));
        }
        balloon.stats_polling_interval_s = after;
        Ok(())
    }

    /// Returns the guest's current memory statistics, or its last ones if it does not answer.
    pub fn balloon_stats(&mut self) -> Result<BalloonStats, Refusal> {
        let balloon = self.config.balloon.as_ref().ok_or_else(no_balloon)?;
        if balloon.stats_polling_interval_s == 0 {
            let what =
                "Balloon: statistics were not enabled; set stats_polling_interval_s before boot.";
            return Err(Refusal::bad(what));
        }
        let target_mib = u64::from(balloon.amount_mib);
        let none = BalloonStats { target_mib, target_pages: target_mib << 8, ..Default::default() };
        if !self.paused {
            match self.vm.balloon_stats(STATS_PATIENCE) {
                Ok(told) => self.last_stats = Some(told.into()),
                // The guest has no driver yet, or is slow.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::GuestFault) => {}
                Err(error) => return Err(refuse("Balloon")(error)),
            }
        }
        Ok(self.last_stats.unwrap_or(none))
    }

    pub fn start_hinting(&mut self, start: HintingStart) -> Result<(), Refusal> {
        self.require_hinting()?;
        let hinting = self.vm.begin_hinting().map_err(refuse("Balloon"))?;
        self.hinting = Some(Search { hinting, acknowledge: start.acknowledge_on_stop });
        self.hint_status.host_cmd = self.hint_status.host_cmd.max(HINT_DONE) + 1;
        Ok(())
    }

    pub fn hinting_status(&mut self) -> Result<HintingStatus, Refusal> {
        self.require_hinting()?;
        if let Some(search) = &mut self.hinting
            && search.hinting.released().is_some()
        {
            self.hint_status.guest_cmd = Some(HINT_STOP);
            if search.acknowledge {
                self.stop_hinting()?;
            }
        }
        Ok(self.hint_status)
    }

    pub fn stop_hinting(&mut self) -> Result<(), Refusal> {
        self.require_hinting()?;
        self.vm.end_hinting().map_err(refuse("Balloon"))?;
        self.hinting = None;
        self.hint_status.host_cmd = HINT_DONE;
        Ok(())
    }

    fn require_hinting(&self) -> Result<(), Refusal> {
        if self.config.balloon.as_ref().ok_or_else(no_balloon)?.free_page_hinting {
            Ok(())
        } else {
            Err(Refusal::bad("Balloon: free_page_hinting was not enabled before boot."))
        }
    }

    /// Returns each device's counters, with the name that the metrics have for the device.
    pub fn named_counters(&self) -> Vec<(String, DeviceCounters)> {
        let mut drives = self.config.drives.iter();
        let mut nets = self.config.network_interfaces.iter();
        let name = |counters: &DeviceCounters| match counters.device {
            "block" => drives.next().map(|drive| format!("block_{}", drive.drive_id)),
            "net" => nets.next().map(|net| format!("net_{}", net.iface_id)),
            _ => None,
        };
        let counters = self.vm.device_counters();
        let names: Vec<_> = counters.iter().map(name).collect();
        let named = names.into_iter().zip(counters);
        named.map(|(name, of)| (name.unwrap_or_else(|| of.device.to_owned()), of)).collect()
    }

    /// Returns the vsock socket through which the agent is reached.
    pub fn agent_socket(&self) -> Result<&Path, Refusal> {
        self.vm.vsock_path().ok_or_else(|| Refusal::bad("The machine has no vsock device."))
    }
}

/// Returns `None` for a limiter without limits.
fn shown(limits: RateLimiter) -> Option<RateLimiter> {
    limits.config().is_limited().then_some(limits)
}

fn no_balloon() -> Refusal {
    Refusal::bad("Balloon: the machine has no balloon device.")
}

/// Maps an error of the VM to a refusal with one line of text.
pub fn refuse(what: &'static str) -> impl Fn(pvmm::Error) -> Refusal {
    move |error| Refusal::bad(format!("{what}: {error:#}"))
}
