//! Freezing a guest's workload before it is copied, and making the copy its own afterwards.
//! Every restore waits for this, so the refresh travels with the hello: one way there, one back.

use std::ffi::OsStr;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use pvmm_guest_agent::limits::CONTROL_PORT;
use pvmm_guest_agent::message::{self, Answer, ByteBuf, Counter, Outcome, Request};
use pvmm_guest_agent::{Kind, encode};

pub use pvmm_guest_agent::message::{Frozen, RefreshStep};

use super::connection::Connection;
use super::stream::{Event, StreamRef};
use super::{Agent, AgentError, dial};
use crate::kvm::state::ClockMark;
use crate::{Vm, sys, trace};

/// What the kernel's generator is fed with.
const ENTROPY_BYTES: usize = 256;
/// What the way to the guest may take of a deadline that the guest is told.
const WAY: Duration = Duration::from_millis(20);
/// How old a mark of the guest's counter may be. Its rate is a measurement, off by up to a hundredth.
const MARK_AGE: Duration = Duration::from_secs(2);

/// What to do beside freezing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FreezeOptions {
    /// Write everything to the disks.
    pub sync: bool,
    /// Give up clean pages of the page cache, so that they need not be saved.
    pub drop_caches: bool,
    /// Freeze a guest also if a secret was delivered to it: every copy then knows that too.
    pub keep_secrets: bool,
}

/// Who a copy of a guest is. Random numbers, machine-id and boot-id are new with each `new`; the
/// time is taken when it is sent.
#[derive(Clone)]
pub struct Refresh {
    wire: message::Refresh,
    sets_clock: bool,
    mark: Option<ClockMark>,
}

/// A network interface as it shall be in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub mac: Option<[u8; 6]>,
    pub mtu: Option<u32>,
    /// Addresses and their prefix lengths; all others are taken off.
    pub addresses: Vec<(IpAddr, u8)>,
    pub gateways: Vec<IpAddr>,
    /// Leave the addresses and routes that are there. An interface that is to keep these and its hardware
    /// address need not exist.
    pub keep_addresses: bool,
}

impl Refresh {
    /// A new identity; the workload is thawed by it.
    pub fn new(generation: u64) -> Result<Self, AgentError> {
        let random = |len| {
            let mut bytes = vec![0; len];
            sys::fill_random(&mut bytes).map_err(AgentError::Random)?;
            Ok::<_, AgentError>(ByteBuf::from(bytes))
        };
        let wire = message::Refresh {
            generation,
            entropy: random(ENTROPY_BYTES)?,
            machine_id: Some(random(16)?),
            boot_id: Some(random(16)?),
            thaw: true,
            ..message::Refresh::default()
        };
        Ok(Self { wire, sets_clock: true, mark: None })
    }

    pub fn hostname(mut self, name: impl Into<String>) -> Self {
        self.wire.hostname = Some(name.into());
        self
    }

    pub fn interface(mut self, interface: &Interface) -> Self {
        self.wire.interfaces.push(message::Interface {
            name: interface.name.clone(),
            mac: interface.mac.map(ByteBuf::from),
            mtu: interface.mtu,
            addresses: interface.addresses.iter().map(|(ip, len)| format!("{ip}/{len}")).collect(),
            gateways: interface.gateways.iter().map(IpAddr::to_string).collect(),
            keep_addresses: interface.keep_addresses,
        });
        self
    }

    /// The name servers, and no others.
    pub fn dns(mut self, servers: &[IpAddr]) -> Self {
        self.wire.dns = Some(servers.iter().map(IpAddr::to_string).collect());
        self
    }

    /// Adds to the environment of every later exec.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        let bytes = |text: &OsStr| ByteBuf::from(text.as_bytes());
        self.wire.env.push((bytes(name.as_ref()), bytes(value.as_ref())));
        self
    }

    /// A file in `/run/pvmm/secrets` that only root reads. A guest that had one is frozen only with
    /// [`FreezeOptions::keep_secrets`], since its copies would have it too.
    pub fn secret(mut self, name: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.wire.secrets.push((name.into(), ByteBuf::from(value.into())));
        self
    }

    /// Leaves the workload as it is.
    pub fn without_thaw(mut self) -> Self {
        self.wire.thaw = false;
        self
    }

    /// Tells the time by the counter of this machine, so that the way to the guest does not make it late. For
    /// a machine that was just resumed.
    pub fn clock_of(mut self, vm: &Vm) -> Self {
        self.mark = vm.clock_mark;
        self
    }

    /// Leaves the time of day as it is.
    pub fn without_clock(mut self) -> Self {
        self.sets_clock = false;
        self
    }

    /// Leaves machine-id and boot-id as they are.
    pub fn without_ids(mut self) -> Self {
        (self.wire.machine_id, self.wire.boot_id) = (None, None);
        self
    }

    fn request(&self) -> message::Refresh {
        let mut wire = self.wire.clone();
        if self.sets_clock {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let now = now.ok().map(|since| since.as_nanos() as u64);
            let is_young = |mark: &ClockMark| {
                let age = now.unwrap_or(0).checked_sub(mark.unix_ns);
                age.is_some_and(|age| Duration::from_nanos(age) < MARK_AGE)
            };
            let mark = self.mark.filter(is_young);
            wire.unix_ns = mark.map(|mark| mark.unix_ns).or(now);
            wire.counter = mark.map(|mark| Counter { at: mark.counter, khz: mark.khz });
        }
        wire
    }
}

