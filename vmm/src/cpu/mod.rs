//! Processor baselines: the features that a guest is offered of those that its host has.
//!
//! A guest determines its processor's features once, so a snapshot fits only hosts that have them
//! all. A VM that is made for a baseline is offered no more than that, and its snapshots fit every
//! host that has the baseline. Nothing here needs KVM: CPUID leaves go in and come out.
//!
//! | file | contents |
//! | --- | --- |
//! | `level.rs` | the levels of the x86-64 psABI: features, CPUID leaves and MSRs that are left |
//! | `modifiers.rs` | single bits of CPUID leaves and MSRs that are cleared or set |
//! | `template_file.rs` | the JSON of Firecracker's custom CPU templates, read as modifiers |

mod level;
mod modifiers;
mod template_file;

use kvm_bindings::kvm_cpuid_entry2;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
pub use level::CpuLevel;
pub(crate) use level::PHYSICAL_BITS;
pub use modifiers::{Bitmap, CpuModifiers, CpuidModifier, CpuidRegister, MsrModifier};
pub use template_file::TEMPLATE_FILE_MAX;

/// The values of EAX, EBX, ECX and EDX.
type Registers = [u32; 4];

const FEATURES: u32 = 0x1;
const STRUCTURED_FEATURES: u32 = 0x7;
const EXTENDED_STATE: u32 = 0xd;
const KVM_FEATURES: u32 = 0x4000_0001;
const EXTENDED_FEATURES: u32 = 0x8000_0001;
const ADDRESS_SIZES: u32 = 0x8000_0008;

/// The extended save area of x87 and SSE with its header; other parts lie behind it.
const LEGACY_AREA: u32 = 576;

/// The processor features that a guest is offered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CpuBaseline {
    /// Everything that KVM offers on this host. A snapshot fits hosts with the same processor
    /// model.
    #[default]
    Host,
    /// The features of a level of the x86-64 psABI, and what every guest of KVM needs. A snapshot
    /// fits every host of the same vendor that has the level.
    Level(CpuLevel),
    /// The features that KVM offers on this host, with some bits cleared or set.
    Modified(CpuModifiers),
}

/// A baseline that cannot be read, or that this host cannot provide.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CpuError {
    /// The host lacks a feature of the baseline.
    #[error(
        "processor baseline {baseline} needs {feature}, which this host lacks; use a lower \
         baseline, or a host that has it"
    )]
    Missing {
        /// The name of the baseline.
        baseline: &'static str,
        /// The name of the feature, or the leaf and register of its bit.
        feature: String,
    },
    /// KVM has no such leaf on this host.
    #[error("cpuid_modifiers: KVM has no leaf {leaf:#x}.{subleaf:#x} on this host; leave it out")]
    Leaf {
        /// The leaf.
        leaf: u32,
        /// The sub-leaf.
        subleaf: u32,
    },
    /// KVM does not save and restore this MSR on this host.
    #[error("msr_modifiers: KVM does not keep register {0:#x} on this host; leave it out")]
    Msr(u32),
    /// KVM lacks a capability that the baseline requires.
    #[error("kvm_capabilities: this host's KVM has no capability {0}; use another host")]
    Capability(u32),
    /// A field of a CPU template cannot be accepted.
    #[error("{field}: {why}")]
    Field {
        /// The place of the field, such as `cpuid_modifiers[0].leaf`.
        field: String,
        /// The reason.
        why: String,
    },
}

impl CpuError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Field { .. } => ErrorKind::InvalidConfig,
            Self::Missing { .. } | Self::Leaf { .. } | Self::Msr(_) | Self::Capability(_) => {
                ErrorKind::HostUnsupported
            }
        }
    }
}

impl From<CpuError> for Error {
    fn from(error: CpuError) -> Self {
        Self::new(error.kind(), "cpu", error)
    }
}

impl CpuBaseline {
    /// The name of a baseline that was read from a file.
    pub const CUSTOM: &str = "custom";

