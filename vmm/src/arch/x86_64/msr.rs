//! Model-specific registers that a vCPU starts with.

use kvm_bindings::{Msrs, kvm_msr_entry};

const MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// What firmware would have set: fast string operations, and memory cached by default.
pub fn boot() -> Result<Msrs, vmm_sys_util::fam::Error> {
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    Msrs::from_entries(&[
        entry(MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK),
    ])
}
