//! The initial MSRs of a vCPU.

use kvm_bindings::{Msrs, kvm_msr_entry};

const MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// Returns the MSRs that firmware would set: fast string operations, and write-back as the default
/// memory type.
pub fn boot() -> Result<Msrs, vmm_sys_util::fam::Error> {
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    Msrs::from_entries(&[
        entry(MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK),
    ])
}
