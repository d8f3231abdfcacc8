//! A vCPU's whole state, out of KVM and back into it, each in the one order that works.
//!
//! The structures are the kernel's own ABI, which never changes; around them stand only counts that are
//! checked before anything is allocated.
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
use crate::arch::x86_64::cpuid;
use crate::packed;

/// The most entries that a saved vCPU may have; KVM itself takes no more.
const MAX_MSRS: usize = 1024;
const MAX_CPUID: usize = 256;
/// The most 32-bit words that an extended save area may have beyond its first page.
const MAX_XSAVE_EXTRA: usize = 64 << 10;

/// The first page of the save area, which every KVM has.
const XSAVE_WORDS: usize = 1024;
/// Where the save area says which of its parts hold something.
const XSTATE_BV: usize = 128;

const TSC: u32 = 0x10;
const TSC_DEADLINE: u32 = 0x6e0;
/// By these, old and new, a guest asks for the time of day to be written to its memory, once. Setting them
/// would write it again, where the guest has long read it.
const WALL_CLOCK: [u32; 2] = [0x11, 0x4b56_4d00];
/// Where a guest wants its clock, by its old number; the same stands in a register with a new one.
const OLD_SYSTEM_TIME: u32 = 0x12;
/// Those of Hyper-V's interface, which no guest is offered. KVM makes room for all of it, for good, as soon as one is
/// read or set.
const HYPER_V: Range<u32> = 0x4000_0000..0x4000_0200;
/// What a processor's own virtualization can do. No guest is offered that, and each host has other values.
const VMX: Range<u32> = 0x480..0x493;
/// What is in the saved events that every KVM takes back; the rest must be asked for, and never is.
const EVENT_FLAGS: u32 = KVM_VCPUEVENT_VALID_NMI_PENDING
    | KVM_VCPUEVENT_VALID_SIPI_VECTOR
    | KVM_VCPUEVENT_VALID_SHADOW
    | KVM_VCPUEVENT_VALID_SMM;

/// A vCPU at the moment of a snapshot. Untrusted when it comes from a file.
#[derive(Clone, Serialize, Deserialize)]
pub struct VcpuStateV1 {
    pub cpuid: Vec<kvm_cpuid_entry2>,
    #[serde(with = "packed")]
    pub msrs: Vec<(u32, u64)>,
    pub regs: kvm_regs,
    pub sregs: kvm_sregs,
    pub xcrs: kvm_xcrs,
    /// The extended save area as KVM gives it, in 32-bit words.
    #[serde(with = "packed")]
    pub xsave: Vec<u32>,
    pub debug_regs: kvm_debugregs,
    pub lapic: kvm_lapic_state,
    pub mp_state: kvm_mp_state,
    pub events: kvm_vcpu_events,
    pub tsc_khz: u32,
}

/// The guest's clock at the moment of a snapshot: nanoseconds since it was booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockStateV1 {
    pub nanoseconds: u64,
}

/// The same, and what time it was then: with that, the time between can be made up for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockStateV2 {
    pub nanoseconds: u64,
    /// Nanoseconds since 1970 on the host; zero if nobody wrote it down.
    pub host_time: u64,
}

impl From<ClockStateV1> for ClockStateV2 {
    fn from(ClockStateV1 { nanoseconds }: ClockStateV1) -> Self {
        Self { nanoseconds, host_time: 0 }
    }
}

impl ClockStateV2 {
    /// The clock as if the guest had run since, when the host's time is `now`.
    pub fn advanced(self, now: u64) -> Self {
        let away = match self.host_time {
            0 => 0,
            then => now.saturating_sub(then),
        };
        Self { nanoseconds: self.nanoseconds.saturating_add(away), host_time: now }
    }
}

/// What is the same for all vCPUs of a host and costs a call to find out.
#[derive(Clone, Debug)]
pub struct StateShape {
    msr_indices: Vec<u32>,
    xsave_extra: usize,
}

impl StateShape {
    /// Asks KVM which registers it keeps for a guest.
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

    /// The 32-bit words that a vCPU's extended state may have here.
    pub fn xsave_words(&self) -> usize {
        XSAVE_WORDS + self.xsave_extra
    }

    /// The first register of a saved vCPU that KVM does not keep here, if it holds anything.
    pub fn unknown_msr(&self, saved: &[(u32, u64)]) -> Option<u32> {
        let unknown = |(index, value): &&(u32, u64)| {
            *value != 0 && is_state(*index) && !self.msr_indices.contains(index)
        };
        saved.iter().find(unknown).map(|(index, _)| *index)
    }
}

/// Copies a parked vCPU's state out of KVM.
///
/// The local APIC comes before the registers that depend on it, and pending events come last: reading
/// some of the others may turn one into the other.
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

/// Gives a fresh vCPU the features it had, less those that no guest is offered, and the rate of its clock. A vCPU
/// that has run already keeps them.
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
    // A guest that asks KVM for the time needs no other rate, and a KVM that does not scale takes only what is close
    // to its own.
    let wanted = scales_clock || cpuid::has_invariant_clock(&state.cpuid);
    if wanted && vcpu.get_tsc_khz().map_err(failed("clock rate"))? != state.tsc_khz {
        vcpu.set_tsc_khz(state.tsc_khz).map_err(failed("clock rate"))?;
    }
    Ok(())
}

/// The parts of a million by which a guest's rate may differ from the host's in a KVM that does not scale.
const KVM_TOLERANCE: u32 = 250;
/// By so many parts of a million Linux lets its first measurement of a clock be wrong. A KVM that was loaded
/// before the second one goes by the first, another one in each boot.
const MEASURED_TOLERANCE: u32 = 10_000;

