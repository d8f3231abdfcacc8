//! The levels of the x86-64 psABI, as what is left of a host's CPUID leaves and MSRs.
//!
//! Lists of what is kept, not of what is removed: a feature of a later processor is unknown here,
//! and must be left out all the same.

use kvm_bindings::kvm_cpuid_entry2;
use serde::{Deserialize, Serialize};

use CpuLevel::{V2, V3, V4};

use super::{
    ADDRESS_SIZES, CpuError, EXTENDED_FEATURES, EXTENDED_STATE, FEATURES, KVM_FEATURES, Registers,
    STRUCTURED_FEATURES, leaf, own, registers, set_registers,
};

/// A level of the x86-64 psABI: the instructions that compilers may use with `-march=x86-64-vN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CpuLevel {
    /// SSE 4.2, POPCNT, CMPXCHG16B: every server processor since 2009.
    V2,
    /// AVX2, BMI, FMA, MOVBE.
    V3,
    /// AVX-512 F, BW, CD, DQ, VL.
    V4,
}

const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

/// A feature that a level requires: its name as in `/proc/cpuinfo`, and its bits.
struct Feature {
    level: CpuLevel,
    name: &'static str,
    leaf: u32,
    register: usize,
    bits: u32,
}

const fn feature(
    level: CpuLevel,
    name: &'static str,
    leaf: u32,
    register: usize,
    bits: u32,
) -> Feature {
    Feature { level, name, leaf, register, bits }
}

/// The features of each level, those of the first level with the second.
const REQUIRED: [Feature; 32] = [
    feature(V2, "fpu", FEATURES, EDX, 1),
    feature(V2, "cx8", FEATURES, EDX, 1 << 8),
    feature(V2, "cmov", FEATURES, EDX, 1 << 15),
    feature(V2, "mmx", FEATURES, EDX, 1 << 23),
    feature(V2, "fxsr", FEATURES, EDX, 1 << 24),
    feature(V2, "sse", FEATURES, EDX, 1 << 25),
    feature(V2, "sse2", FEATURES, EDX, 1 << 26),
    feature(V2, "syscall", EXTENDED_FEATURES, EDX, 1 << 11),
    feature(V2, "sse3", FEATURES, ECX, 1),
    feature(V2, "ssse3", FEATURES, ECX, 1 << 9),
    feature(V2, "cx16", FEATURES, ECX, 1 << 13),
    feature(V2, "sse4_1", FEATURES, ECX, 1 << 19),
    feature(V2, "sse4_2", FEATURES, ECX, 1 << 20),
    feature(V2, "popcnt", FEATURES, ECX, 1 << 23),
    feature(V2, "lahf_lm", EXTENDED_FEATURES, ECX, 1),
    feature(V3, "fma", FEATURES, ECX, 1 << 12),
    feature(V3, "movbe", FEATURES, ECX, 1 << 22),
    feature(V3, "xsave", FEATURES, ECX, 1 << 26),
    feature(V3, "avx", FEATURES, ECX, 1 << 28),
    feature(V3, "f16c", FEATURES, ECX, 1 << 29),
    feature(V3, "bmi1", STRUCTURED_FEATURES, EBX, 1 << 3),
    feature(V3, "avx2", STRUCTURED_FEATURES, EBX, 1 << 5),
    feature(V3, "bmi2", STRUCTURED_FEATURES, EBX, 1 << 8),
    feature(V3, "abm", EXTENDED_FEATURES, ECX, 1 << 5),
    feature(V3, "the registers of avx", EXTENDED_STATE, EAX, 0b111),
    feature(V4, "avx512f", STRUCTURED_FEATURES, EBX, 1 << 16),
    feature(V4, "avx512dq", STRUCTURED_FEATURES, EBX, 1 << 17),
    feature(V4, "avx512cd", STRUCTURED_FEATURES, EBX, 1 << 28),
    feature(V4, "avx512bw", STRUCTURED_FEATURES, EBX, 1 << 30),
    feature(V4, "avx512vl", STRUCTURED_FEATURES, EBX, 1 << 31),
    feature(V4, "the registers of avx512f", EXTENDED_STATE, EAX, 0b1110_0000),
    // Not of the psABI: without it no stack and no heap of a guest is protected.
    feature(V2, "nx", EXTENDED_FEATURES, EDX, 1 << 20),
];

