//! Messages that make a fork of a guest unlike every other: freeze, refresh, thaw.
//!
//! They are separate because only the host's control port accepts them.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// Stops every process of the workload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeze {
    /// Time after which the freeze fails and the workload is thawed again.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// After the freeze, write all dirty data to the disks.
    #[serde(default)]
    pub sync: bool,
    /// After the freeze, drop clean pages of the page cache.
    #[serde(default)]
    pub drop_caches: bool,
}

/// The answer to a successful freeze.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenWorkload {
    /// The number of frozen execs.
    pub execs: u32,
    /// A secret was delivered since the guest booted, so guest memory may contain it.
    #[serde(default)]
    pub secrets: bool,
}

/// Refreshes a fork: each part that is given is a step, carried out in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refresh {
    /// The number of this fork; programs find it in a file and in their environment.
    pub generation: u64,
    /// Random bytes for the kernel's random number generator.
    #[serde(default)]
    pub entropy: ByteBuf,
    /// The time of day, in nanoseconds since 1970.
    #[serde(default)]
    pub unix_ns: Option<u64>,
    /// The value of the guest's time stamp counter at `unix_ns`; without it, `unix_ns` is the time
    /// at which the request arrives.
    #[serde(default)]
    pub counter: Option<Counter>,
    #[serde(default)]
    pub hostname: Option<String>,
    /// 16 bytes.
    #[serde(default)]
    pub machine_id: Option<ByteBuf>,
    /// 16 bytes, from which a random UUID is made.
    #[serde(default)]
    pub boot_id: Option<ByteBuf>,
    #[serde(default)]
    pub interfaces: Vec<Interface>,
    /// Name servers; an empty list removes all.
    #[serde(default)]
    pub dns: Option<Vec<String>>,
    /// Added to the environment of every later exec; replaces the variables of an earlier refresh.
    #[serde(default)]
    pub env: Vec<(ByteBuf, ByteBuf)>,
    /// Files in `/run/pvmm/secrets`; they replace those of an earlier refresh.
    #[serde(default)]
    pub secrets: Vec<(String, ByteBuf)>,
    /// An authority for the guest's trust stores, and variables; they stay until another refresh
    /// has this field.
    #[serde(default)]
    pub trust: Option<Trust>,
    /// Thaw the workload, if every step before succeeded.
    #[serde(default)]
    pub thaw: bool,
}

impl Counter {
    /// The longest plausible time since the mark.
    const LONGEST_NS: u64 = 60_000_000_000;

    /// Returns the nanoseconds from this mark until the counter value `now`; zero if that is not
    /// plausible.
    pub fn ns_until(&self, now: u64) -> u64 {
        let ticks = u128::from(now.saturating_sub(self.at));
        let ns = (ticks * 1_000_000).checked_div(self.khz.into()).unwrap_or(0);
        u64::try_from(ns).ok().filter(|ns| *ns <= Self::LONGEST_NS).unwrap_or(0)
    }
}

impl Refresh {
    /// Returns the requested steps. Their order is guaranteed: nothing that uses random numbers or
    /// the time comes before those are fresh, and the workload is thawed last.
    pub fn steps(&self) -> Vec<RefreshStep> {
        let steps = [
            (RefreshStep::Entropy, true),
            (RefreshStep::Clock, self.unix_ns.is_some()),
            (RefreshStep::Hostname, self.hostname.is_some()),
            (RefreshStep::MachineId, self.machine_id.is_some()),
            (RefreshStep::BootId, self.boot_id.is_some()),
            (RefreshStep::Addresses, !self.interfaces.is_empty() || self.dns.is_some()),
            (RefreshStep::Generation, true),
            (RefreshStep::Env, true),
            (RefreshStep::Trust, self.trust.is_some()),
            (RefreshStep::Thaw, self.thaw),
        ];
        steps.into_iter().filter_map(|(step, wanted)| wanted.then_some(step)).collect()
    }
}

/// An authority whose certificates the guest is to accept.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// PEM of the authority's certificate.
    pub certificate: ByteBuf,
    /// Added to the environment of every later exec, beside variables that name the trust stores.
    #[serde(default)]
    pub env: Vec<(ByteBuf, ByteBuf)>,
}

/// A moment on the guest's time stamp counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    pub at: u64,
    /// The rate of the counter.
    pub khz: u32,
}

/// The configuration of a network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub name: String,
    /// Six bytes.
    #[serde(default)]
    pub mac: Option<ByteBuf>,
    #[serde(default)]
    pub mtu: Option<u32>,
    /// `ADDRESS/PREFIX`, of either family; all other addresses are removed.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// The gateways of the default routes, one per family.
    #[serde(default)]
    pub gateways: Vec<String>,
    /// Keep the existing addresses and routes.
    #[serde(default)]
    pub keep_addresses: bool,
}

/// The steps of a refresh, in the order in which they are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefreshStep {
    Entropy,
    Clock,
    Hostname,
    MachineId,
    BootId,
    Addresses,
    Generation,
    Env,
    Trust,
    Thaw,
    /// A step of a later version.
    #[serde(other)]
    Other,
}

/// The result of a refresh: after a failed step, the workload stays frozen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refreshed {
    pub steps: Vec<RefreshStep>,
    #[serde(default)]
    pub failed: Option<FailedStep>,
}

/// The step that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedStep {
    pub step: RefreshStep,
    #[serde(default)]
    pub errno: Option<i32>,
    #[serde(default)]
    pub message: String,
}
