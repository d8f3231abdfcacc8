//! A machine that lives: what may be asked of it, running or paused.

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
use super::mmds::Mmds;

/// How long a guest may take to say how its memory is; a client waits, and every other client with it.
const STATS_PATIENCE: Duration = Duration::from_millis(200);
/// How long the agent of a copy may take to make it its own.
const REFRESH_PATIENCE: Duration = Duration::from_secs(10);
/// How long an agent may take to be found and to stop its workload, and to let it go on.
const AGENT_PATIENCE: Duration = Duration::from_secs(10);
/// Commands of the search for free pages: none yet, and the pages of the last one may be used.
const HINT_STOP: u32 = 0;
const HINT_DONE: u32 = 1;

pub struct Running {
    pub vm: Vm,
    pub config: Config,
    paused: bool,
    /// What the agent must be told before the workload may run.
    owed: Option<Owed>,
    /// Counts the lives of this machine, for its guest to see.
    generation: u64,
    last_stats: Option<BalloonStats>,
    hinting: Option<Search>,
    hint_status: HintingStatus,
}

/// Why a machine must be refreshed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owed {
    /// It is a copy, and gets names of its own.
    Copied,
    /// It is the same computer, only earlier: its names stay, its clock and its dice do not.
    RolledBack,
}

/// A search for free pages, and whether it ends by itself.
struct Search {
    hinting: Hinting,
    acknowledge: bool,
}

impl Running {
    /// Takes charge of a machine that stands still.
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
        }
    }

    /// The agent makes it its own before anything of the workload runs.
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
        self.settle("Resume")
    }

    /// Makes the running machine its own, if that is owed; it stands still where that cannot be done.
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

    /// Remembers this instant.
    pub fn checkpoint(&mut self, refresh: RefreshBy) -> Result<(), Refusal> {
        // Nobody but the machine itself goes on from here, so it may know its secrets.
        let options = FreezeOptions { keep_secrets: true, ..FreezeOptions::default() };
        self.standing_still("Checkpoint", refresh, options, Vm::checkpoint)
    }

    /// Goes back to the checkpoint. What is owed to a machine that is paused is done when it is resumed.
    pub fn rollback(&mut self, refresh: RefreshBy) -> Result<(), Refusal> {
        self.vm.rollback().map_err(refuse("Rollback"))?;
        self.generation += 1;
        self.owed = (refresh == RefreshBy::Agent).then_some(Owed::RolledBack);
        if self.paused { Ok(()) } else { self.settle("Rollback") }
    }

    /// Does something while the agent holds the workload still, so that whoever goes on from there is
    /// refreshed before any of its processes runs an instruction. Refused where no agent does that, unless
    /// the client wants no refresh.
    pub fn standing_still<T>(
        &mut self,
        what: &'static str,
        by: RefreshBy,
        options: FreezeOptions,
        act: impl FnOnce(&mut Vm) -> Result<T, pvmm::Error>,
    ) -> Result<T, Refusal> {
        if by == RefreshBy::None {
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
        let done = act(&mut self.vm).map_err(refuse(what));
        // The machine of before goes on in any case; only its copies wait for their refresh.
        agent.thaw(Instant::now() + AGENT_PATIENCE).map_err(failed)?;
        done
    }

    /// Another image behind a drive, or the same one again if its size has changed; other limits.
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
        // Nothing is changed if a part of the request cannot be.
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

    /// Tells the metadata services of the cards what to say from now on.
    pub fn set_metadata(&self, mmds: &Mmds) -> Result<(), Refusal> {
        self.vm.set_metadata(&mmds.content()).map(drop).map_err(refuse("MMDS"))
    }

    /// Other limits of a network card; a bucket that is not named stays as it is.
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

    /// Presses the three keys by which a keyboard asks a machine to restart.
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

    /// What the guest says now, or else what it said last.
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
                // It has no driver yet, or takes its time.
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
        match self.config.balloon.as_ref().ok_or_else(no_balloon)?.free_page_hinting {
            true => Ok(()),
            false => Err(Refusal::bad("Balloon: free_page_hinting was not enabled before boot.")),
        }
    }

    /// Each device's counts by the name that metrics have for it.
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

    /// The socket that leads to the agent.
    pub fn agent_socket(&self) -> Result<&Path, Refusal> {
        self.vm.vsock_path().ok_or_else(|| Refusal::bad("The machine has no vsock device."))
    }
}

/// A limiter without limits is none.
fn shown(limits: RateLimiter) -> Option<RateLimiter> {
    limits.config().is_limited().then_some(limits)
}

fn no_balloon() -> Refusal {
    Refusal::bad("Balloon: the machine has no balloon device.")
}

/// An error of the machine in one line.
pub fn refuse(what: &'static str) -> impl Fn(pvmm::Error) -> Refusal {
    move |error| Refusal::bad(format!("{what}: {error}"))
}
