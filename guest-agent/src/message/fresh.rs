//! Messages that make a copy of a guest unlike every other: freeze, refresh, thaw.
//! They are apart because only the host's control port takes them.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// Stops every process of the workload where it stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeze {
    /// Give up, and thaw again, after this long.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// Then write everything to the disks.
    #[serde(default)]
    pub sync: bool,
    /// Then give up clean pages of the page cache.
    #[serde(default)]
    pub drop_caches: bool,
}

/// The workload stands still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// Execs that are frozen now.
    pub execs: u32,
    /// A secret was delivered since the guest booted, so the guest's memory may hold it.
    #[serde(default)]
    pub secrets: bool,
}

/// Makes a guest that was copied its own: each part that is given is a step, taken in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refresh {
    /// Which copy this is; programs find it in a file and in their environment.
    pub generation: u64,
    /// Random bytes for the kernel's generator.
    #[serde(default)]
    pub entropy: ByteBuf,
    /// The time of day, in nanoseconds since 1970.
    #[serde(default)]
    pub unix_ns: Option<u64>,
    /// When that was, on the guest's time stamp counter; otherwise it is when the request arrives.
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
    /// Name servers; an empty list leaves none.
    #[serde(default)]
    pub dns: Option<Vec<String>>,
    /// Added to the environment of every later exec; replaces what an earlier refresh gave.
    #[serde(default)]
    pub env: Vec<(ByteBuf, ByteBuf)>,
    /// Files in `/run/pvmm/secrets`; replace those of an earlier refresh.
    #[serde(default)]
    pub secrets: Vec<(String, ByteBuf)>,
    /// Let the workload go on, if every step before was taken.
    #[serde(default)]
    pub thaw: bool,
}

impl Counter {
    /// The longest time that is believed to have passed.
    const LONGEST_NS: u64 = 60_000_000_000;

    /// The nanoseconds from this instant until the counter showed `now`; none if that cannot be.
    pub fn ns_until(&self, now: u64) -> u64 {
        let ticks = u128::from(now.saturating_sub(self.at));
        let ns = (ticks * 1_000_000).checked_div(self.khz.into()).unwrap_or(0);
        u64::try_from(ns).ok().filter(|ns| *ns <= Self::LONGEST_NS).unwrap_or(0)
    }
}

impl Refresh {
    /// The steps that this asks for. Their order is a promise: nothing that draws random numbers or looks at
    /// the time comes before those are fresh, and the workload comes last.
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
            (RefreshStep::Thaw, self.thaw),
        ];
        steps.into_iter().filter_map(|(step, wanted)| wanted.then_some(step)).collect()
    }
}

/// An instant on the guest's time stamp counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    pub at: u64,
    /// How fast it counts.
    pub khz: u32,
}

/// A network interface as it shall be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub name: String,
    /// Six bytes.
    #[serde(default)]
    pub mac: Option<ByteBuf>,
    #[serde(default)]
    pub mtu: Option<u32>,
    /// `ADDRESS/PREFIX`, of either family; all others are taken off.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Where the default route of its family leads.
    #[serde(default)]
    pub gateways: Vec<String>,
    /// Leave the addresses and routes that are there.
    #[serde(default)]
    pub keep_addresses: bool,
}

/// The steps of a refresh, in the order in which they are taken.
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
    Thaw,
    /// A step of a later version.
    #[serde(other)]
    Other,
}

/// What a refresh did: with a failed step, the workload stands still.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refreshed {
    pub steps: Vec<RefreshStep>,
    #[serde(default)]
    pub failed: Option<FailedStep>,
}

/// The step that could not be taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedStep {
    pub step: RefreshStep,
    #[serde(default)]
    pub errno: Option<i32>,
    #[serde(default)]
    pub message: String,
}
