//! Freezes a guest's workload before a fork, and refreshes the fork afterwards.
//!
//! Every restore waits for the refresh, so its request is sent together with the hello: one round
//! trip in all.

use std::ffi::OsStr;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use pvmm_guest_agent::limits::CONTROL_PORT;
use pvmm_guest_agent::message::{self, Answer, ByteBuf, Counter, Outcome, Request};
use pvmm_guest_agent::{Kind, encode};

pub use pvmm_guest_agent::message::{FrozenWorkload, RefreshStep};

use super::connection::Connection;
use super::stream::{Event, StreamRef};
use super::{Agent, AgentError, dial};
use crate::kvm::state::ClockMark;
use crate::{sys, trace};

/// Bytes of entropy for the guest kernel's random number generator.
const ENTROPY_BYTES: usize = 256;
/// The part of a deadline that is reserved for the way to the guest.
const WAY: Duration = Duration::from_millis(20);
/// The largest accepted age of a clock mark. The rate of the guest's counter is a measurement with
/// an error of up to one percent.
const MARK_AGE: Duration = Duration::from_secs(2);

/// Additional steps of a freeze.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FreezeOptions {
    /// Write all dirty data to the disks.
    pub sync: bool,
    /// Drop clean pages of the page cache, so that they need not be saved.
    pub drop_caches: bool,
    /// Freeze a guest even if a secret was delivered to it: every fork then knows the secret too.
    pub keep_secrets: bool,
}

/// The new identity of a fork. Random numbers, machine-id and boot-id are new with each `new`; the
/// time is taken when the request is sent.
#[derive(Clone)]
pub struct Refresh {
    wire: message::Refresh,
    sets_clock: bool,
    mark: Option<ClockMark>,
}

/// The configuration of a network interface in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// The name of the interface in the guest, 1 to 15 bytes.
    pub name: String,
    /// The new hardware address, which is no group address; `None` keeps the old one.
    pub mac: Option<[u8; 6]>,
    /// The new MTU in bytes; `None` keeps the old one.
    pub mtu: Option<u32>,
    /// Addresses and their prefix lengths; all other addresses are removed.
    pub addresses: Vec<(IpAddr, u8)>,
    /// The gateways of the default routes, one per family; they replace all earlier ones.
    pub gateways: Vec<IpAddr>,
    /// Keep the existing addresses and routes. An interface that also keeps its hardware address
    /// need not exist.
    pub keep_addresses: bool,
}

impl Refresh {
    /// Creates a new identity. Applying it thaws the workload.
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

    /// Sets the host name: 1 to 64 ASCII letters, digits, `.`, `-` or `_`.
    pub fn hostname(mut self, name: impl Into<String>) -> Self {
        self.wire.hostname = Some(name.into());
        self
    }

    /// Adds an interface to configure; at most 16.
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

    /// Sets the name servers, replacing all others.
    pub fn dns(mut self, servers: &[IpAddr]) -> Self {
        self.wire.dns = Some(servers.iter().map(IpAddr::to_string).collect());
        self
    }

    /// Adds a variable to the environment of every later exec.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        let bytes = |text: &OsStr| ByteBuf::from(text.as_bytes());
        self.wire.env.push((bytes(name.as_ref()), bytes(value.as_ref())));
        self
    }

    /// Adds a file in `/run/pvmm/secrets` that only root can read. A guest that has received one is
    /// frozen only with [`FreezeOptions::keep_secrets`], since its forks would have it too.
    pub fn secret(mut self, name: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.wire.secrets.push((name.into(), ByteBuf::from(value.into())));
        self
    }

    /// Adds an authority (PEM) to the guest's trust stores, and variables to the environment of
    /// every later exec. Both stay until another refresh has an authority.
    pub fn trust<'a>(
        mut self,
        certificate: &str,
        env: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Self {
        let bytes = |text: &str| ByteBuf::from(text.as_bytes());
        let env = env.into_iter().map(|(name, value)| (bytes(name), bytes(value))).collect();
        self.wire.trust = Some(message::Trust { certificate: bytes(certificate), env });
        self
    }

    /// Leaves the workload frozen or running as it is.
    pub fn without_thaw(mut self) -> Self {
        self.wire.thaw = false;
        self
    }

    /// Sets the guest's clock by its own counter, which showed `mark` when the guest was resumed.
    pub(crate) fn clock_mark(mut self, mark: Option<ClockMark>) -> Self {
        self.mark = mark;
        self
    }

    /// Leaves the time of day unchanged.
    pub fn without_clock(mut self) -> Self {
        self.sets_clock = false;
        self
    }

    /// Leaves machine-id and boot-id unchanged.
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
    /// Does not print secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Refresh").field("generation", &self.wire.generation).finish_non_exhaustive()
    }
}

impl Agent {
    /// Connects to the agent's control port, which serves all requests and also freeze, refresh and
    /// thaw.
    pub fn connect_control(uds: &Path, deadline: Instant) -> Result<Self, AgentError> {
        let (socket, welcome) = dial::connect(uds, CONTROL_PORT, &[], deadline)?;
        Ok(Self { connection: Connection::new(socket, welcome)? })
    }

    /// Connects to the agent of a new fork and refreshes it, in one exchange. When this returns,
    /// the workload runs; when it fails, the workload is still frozen and the guest must not be
    /// used.
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

    /// Stops every process of the workload, so that the guest can be forked. Fails if a process
    /// cannot be stopped by the deadline, which then runs on, or if a secret was delivered to the
    /// guest.
    pub fn freeze(&self, deadline: Instant) -> Result<FrozenWorkload, AgentError> {
        self.freeze_with(FreezeOptions::default(), deadline)
    }

    /// Stops every process of the workload like [`Self::freeze`], with additional steps.
    pub fn freeze_with(
        &self,
        options: FreezeOptions,
        deadline: Instant,
    ) -> Result<FrozenWorkload, AgentError> {
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

    /// Lets a frozen workload run again, without a refresh.
    pub fn thaw(&self, deadline: Instant) -> Result<(), AgentError> {
        match self.ask(&Request::Thaw {}, deadline)? {
            Answer::Done {} => Ok(()),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Refreshes a fork and returns the completed steps in order.
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

/// Waits until every requested step is acknowledged. A step that the agent leaves out, because it
/// does not know it or lies, counts as failed.
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