    /// Returns the baseline of a name: `host`, or that of a level such as `x86-64-v2`.
    pub fn named(name: &str) -> Option<Self> {
        if name == "host" {
            return Some(Self::Host);
        }
        CpuLevel::ALL.into_iter().find(|level| level.name() == name).map(Self::Level)
    }

    /// Returns the name that `--cpu` takes; `custom` for one that was read from a file.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Level(level) => level.name(),
            Self::Modified(_) => Self::CUSTOM,
        }
    }

    /// Returns whether the guest is offered everything.
    pub fn is_host(&self) -> bool {
        *self == Self::Host
    }

    /// Returns a text that differs between any two baselines, for keys of caches.
    pub fn key(&self) -> String {
        match self {
            Self::Modified(modifiers) => format!("{} {modifiers:?}", Self::CUSTOM),
            named => named.name().to_owned(),
        }
    }

    /// Returns the leaves that a guest is offered of those that KVM supports. Fails if the host
    /// lacks something of the baseline.
    pub(crate) fn offered(
        &self,
        supported: &[kvm_cpuid_entry2],
    ) -> Result<Vec<kvm_cpuid_entry2>, CpuError> {
        let mut entries = supported.to_vec();
        match self {
            Self::Host => return Ok(entries),
            Self::Level(level) => {
                level.check(supported)?;
                level.mask(&mut entries);
            }
            Self::Modified(modifiers) => modifiers.apply(&mut entries)?,
        }
        fit_extended_state(&mut entries);
        Ok(entries)
    }

    /// Clears in saved leaves what boot has cleared. A snapshot is an untrusted file: a guest must
    /// not get back through it what its baseline removes.
    pub(crate) fn mask(&self, saved: &mut [kvm_cpuid_entry2]) {
        match self {
            Self::Host => return,
            Self::Level(level) => level.mask(saved),
            Self::Modified(modifiers) => modifiers.clear(saved),
        }
        fit_extended_state(saved);
    }

    /// Returns whether an MSR belongs to a guest with this baseline. The registers of features that
    /// the guest was never offered are not saved, so that no host has to know them.
    pub(crate) fn has_msr(&self, index: u32) -> bool {
        match self {
            Self::Level(_) => level::has_msr(index),
            Self::Host | Self::Modified(_) => true,
        }
    }

    /// Returns the bits of a leaf that the guest is told whether or not the host has them: those
    /// that describe a processor rather than enable an instruction.
    pub(crate) fn asserted(&self, function: u32, index: u32) -> Registers {
        match self {
            Self::Modified(modifiers) => modifiers.asserted(function, index),
            Self::Host | Self::Level(_) => [0; 4],
        }
    }

    /// Returns the bits of an MSR that the guest is told whether or not the host has them.
    pub(crate) fn asserted_msr(&self, index: u32) -> u64 {
        let modified = self.msr_modifiers().iter().find(|modifier| modifier.address == index);
        modified.map_or(0, |modifier| modifier.bitmap.set)
    }

    /// Returns the MSRs that are changed before the guest's first instruction.
    pub(crate) fn msr_modifiers(&self) -> &[MsrModifier] {
        match self {
            Self::Modified(modifiers) => &modifiers.msrs,
            Self::Host | Self::Level(_) => &[],
        }
    }

    /// Returns the capabilities that KVM must have.
    pub(crate) fn capabilities(&self) -> &[u32] {
        match self {
            Self::Modified(modifiers) => &modifiers.capabilities,
            Self::Host | Self::Level(_) => &[],
        }
    }

    /// Refuses more than a baseline can have, in one that comes from a file.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::Modified(modifiers) => modifiers.check(),
            Self::Host | Self::Level(_) => Ok(()),
        }
    }
}

/// Modifiers that change nothing are none, so that a snapshot is bound to its host as usual.
impl From<CpuModifiers> for CpuBaseline {
    fn from(modifiers: CpuModifiers) -> Self {
        if modifiers.is_empty() { Self::Host } else { Self::Modified(modifiers) }
    }
}

