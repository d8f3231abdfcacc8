//! Saves and loads the whole state of a vCPU, each in the one order that works.
//!
//! The structures are the kernel's own ABI, which never changes; the counts around them are checked
//! before anything is allocated.
#![allow(unsafe_code)] // The extended save area has a length that only KVM knows.

use std::io;
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use kvm_bindings::{
    CpuId, KVM_MP_STATE_RUNNABLE, KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW,
    KVM_VCPUEVENT_VALID_SIPI_VECTOR, KVM_VCPUEVENT_VALID_SMM, Msrs, Xsave, kvm_clock_data,
    kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs,
    kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::vm::{KvmError, KvmVm};
use crate::ablation::Mechanism;
use crate::arch::x86_64::cpuid;
use crate::cpu::{CpuBaseline, MsrModifier};
use crate::packed;

/// The most entries that a saved vCPU may have; KVM itself accepts no more.
const MAX_MSRS: usize = 1024;
const MAX_CPUID: usize = 256;
/// The most 32-bit words that an extended save area may have beyond its first page.
const MAX_XSAVE_EXTRA: usize = 64 << 10;

/// The first page of the save area, which every KVM has.
const XSAVE_WORDS: usize = 1024;
/// The index of the save area's bitmap of components in use.
const XSTATE_BV: usize = 128;
/// The components of the save area that every x86-64 processor has.
const X87_AND_SSE: u64 = 0b11;

const TSC: u32 = 0x10;
const TSC_DEADLINE: u32 = 0x6e0;
/// The MSRs, old and new, by which a guest asks once for the time of day to be written to its
/// memory. Setting them would write it again, long after the guest has read it.
const WALL_CLOCK: [u32; 2] = [0x11, 0x4b56_4d00];
/// The old MSR with the address of the guest's clock; the new MSR holds an equal value.
const OLD_SYSTEM_TIME: u32 = 0x12;
/// The MSRs of Hyper-V's interface, which no guest is offered. KVM allocates all of it permanently
/// as soon as one is read or set.
const HYPER_V: Range<u32> = 0x4000_0000..0x4000_0200;
/// The MSRs with the capabilities of the processor's virtualization. No guest is offered it, and
/// the values differ between hosts.
const VMX: Range<u32> = 0x480..0x493;
/// The parts of saved events that every KVM restores; other parts must be enabled, which pvmm never
/// does.
const EVENT_FLAGS: u32 = KVM_VCPUEVENT_VALID_NMI_PENDING
    | KVM_VCPUEVENT_VALID_SIPI_VECTOR
    | KVM_VCPUEVENT_VALID_SHADOW
    | KVM_VCPUEVENT_VALID_SMM;

/// The state of a vCPU in a snapshot. Untrusted when it comes from a file.
#[derive(Clone, Serialize, Deserialize)]
pub struct VcpuStateV1 {
    pub cpuid: Vec<kvm_cpuid_entry2>,
    #[serde(with = "packed")]
    pub msrs: Vec<(u32, u64)>,
    pub regs: kvm_regs,
    pub sregs: kvm_sregs,
    pub xcrs: kvm_xcrs,
    /// The extended save area as KVM returns it, in 32-bit words.
    #[serde(with = "packed")]
    pub xsave: Vec<u32>,
    pub debug_regs: kvm_debugregs,
    pub lapic: kvm_lapic_state,
    pub mp_state: kvm_mp_state,
    pub events: kvm_vcpu_events,
    pub tsc_khz: u32,
}

/// The guest's clock in a snapshot and the host's time then, from which the time spent stopped can
/// be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockStateV1 {
    pub nanoseconds: u64,
    /// The host's time in nanoseconds since 1970.
    pub host_time: u64,
}

impl ClockStateV1 {
    /// Returns the clock as if the guest had run since the snapshot, when the host's time is `now`.
    pub fn advanced(self, now: u64) -> Self {
        let away = now.saturating_sub(self.host_time);
        Self { nanoseconds: self.nanoseconds.saturating_add(away), host_time: now }
    }
}