/// The features of leaf 1, EDX, that kernels rely on and every processor of the first level has:
/// vme, de, pse, tsc, msr, pae, mce, apic, sep, mtrr, pge, mca, pat, pse36, clflush.
const ALWAYS: u32 = 0x000b_7afe;
/// The bits of leaf 0x8000_0001, EDX, that repeat leaf 1 on processors from AMD.
const REPEATED: u32 = 0x0183_f3ff;
const LONG_MODE: u32 = 1 << 29;
/// The features of KVM that Linux 5.10 and later have: its clock, asynchronous page faults, stolen
/// time, and the calls of one vCPU to another.
const PARAVIRTUAL: u32 = 0x0100_7efb;
/// Guests of other hosts have no wider physical addresses, whatever this host has.
pub const PHYSICAL_BITS: u32 = 40;
const LINEAR_BITS: u32 = 48;

impl CpuLevel {
    /// All levels, lowest first.
    pub const ALL: [Self; 3] = [V2, V3, V4];

    /// Returns the name that compilers use.
    pub fn name(self) -> &'static str {
        match self {
            V2 => "x86-64-v2",
            V3 => "x86-64-v3",
            V4 => "x86-64-v4",
        }
    }

    /// Refuses a host that lacks a feature of this level.
    pub(super) fn check(self, supported: &[kvm_cpuid_entry2]) -> Result<(), CpuError> {
        let lacks = |feature: &&Feature| {
            let register = leaf(supported, feature.leaf, 0)[feature.register];
            feature.level <= self && register & feature.bits != feature.bits
        };
        match REQUIRED.iter().find(lacks) {
            None => Ok(()),
            Some(missing) => {
                Err(CpuError::Missing { baseline: self.name(), feature: missing.name.to_owned() })
            }
        }
    }

    /// Clears every bit that does not belong to this level.
    pub(super) fn mask(self, entries: &mut [kvm_cpuid_entry2]) {
        for entry in entries {
            let kept = self.kept(entry.function, entry.index);
            let mut values = registers(entry);
            for (value, kept) in values.iter_mut().zip(kept) {
                *value &= kept;
            }
            if entry.function == ADDRESS_SIZES {
                let (physical, linear) = (values[EAX] & 0xff, values[EAX] >> 8 & 0xff);
                values[EAX] = physical.min(PHYSICAL_BITS) | linear.min(LINEAR_BITS) << 8;
            }
            set_registers(entry, values);
        }
    }

    /// Returns the bits of a leaf that are kept: those of the level, those that pvmm writes, and in
    /// leaves without features all.
    fn kept(self, function: u32, index: u32) -> Registers {
        let mut kept = match (function, index) {
            // Names, numbers of leaves, family and model, caches; KVM's signature.
            (0x0 | 0x2 | 0x6 | 0x4000_0000 | 0x8000_0000 | 0x8000_0002..=0x8000_0006, _) => {
                [u32::MAX; 4]
            }
            (FEATURES, _) => [u32::MAX, 0, 0, ALWAYS],
            (KVM_FEATURES, _) => [PARAVIRTUAL, 0, 0, 0],
            (EXTENDED_FEATURES, _) => [u32::MAX, 0, 0, REPEATED | LONG_MODE],
            (ADDRESS_SIZES, _) => [u32::MAX, 0, 0, 0],
            // Offset, size and flags of a part of extended state, which are cleared later if the
            // part is not left.
            (EXTENDED_STATE, 2..) if self >= V3 => [u32::MAX; 4],
            _ => [0; 4],
        };
        for (kept, own) in kept.iter_mut().zip(own(function, index)) {
            *kept |= own;
        }
        if index == 0 {
            let features = REQUIRED.iter().filter(|it| it.level <= self && it.leaf == function);
            features.for_each(|feature| kept[feature.register] |= feature.bits);
        }
        if self < V3 && function == FEATURES {
            const OSXSAVE: u32 = 1 << 27;
            kept[ECX] &= !OSXSAVE;
        }
        kept
    }
}

/// Returns whether a guest of some level has this MSR. Others belong to features that it is not
/// offered, and KVM lets no guest set them.
pub(super) fn has_msr(index: u32) -> bool {
    matches!(index,
        // Time stamp counter, local APIC, microcode revision, platform information.
        0x10 | 0x11 | 0x12 | 0x1b | 0x8b | 0xce | 0x140 | 0x6e0
        // Fast system calls, miscellaneous features, debug control, system management.
        | 0x174..=0x176 | 0x1a0 | 0x1d9 | 0x9e
        // Memory types, machine checks.
        | 0x200..=0x20f | 0x250 | 0x258 | 0x259 | 0x268..=0x26f | 0x277 | 0x2ff
        | 0x179..=0x17b | 0x400..=0x47f
        // KVM's own.
        | 0x4b56_4d00..=0x4b56_4d08
        // Long mode, system calls, segment bases.
        | 0xc000_0080..=0xc000_0084 | 0xc000_0100..=0xc000_0102
        // AMD: event counters that have no feature bit, hardware configuration.
        | 0xc001_0000..=0xc001_0007 | 0xc001_0015
    )
}
