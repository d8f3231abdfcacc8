//! Mechanisms that a benchmark can leave out, to measure what each is worth.
//!
//! Only with the feature `ablation`, which nothing but the benchmarks enables: the variable
//! `PVMM_WITHOUT` names what is left out, separated by commas. Without the feature every mechanism
//! is in use, and this costs nothing.

/// A mechanism that exists only to be faster or smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// Huge pages for memory that the image has nothing for.
    Growth,
    /// Pages of the working set are prefaulted.
    Prefault,
    /// Trimmed VMs share pages that the recorded VM had too.
    Dedup,
    /// A VM is frozen when its guest is idle.
    Settle,
    /// The threads of a restored VM start when it first runs.
    LateThreads,
    /// A queue that is kicked often gets an ioeventfd.
    KickShortcut,
    /// MSRs that a new vCPU holds already are not set.
    KnownMsrs,
}

impl Mechanism {
    /// Every mechanism with its name.
    pub const ALL: [(&str, Self); 7] = [
        ("growth", Self::Growth),
        ("prefault", Self::Prefault),
        ("dedup", Self::Dedup),
        ("settle", Self::Settle),
        ("late-threads", Self::LateThreads),
        ("kick-shortcut", Self::KickShortcut),
        ("known-msrs", Self::KnownMsrs),
    ];

    /// Returns whether the mechanism is in use.
    #[cfg(not(feature = "ablation"))]
    pub(crate) const fn in_use(self) -> bool {
        true
    }

    /// Returns whether the mechanism is in use.
    #[cfg(feature = "ablation")]
    pub(crate) fn in_use(self) -> bool {
        let without = std::env::var("PVMM_WITHOUT").unwrap_or_default();
        !Self::ALL.iter().any(|(name, it)| *it == self && without.split(',').any(|w| w == *name))
    }
}