/// Whether a guest whose clock ran at `saved_khz` can go on where it runs at `host_khz` and cannot be scaled.
///
/// A guest that was told of an invariant clock may count time by it alone. Others ask KVM what time it is, and KVM
/// tells them by the host's rate: they go on with a right clock as long as both rates are measurements of one clock.
pub fn is_same_rate(saved_khz: u32, host_khz: u32, cpuid: &[kvm_cpuid_entry2]) -> bool {
    let tolerance = match cpuid::has_invariant_clock(cpuid) {
        true => KVM_TOLERANCE,
        false => MEASURED_TOLERANCE,
    };
    is_near(saved_khz, host_khz, tolerance)
}

fn is_near(one_khz: u32, other_khz: u32, millionths: u32) -> bool {
    let part = u64::from(other_khz) * u64::from(millionths) / 1_000_000;
    u64::from(one_khz.abs_diff(other_khz)) <= part
}

/// The registers that a fresh vCPU, which was given its features, must be told to become like `state`. It
/// holds most of them already, and setting one costs as much as anything here.
pub fn msrs_to_tell(
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
    let held = kvm.host().fresh_msrs(id, &state.cpuid, ask)?;
    Ok(to_set(&state.msrs, Some(&held)))
}

/// Puts a vCPU's state back; of its model-specific registers those in `msrs`, or all.
///
/// Run state first, for setting it resets pending events; the control register that enables extended
/// state before that state; the local APIC before the deadline of its timer; events last.
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
        // Tells the guest that it was stopped by its host, so that its watchdogs look away. A guest that
        // has not set its clock up refuses, and has no watchdog either.
        let _ = vcpu.kvmclock_ctrl();
    }
    Ok(())
}

impl VcpuStateV1 {
    /// The parts of extended state that the guest has switched on, and those that are not in their first state.
    pub fn xsave_features(&self) -> (u64, u64) {
        let word = |index: usize| self.xsave.get(index).copied().unwrap_or_default();
        let in_use = u64::from(word(XSTATE_BV)) | u64::from(word(XSTATE_BV + 1)) << 32;
        let count = self.xcrs.nr_xcrs as usize;
        let xcr0 = self.xcrs.xcrs.iter().take(count).find(|register| register.xcr == 0);
        (xcr0.map_or(0, |register| register.value), in_use)
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

pub fn save_clock(vm: &VmFd) -> Result<ClockStateV2, KvmError> {
    let clock = vm.get_clock().map_err(KvmError::Clock)?;
    Ok(ClockStateV2 { nanoseconds: clock.clock, host_time: host_time() })
}

/// Nanoseconds since 1970.
pub fn host_time() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The guest's clock goes on from where it stood: it never sees the time in which it did not run.
pub fn load_clock(vm: &VmFd, state: ClockStateV2) -> Result<(), KvmError> {
    let clock = kvm_clock_data { clock: state.nanoseconds, ..Default::default() };
    vm.set_clock(&clock).map_err(KvmError::Clock)
}

fn get_xsave(vcpu: &VcpuFd, shape: &StateShape) -> Result<Vec<u32>, kvm_ioctls::Error> {
    if shape.xsave_extra == 0 {
        return Ok(vcpu.get_xsave()?.region.to_vec());
    }
    let mut area = save_area(shape.xsave_extra)?;
    // SAFETY: the area has the length that KVM told for this machine.
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
    // SAFETY: the area has the length that KVM told for this machine, so it reads no further.
    unsafe { vcpu.set_xsave2(&area) }
}

fn save_area(extra: usize) -> Result<Xsave, kvm_ioctls::Error> {
    Xsave::new(extra).map_err(|_| kvm_ioctls::Error::new(libc::ENOMEM))
}

/// Whether a register is part of what a vCPU is given back.
fn is_state(index: u32) -> bool {
    index != OLD_SYSTEM_TIME
        && !WALL_CLOCK.contains(&index)
        && !HYPER_V.contains(&index)
        && !VMX.contains(&index)
}

/// All registers that are asked for, where KVM has them. It stops at one that it lists and does not have here.
/// One instant on a guest's time stamp counter, and what time of day it was then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockMark {
    pub counter: u64,
    pub khz: u32,
    /// Nanoseconds since 1970.
    pub unix_ns: u64,
}

/// Reads a parked vCPU's time stamp counter, which also counts while the vCPU does not run.
pub fn mark_clock(vcpu: &VcpuFd, id: u32) -> Result<ClockMark, KvmError> {
    let khz = vcpu.get_tsc_khz().map_err(|error| refused(id, "clock rate", error.into()))?;
    let before = host_time();
    let counter = get_msrs(vcpu, id, &[TSC])?.first().map_or(0, |(_, value)| *value);
    let unix_ns = before + host_time().saturating_sub(before) / 2;
    Ok(ClockMark { counter, khz, unix_ns })
}

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

/// A timer that had run out when the vCPU stopped, and whose interrupt was not delivered yet, is saved as one
/// that is not set: KVM keeps that interrupt where nobody can read it. A guest that lost it would never be woken
/// again, and one interrupt too many does no harm, so a timer that is not set runs out at once.
fn timer_at_once((index, value): (u32, u64)) -> (u32, u64) {
    match (index, value) {
        (TSC_DEADLINE, 0) => (index, 1),
        _ => (index, value),
    }
}

/// The registers to set, in their order: the time stamp counter first and the timer's deadline after all
/// others, for it counts in the former. These two are always set, for they do not stand still. Of a vCPU that holds
/// zero in all registers but those in `held`, only the others are.
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

/// Sets registers in the order they come in.
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
        // A register that only exists to be read as zero.
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