/// Returns the bits of a leaf that pvmm or KVM writes for each vCPU, after the baseline: the
/// topology, the sizes of extended state, and features that KVM supplies on every processor.
fn own(function: u32, index: u32) -> Registers {
    const X2APIC: u32 = 1 << 21;
    const TSC_DEADLINE: u32 = 1 << 24;
    const OSXSAVE: u32 = 1 << 27;
    const HYPERVISOR: u32 = 1 << 31;
    const HYPER_THREADING: u32 = 1 << 28;
    const OSPKE: u32 = 1 << 4;
    const CMP_LEGACY: u32 = 1 << 1;
    const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
    match (function, index) {
        (FEATURES, _) => {
            [0, u32::MAX, X2APIC | TSC_DEADLINE | OSXSAVE | HYPERVISOR, HYPER_THREADING]
        }
        (0x4 | 0xb | 0x1f | 0x8000_001d | 0x8000_001e, _) => [u32::MAX; 4],
        (STRUCTURED_FEATURES, 0) => [0, 0, OSPKE, 0],
        (EXTENDED_STATE, 0) => [0, u32::MAX, u32::MAX, 0],
        (EXTENDED_STATE, 1) => [0, u32::MAX, 0, 0],
        (EXTENDED_FEATURES, _) => [0, 0, CMP_LEGACY | TOPOLOGY_EXTENSIONS, 0],
        (ADDRESS_SIZES, _) => [0, 0, u32::MAX, 0],
        _ => [0; 4],
    }
}

/// Makes the leaves of extended state agree with the parts that are left: no leaf of another part,
/// and a save area that ends with the last part.
fn fit_extended_state(entries: &mut [kvm_cpuid_entry2]) {
    let state = |index: u32| {
        move |entry: &&kvm_cpuid_entry2| entry.function == EXTENDED_STATE && entry.index == index
    };
    let wide = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let parts = entries.iter().find(state(0)).map_or(0, |leaf| wide(leaf.eax, leaf.edx));
    let supervisor = entries.iter().find(state(1)).map_or(0, |leaf| wide(leaf.ecx, leaf.edx));
    let mut size = if parts == 0 { 0 } else { LEGACY_AREA };
    for leaf in entries.iter_mut().filter(|entry| entry.function == EXTENDED_STATE) {
        if (2..64).contains(&leaf.index) {
            if parts >> leaf.index & 1 == 1 {
                size = size.max(leaf.ebx.saturating_add(leaf.eax));
            } else if supervisor >> leaf.index & 1 == 0 {
                set_registers(leaf, [0; 4]);
            }
        }
    }
    let first =
        entries.iter_mut().find(|entry| entry.function == EXTENDED_STATE && entry.index == 0);
    if let Some(leaf) = first {
        // KVM keeps EBX, the size of what is switched on, up to date while a guest runs.
        (leaf.ebx, leaf.ecx) = (leaf.ebx.min(size), leaf.ecx.min(size));
    }
    const COMPACTED: u32 = 1 << 1 | 1 << 3;
    let second =
        entries.iter_mut().find(|entry| entry.function == EXTENDED_STATE && entry.index == 1);
    if let Some(leaf) = second.filter(|leaf| leaf.eax & COMPACTED == 0) {
        leaf.ebx = 0;
    }
}

fn registers(entry: &kvm_cpuid_entry2) -> Registers {
    [entry.eax, entry.ebx, entry.ecx, entry.edx]
}

fn set_registers(entry: &mut kvm_cpuid_entry2, [eax, ebx, ecx, edx]: Registers) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (eax, ebx, ecx, edx);
}

/// Returns the registers of a leaf; zeros, as a processor answers, if there is none.
fn leaf(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> Registers {
    let found = |entry: &&kvm_cpuid_entry2| entry.function == function && entry.index == index;
    entries.iter().find(found).map_or([0; 4], registers)
}

#[cfg(test)]
mod tests;