/// Properties of the saved state that are constant on a host and cost a system call to find out.
#[derive(Clone, Debug)]
pub struct StateShape {
    msr_indices: Vec<u32>,
    xsave_extra: usize,
}

impl StateShape {
    /// Asks KVM which MSRs it keeps for a guest, and for the size of the extended state.
    pub fn of(kvm: &Kvm) -> Result<Self, kvm_ioctls::Error> {
        let mut msr_indices = kvm.get_msr_index_list()?.as_slice().to_vec();
        msr_indices.retain(|index| is_state(*index));
        let size = kvm.check_extension_int(Cap::Xsave2).max(0) as usize;
        let beyond = size.saturating_sub(size_of::<kvm_xsave>());
        Ok(Self { msr_indices, xsave_extra: beyond.div_ceil(4).min(MAX_XSAVE_EXTRA) })
    }

    #[cfg(test)]
    pub fn with_msrs(msr_indices: Vec<u32>) -> Self {
        Self { msr_indices, xsave_extra: 0 }
    }

    /// Returns the most 32-bit words that the extended state of a vCPU may have on this host.
    pub fn xsave_words(&self) -> usize {
        XSAVE_WORDS + self.xsave_extra
    }

    /// Returns whether KVM on this host saves and restores an MSR.
    pub fn keeps_msr(&self, index: u32) -> bool {
        self.msr_indices.contains(&index)
    }

    /// Returns the first nonzero MSR of a saved vCPU that this host's KVM does not keep.
    pub fn unknown_msr(&self, saved: &[(u32, u64)]) -> Option<u32> {
        let unknown = |(index, value): &&(u32, u64)| {
            *value != 0 && is_state(*index) && !self.msr_indices.contains(index)
        };
        saved.iter().find(unknown).map(|(index, _)| *index)
    }
}

/// Reads the state of a parked vCPU from KVM.
///
/// The local APIC is read before the registers that depend on it, and pending events last, because
/// reading other state may change which events are pending.
pub fn save(vcpu: &VcpuFd, id: u32, shape: &StateShape) -> Result<VcpuStateV1, KvmError> {
    let failed = |what| move |error: kvm_ioctls::Error| refused(id, what, error.into());
    let mp_state = vcpu.get_mp_state().map_err(failed("run state"))?;
    let regs = vcpu.get_regs().map_err(failed("registers"))?;
    let sregs = vcpu.get_sregs().map_err(failed("system registers"))?;
    let xcrs = vcpu.get_xcrs().map_err(failed("extended control registers"))?;
    let xsave = get_xsave(vcpu, shape).map_err(failed("extended state"))?;
    let debug_regs = vcpu.get_debug_regs().map_err(failed("debug registers"))?;
    let lapic = vcpu.get_lapic().map_err(failed("local APIC"))?;
    let msrs = get_msrs(vcpu, id, &shape.msr_indices)?;
    let cpuid = vcpu.get_cpuid2(MAX_CPUID).map_err(failed("cpuid"))?.as_slice().to_vec();
    let tsc_khz = vcpu.get_tsc_khz().map_err(failed("clock rate"))?;
    let events = vcpu.get_vcpu_events().map_err(failed("events"))?;
    Ok(VcpuStateV1 {
        cpuid,
        msrs,
        regs,
        sregs,
        xcrs,
        xsave,
        debug_regs,
        lapic,
        mp_state,
        events,
        tsc_khz,
    })
}

/// Sets the CPUID leaves of a new vCPU, less the features that no guest is offered, and its clock
/// rate. A vCPU that has already run keeps them.
pub fn load_features(
    vcpu: &VcpuFd,
    id: u32,
    state: &VcpuStateV1,
    scales_clock: bool,
) -> Result<(), KvmError> {
    let failed = |what| move |error: kvm_ioctls::Error| refused(id, what, error.into());
    let cpuid = CpuId::from_entries(&cpuid::masked(&state.cpuid))
        .map_err(|error| refused(id, "cpuid", io::Error::other(error)))?;
    vcpu.set_cpuid2(&cpuid).map_err(failed("cpuid"))?;
    // A guest that asks KVM for the time needs no other rate, and a KVM without TSC scaling accepts
    // only rates close to its own.
    let wanted = scales_clock || cpuid::has_invariant_clock(&state.cpuid);
    if wanted && vcpu.get_tsc_khz().map_err(failed("clock rate"))? != state.tsc_khz {
        vcpu.set_tsc_khz(state.tsc_khz).map_err(failed("clock rate"))?;
    }
    Ok(())
}

