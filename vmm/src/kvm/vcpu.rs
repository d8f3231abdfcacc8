//! Sets the initial registers of a vCPU, in the one order that works.
#![allow(unsafe_code)] // One ioctl that has no wrapper.

use std::io;

use kvm_bindings::{kvm_cpuid_entry2, kvm_pre_fault_memory};
use kvm_ioctls::VcpuFd;
use pvmm_devices::GuestMemory;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_iow_nr, ioctl_iowr_nr};

use super::state;
use super::vm::KvmError;
use crate::arch::x86_64::{cpuid, msr, regs};
use crate::cpu::MsrModifier;

const KVMIO: u32 = 0xae;
ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, KVMIO, 0x8b, u32);
ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);

/// The size of the kernel's signal set, 64 bits, whatever libc's is.
const KERNEL_SIGSET_SIZE: u32 = 8;

#[repr(C, packed)]
struct SignalMask {
    len: u32,
    blocked: u64,
}

/// The processor that every vCPU of a VM is made as.
pub struct Processor<'a> {
    /// The CPUID leaves that the guest is offered.
    pub offered: &'a [kvm_cpuid_entry2],
    pub topology: cpuid::Topology,
    /// Changes of the MSRs that KVM gives a new vCPU.
    pub msrs: &'a [MsrModifier],
}

/// Sets the state that firmware would leave in a new vCPU: CPUID leaves first, because KVM checks
/// the rest against them. Only the boot processor gets an entry point; it starts the others.
pub fn configure(
    vcpu: &VcpuFd,
    id: u32,
    processor: &Processor,
    entry: Option<regs::EntryPoint>,
    memory: &GuestMemory,
) -> Result<(), KvmError> {
    let failed = |what| move |error: kvm_ioctls::Error| error_for(id, what, error.into());
    let cpuid = cpuid::for_vcpu(processor.offered, id, processor.topology)
        .map_err(|error| error_for(id, "cpuid", io::Error::other(error)))?;
    vcpu.set_cpuid2(&cpuid).map_err(failed("cpuid"))?;
    if let Some(xcrs) = regs::extended_control(processor.offered) {
        vcpu.set_xcrs(&xcrs).map_err(failed("extended control registers"))?;
    }
    let msrs = msr::boot().map_err(|error| error_for(id, "msrs", io::Error::other(error)))?;
    let written = vcpu.set_msrs(&msrs).map_err(failed("msrs"))?;
    if written != msrs.as_slice().len() {
        let refused = io::Error::other(format!("only {written} were accepted"));
        return Err(error_for(id, "msrs", refused));
    }
    state::modify_msrs(vcpu, id, processor.msrs)?;
    vcpu.set_fpu(&regs::fpu()).map_err(failed("floating-point registers"))?;
    let Some(entry) = entry else { return Ok(()) };
    let sregs = vcpu.get_sregs().map_err(failed("system registers"))?;
    let sregs = regs::system(sregs, entry, memory)
        .map_err(|error| error_for(id, "system registers", io::Error::other(error)))?;
    vcpu.set_sregs(&sregs).map_err(failed("system registers"))?;
    vcpu.set_regs(&regs::general(entry)).map_err(failed("registers"))
}

/// Unblocks `signal` while the guest runs, and only then.
///
/// The thread keeps the signal blocked. So a kick that comes at any time either ends the run or
/// prevents the next one, and no signal handler is needed, which would affect the whole process.
pub fn unblock_while_running(vcpu: &VcpuFd, signal: i32) -> io::Result<()> {
    let blocked = !(1u64 << (signal - 1));
    let mask = SignalMask { len: KERNEL_SIGSET_SIZE, blocked };
    // SAFETY: the kernel reads `len` and then as many bytes after it, which is exactly `mask`.
    match unsafe { ioctl_with_ref(vcpu, KVM_SET_SIGNAL_MASK(), &mask) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Maps guest memory, by address and length, into the vCPU's page tables before it is accessed.
/// This is an optimization: a failure is ignored, and the guest's access maps the page later.
pub fn pre_fault(vcpu: &VcpuFd, ranges: &[(u64, u64)]) {
    for (address, len) in ranges {
        let mut range = kvm_pre_fault_memory { gpa: *address, size: *len, ..Default::default() };
        while range.size > 0 {
            // SAFETY: the kernel reads and writes this struct only, in which it returns what is
            // left.
            if unsafe { ioctl_with_mut_ref(vcpu, KVM_PRE_FAULT_MEMORY(), &mut range) } != 0 {
                return;
            }
        }
    }
}

fn error_for(id: u32, what: &'static str, source: io::Error) -> KvmError {
    KvmError::Vcpu { id, what, source }
}