impl std::fmt::Debug for Refresh {
    /// Without what must stay secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Refresh").field("generation", &self.wire.generation).finish_non_exhaustive()
    }
}

impl Agent {
    /// Reaches the agent's control port, which serves everything and also takes freeze, refresh
    /// and thaw.
    pub fn connect_control(uds: &Path, deadline: Instant) -> Result<Self, AgentError> {
        let (socket, welcome) = dial::connect(uds, CONTROL_PORT, &[], deadline)?;
        Ok(Self { connection: Connection::new(socket, welcome)? })
    }

    /// Reaches a guest that was just copied and makes it its own, in one exchange. When this
    /// returns, the workload runs; when it fails, the workload stands still and the guest must not
    /// be handed out.
    pub fn connect_refreshed(
        uds: &Path,
        refresh: &Refresh,
        deadline: Instant,
    ) -> Result<Self, AgentError> {
        let (mut open, wire) = (Vec::new(), refresh.request());
        let steps = wire.steps();
        let request = Request::Refresh(Box::new(wire));
        encode(&mut open, Kind::Open, Connection::FIRST_STREAM, &request)
            .map_err(AgentError::Encode)?;
        let (socket, welcome) = dial::connect(uds, CONTROL_PORT, &open, deadline)?;
        trace::step("welcome");
        let connection = Connection::new(socket, welcome)?;
        let stream = StreamRef::opened_before(&connection)?;
        let agent = Self { connection };
        settle(&stream, &steps, deadline)?;
        trace::step("refreshed");
        Ok(agent)
    }

    /// Stops every process of the workload where it stands, so that the guest can be copied. What
    /// cannot be stopped by the deadline runs on, and this fails; so does that of a guest to which a
    /// secret was delivered.
    pub fn freeze(&self, deadline: Instant) -> Result<Frozen, AgentError> {
        self.freeze_with(FreezeOptions::default(), deadline)
    }

    pub fn freeze_with(
        &self,
        options: FreezeOptions,
        deadline: Instant,
    ) -> Result<Frozen, AgentError> {
        let left = deadline.saturating_duration_since(Instant::now()).saturating_sub(WAY);
        let request = Request::Freeze(message::Freeze {
            timeout_ms: Some(left.as_millis() as u64),
            sync: options.sync,
            drop_caches: options.drop_caches,
        });
        match self.ask(&request, deadline)? {
            Answer::Frozen(frozen) if frozen.secrets && !options.keep_secrets => {
                self.thaw(deadline)?;
                Err(AgentError::HoldsSecrets)
            }
            Answer::Frozen(frozen) => Ok(frozen),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Lets the workload go on as it was.
    pub fn thaw(&self, deadline: Instant) -> Result<(), AgentError> {
        match self.ask(&Request::Thaw {}, deadline)? {
            Answer::Done {} => Ok(()),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Makes a copied guest its own; the steps that were taken, in their order.
    pub fn refresh(
        &self,
        refresh: &Refresh,
        deadline: Instant,
    ) -> Result<Vec<RefreshStep>, AgentError> {
        let wire = refresh.request();
        let steps = wire.steps();
        settle(&self.open(&Request::Refresh(Box::new(wire)))?, &steps, deadline)
    }
}

/// Waits until every step that was asked for is acknowledged; one that the agent passed over in silence,
/// because it does not know it or lies, is as good as failed.
fn settle(
    stream: &StreamRef,
    asked: &[RefreshStep],
    deadline: Instant,
) -> Result<Vec<RefreshStep>, AgentError> {
    loop {
        match stream.next(Some(deadline))? {
            Some(Event::Done(Outcome::Ok(Answer::Refreshed(report)))) => {
                return match report.failed {
                    None => match asked.iter().find(|step| !report.steps.contains(step)) {
                        None => Ok(report.steps),
                        Some(step) => {
                            let why = "it was not acknowledged".to_owned();
                            Err(AgentError::NotRefreshed { step: *step, why })
                        }
                    },
                    Some(failed) => {
                        let why: String = failed.message.chars().take(256).collect();
                        let why = why.escape_debug().to_string();
                        Err(AgentError::NotRefreshed { step: failed.step, why })
                    }
                };
            }
            Some(Event::Done(Outcome::Ok(_))) => return Err(AgentError::WrongAnswer),
            Some(Event::Done(Outcome::Failed(failure))) => return Err(failure.into()),
            Some(Event::Data(..)) => {}
            None => return Err(AgentError::Overdue),
        }
    }
}