/// The largest difference, in parts per million, between a guest's rate and the host's that a KVM
/// without TSC scaling accepts.
const KVM_TOLERANCE: u32 = 250;
/// The largest error, in parts per million, of Linux's first measurement of a clock. A KVM that was
/// loaded before the second measurement uses the first, which differs in each boot.
const MEASURED_TOLERANCE: u32 = 10_000;

/// Returns whether a guest whose clock ran at `saved_khz` can run on a host whose clock runs at
/// `host_khz` and cannot be scaled.
///
/// A guest that was given an invariant TSC may count time by it alone. Other guests ask KVM for the
/// time, and KVM answers by the host's rate: their clock stays right as long as both rates are
/// measurements of one clock.
pub fn is_same_rate(saved_khz: u32, host_khz: u32, cpuid: &[kvm_cpuid_entry2]) -> bool {
    let tolerance =
        if cpuid::has_invariant_clock(cpuid) { KVM_TOLERANCE } else { MEASURED_TOLERANCE };
    is_near(saved_khz, host_khz, tolerance)
}

fn is_near(one_khz: u32, other_khz: u32, millionths: u32) -> bool {
    let part = u64::from(other_khz) * u64::from(millionths) / 1_000_000;
    u64::from(one_khz.abs_diff(other_khz)) <= part
}

/// Returns the MSRs that must be set in a new vCPU, whose CPUID leaves are set, to match `state`.
/// It holds most values already, and setting an MSR is one of the most expensive steps here.
pub fn msrs_to_set(
    fresh: &VcpuFd,
    id: u32,
    state: &VcpuStateV1,
    kvm: &KvmVm,
) -> Result<Vec<(u32, u64)>, KvmError> {
    let ask = || {
        let mut held = get_msrs(fresh, id, &kvm.shape().msr_indices)?;
        held.retain(|(_, value)| *value != 0);
        Ok(held)
    };
    let held = kvm.host().initial_msrs(id, &state.cpuid, ask)?;
    Ok(to_set(&state.msrs, Mechanism::KnownMsrs.in_use().then_some(&held[..])))
}

/// Loads the state of a vCPU; of its MSRs those in `msrs`, or all.
///
/// The run state comes first, because setting it resets pending events; XCR0 before the extended
/// state that it enables; the local APIC before the deadline of its timer; events last.
pub fn load(
    vcpu: &VcpuFd,
    id: u32,
    state: &VcpuStateV1,
    shape: &StateShape,
    msrs: Option<&[(u32, u64)]>,
) -> Result<(), KvmError> {
    let failed = |what| move |error: kvm_ioctls::Error| refused(id, what, error.into());
    vcpu.set_mp_state(state.mp_state).map_err(failed("run state"))?;
    vcpu.set_regs(&state.regs).map_err(failed("registers"))?;
    vcpu.set_sregs(&state.sregs).map_err(failed("system registers"))?;
    vcpu.set_xcrs(&state.xcrs).map_err(failed("extended control registers"))?;
    set_xsave(vcpu, &state.xsave, shape).map_err(failed("extended state"))?;
    vcpu.set_debug_regs(&state.debug_regs).map_err(failed("debug registers"))?;
    vcpu.set_lapic(&state.lapic).map_err(failed("local APIC"))?;
    match msrs {
        Some(msrs) => set_msrs(vcpu, id, msrs)?,
        None => set_msrs(vcpu, id, &to_set(&state.msrs, None))?,
    }
    vcpu.set_vcpu_events(&state.events).map_err(failed("events"))?;
    if state.mp_state.mp_state == KVM_MP_STATE_RUNNABLE {
        // Notifies the guest that the host stopped it, so that its watchdogs do not fire. This
        // fails for a guest that has not set up its clock, which has no watchdog either.
        let _ = vcpu.kvmclock_ctrl();
    }
    Ok(())
}

impl VcpuStateV1 {
    /// Returns the extended state components that the guest has enabled, and those that are not in
    /// their initial state.
    pub fn xsave_features(&self) -> (u64, u64) {
        let word = |index: usize| self.xsave.get(index).copied().unwrap_or_default();
        let in_use = u64::from(word(XSTATE_BV)) | u64::from(word(XSTATE_BV + 1)) << 32;
        let count = self.xcrs.nr_xcrs as usize;
        let xcr0 = self.xcrs.xcrs.iter().take(count).find(|register| register.xcr == 0);
        (xcr0.map_or(0, |register| register.value), in_use)
    }

    /// Removes what does not belong to a guest with this baseline: features that it was not
    /// offered, their MSRs, and parts of the extended state that it cannot have. A host that lacks
    /// them is then no worse for this vCPU.
    pub fn limit_to(&mut self, cpu: &CpuBaseline) {
        if cpu.is_host() {
            return;
        }
        cpu.mask(&mut self.cpuid);
        self.msrs.retain(|(index, _)| cpu.has_msr(*index));
        let parts = cpuid::extended_state(&self.cpuid) | X87_AND_SSE;
        for (place, part) in [(XSTATE_BV, parts as u32), (XSTATE_BV + 1, (parts >> 32) as u32)] {
            if let Some(word) = self.xsave.get_mut(place) {
                *word &= part;
            }
        }
    }

    /// Refuses counts that no vCPU can have.
    pub fn check(&self) -> Result<(), &'static str> {
        match self {
            _ if self.cpuid.is_empty() || self.cpuid.len() > MAX_CPUID => Err("cpuid entries"),
            _ if self.msrs.len() > MAX_MSRS => Err("model-specific registers"),
            _ if self.xsave.len() < XSAVE_WORDS => Err("extended state"),
            _ if self.xsave.len() > XSAVE_WORDS + MAX_XSAVE_EXTRA => Err("extended state"),
            _ if self.tsc_khz == 0 => Err("clock rate"),
            _ if self.events.flags & !EVENT_FLAGS != 0 => Err("events"),
            _ if self.xcrs.nr_xcrs as usize > self.xcrs.xcrs.len() => {
                Err("extended control registers")
            }
            _ => Ok(()),
        }
    }
}

pub fn save_clock(vm: &VmFd) -> Result<ClockStateV1, KvmError> {
    let clock = vm.get_clock().map_err(KvmError::Clock)?;
    Ok(ClockStateV1 { nanoseconds: clock.clock, host_time: host_time() })
}

/// Returns the host's time in nanoseconds since 1970.
pub fn host_time() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Sets the guest's clock to the saved value: the guest does not see the time in which it did not
/// run.
pub fn load_clock(vm: &VmFd, state: ClockStateV1) -> Result<(), KvmError> {
    let clock = kvm_clock_data { clock: state.nanoseconds, ..Default::default() };
    vm.set_clock(&clock).map_err(KvmError::Clock)
}

fn get_xsave(vcpu: &VcpuFd, shape: &StateShape) -> Result<Vec<u32>, kvm_ioctls::Error> {
    if shape.xsave_extra == 0 {
        return Ok(vcpu.get_xsave()?.region.to_vec());
    }
    let mut area = save_area(shape.xsave_extra)?;
    // SAFETY: the area has the length that KVM reported for this machine.
    unsafe { vcpu.get_xsave2(&mut area)? };
    Ok([&area.as_fam_struct_ref().xsave.region, area.as_slice()].concat())
}

fn set_xsave(vcpu: &VcpuFd, words: &[u32], shape: &StateShape) -> Result<(), kvm_ioctls::Error> {
    let (first, extra) = words.split_at_checked(XSAVE_WORDS).unwrap_or((words, &[]));
    if first.len() != XSAVE_WORDS || extra.len() > shape.xsave_extra {
        return Err(kvm_ioctls::Error::new(libc::E2BIG));
    }
    let mut area = save_area(shape.xsave_extra)?;
    // SAFETY: only the plain bytes of the first page are changed, not the length.
    unsafe { area.as_mut_fam_struct() }.xsave.region.copy_from_slice(first);
    if let Some(place) = area.as_mut_slice().get_mut(..extra.len()) {
        place.copy_from_slice(extra);
    }
    // SAFETY: the area has the length that KVM reported for this machine, so it reads no further.
    unsafe { vcpu.set_xsave2(&area) }
}

fn save_area(extra: usize) -> Result<Xsave, kvm_ioctls::Error> {
    Xsave::new(extra).map_err(|_| kvm_ioctls::Error::new(libc::ENOMEM))
}

/// Returns whether an MSR belongs to the saved state of a vCPU.
fn is_state(index: u32) -> bool {
    index != OLD_SYSTEM_TIME
        && !WALL_CLOCK.contains(&index)
        && !HYPER_V.contains(&index)
        && !VMX.contains(&index)
}

/// One value of a guest's time stamp counter, and the time of day at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockMark {
    pub counter: u64,
    pub khz: u32,
    /// The time of day in nanoseconds since 1970.
    pub unix_ns: u64,
}

/// Reads the time stamp counter of a parked vCPU, which also counts while the vCPU does not run.
pub fn mark_clock(vcpu: &VcpuFd, id: u32) -> Result<ClockMark, KvmError> {
    let khz = vcpu.get_tsc_khz().map_err(|error| refused(id, "clock rate", error.into()))?;
    let before = host_time();
    let counter = get_msrs(vcpu, id, &[TSC])?.first().map_or(0, |(_, value)| *value);
    let unix_ns = before + host_time().saturating_sub(before) / 2;
    Ok(ClockMark { counter, khz, unix_ns })
}

/// Reads the given MSRs and skips those that KVM does not have. KVM lists some MSRs that it does
/// not have on this host, and a batch stops at such an MSR.
fn get_msrs(vcpu: &VcpuFd, id: u32, indices: &[u32]) -> Result<Vec<(u32, u64)>, KvmError> {
    let mut values = Vec::with_capacity(indices.len());
    let mut left = indices;
    while !left.is_empty() {
        let mut batch = msrs(id, left.iter().map(|index| (*index, 0)))?;
        let got = vcpu.get_msrs(&mut batch).map_err(|e| refused(id, "msrs", e.into()))?;
        values.extend(batch.as_slice().iter().take(got).map(|entry| (entry.index, entry.data)));
        left = left.get(got + 1..).unwrap_or_default();
    }
    Ok(values)
}

/// Changes MSRs of a new vCPU, each to its present value with some bits cleared and set.
pub fn modify_msrs(vcpu: &VcpuFd, id: u32, modifiers: &[MsrModifier]) -> Result<(), KvmError> {
    for MsrModifier { address, bitmap } in modifiers {
        let held = get_msrs(vcpu, id, &[*address])?;
        let Some((_, value)) = held.first() else {
            let text = format!("register {address:#x} cannot be read; leave it out");
            return Err(refused(id, "msr_modifiers", io::Error::other(text)));
        };
        set_msrs(vcpu, id, &[(*address, bitmap.applied_to(*value))])?;
    }
    Ok(())
}

/// Replaces an unset timer deadline by one that expires at once.
///
/// A timer that had expired when the vCPU stopped, and whose interrupt was not delivered yet, is
/// saved as unset: KVM keeps that interrupt where nobody can read it. A guest that lost it would
/// never be woken again, and one interrupt too many does no harm.
fn timer_at_once((index, value): (u32, u64)) -> (u32, u64) {
    match (index, value) {
        (TSC_DEADLINE, 0) => (index, 1),
        _ => (index, value),
    }
}

/// Returns the MSRs to set, in order: the time stamp counter first, and the timer's deadline last,
/// because it is a value of that counter. Both are always set, since they do not stand still.
/// Any other MSR is set only if the vCPU holds a different value; `held` lists the nonzero MSRs of
/// the vCPU, without it all are set.
fn to_set(values: &[(u32, u64)], held: Option<&[(u32, u64)]>) -> Vec<(u32, u64)> {
    let rank = |index: u32| match index {
        TSC => 0,
        TSC_DEADLINE => 2,
        _ => 1,
    };
    let is_held = |index, value| {
        held.is_some_and(|held| {
            let known = held.iter().find(|(known, _)| *known == index);
            known.map_or(0, |(_, value)| *value) == value
        })
    };
    let needed = |(index, value): &&(u32, u64)| {
        is_state(*index) && (rank(*index) != 1 || !is_held(*index, *value))
    };
    let needed = values.iter().filter(needed);
    let mut ordered: Vec<_> = needed.map(|value| timer_at_once(*value)).collect();
    ordered.sort_by_key(|(index, _)| rank(*index));
    ordered
}

/// Sets MSRs in the given order.
fn set_msrs(vcpu: &VcpuFd, id: u32, ordered: &[(u32, u64)]) -> Result<(), KvmError> {
    let mut left = ordered;
    while !left.is_empty() {
        let batch = msrs(id, left.iter().copied())?;
        let set = vcpu.set_msrs(&batch).map_err(|e| refused(id, "msrs", e.into()))?;
        let Some((index, value)) = left.get(set) else { return Ok(()) };
        if *value != 0 {
            let text = format!("register {index:#x} does not take {value:#x}");
            return Err(refused(id, "msrs", io::Error::other(text)));
        }
        // This MSR can only be read as zero.
        left = left.get(set + 1..).unwrap_or_default();
    }
    Ok(())
}

fn msrs(id: u32, values: impl Iterator<Item = (u32, u64)>) -> Result<Msrs, KvmError> {
    let entries: Vec<_> =
        values.map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() }).collect();
    Msrs::from_entries(&entries).map_err(|error| refused(id, "msrs", io::Error::other(error)))
}

fn refused(id: u32, what: &'static str, source: io::Error) -> KvmError {
    KvmError::Vcpu { id, what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timer_that_may_have_run_out_unheard_runs_out_at_once() {
        assert_eq!(timer_at_once((TSC_DEADLINE, 0)), (TSC_DEADLINE, 1));
        assert_eq!(timer_at_once((TSC_DEADLINE, 7)), (TSC_DEADLINE, 7));
        assert_eq!(timer_at_once((TSC, 0)), (TSC, 0));
    }

    #[test]
    fn rates_are_of_one_clock_within_what_kvm_takes_or_linux_measures_and_no_further() {
        let invariant = [kvm_cpuid_entry2 { function: 0x8000_0007, edx: 1 << 8, ..<_>::default() }];
        for (cpuid, tolerance) in [(&invariant[..], 500), (&[], 20_000)] {
            for same in [2_000_000, 2_000_000 - tolerance, 2_000_000 + tolerance] {
                assert!(is_same_rate(same, 2_000_000, cpuid), "{same}");
            }
            for other in [1_999_999 - tolerance, 2_000_001 + tolerance, 0, 1, u32::MAX] {
                assert!(!is_same_rate(other, 2_000_000, cpuid), "{other}");
            }
        }
        assert!(is_same_rate(u32::MAX, u32::MAX, &[]));
    }

    #[test]
    fn register_that_is_held_already_is_not_set_but_for_those_that_move() {
        let saved = [(1, 7), (TSC_DEADLINE, 5), (2, 0), (WALL_CLOCK[0], 9), (TSC, 9), (3, 4)];
        let saved = [&saved[..], &[(OLD_SYSTEM_TIME, 1), (HYPER_V.start + 0x10, 8)]].concat();
        assert_eq!(to_set(&saved, None), [(TSC, 9), (1, 7), (2, 0), (3, 4), (TSC_DEADLINE, 5)]);
        let held = [(1, 7), (3, 1), (TSC, 9), (TSC_DEADLINE, 5)];
        assert_eq!(to_set(&saved, Some(&held)), [(TSC, 9), (3, 4), (TSC_DEADLINE, 5)]);
    }
}
