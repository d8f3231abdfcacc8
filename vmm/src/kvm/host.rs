//! Probes whether this host's KVM can run an unmodified guest, by running one.
//!
//! Opening the device or creating a VM proves nothing: a KVM without hardware virtualization
//! supports both and then fails in the middle of a guest's boot. So the probe runs the instructions
//! that such a KVM refuses, and checks how the vCPU exits.

#![allow(unsafe_code)] // Guest memory is given to KVM.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::vcpu::unblock_while_running;
use crate::sys;

/// The time limit of the guest code. It is about thirty instructions; the slack is for a busy
/// machine that is itself emulated.
const DEADLINE: Duration = Duration::from_secs(10);

/// The time limit for stopping a late vCPU.
const STOP_DEADLINE: Duration = Duration::from_secs(2);

/// The result of a successful probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The module behind `/dev/kvm`: `kvm_intel`, `kvm_amd`, `kvm_pvm`, or `kvm` if unknown.
    pub backend: &'static str,
    /// `KVM_GET_API_VERSION`; 12 on every kernel since 2.6.22.
    pub api_version: i32,
    /// The most vCPUs of one VM.
    pub max_vcpus: usize,
    /// The most memory slots of one VM.
    pub max_memslots: usize,
}

/// Reasons why no guest can run on this host.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// There is no `/dev/kvm`, or it has no driver.
    #[error("/dev/kvm does not exist")]
    NoDevice,
    /// This user may not open `/dev/kvm`.
    #[error("no permission to open /dev/kvm")]
    NoPermission(#[source] io::Error),
    /// Opening `/dev/kvm` failed for another reason.
    #[error("cannot open /dev/kvm")]
    Open(#[source] io::Error),
    /// KVM does not create a VM.
    #[error("{backend}: cannot create a VM")]
    CreateVm {
        /// The module behind `/dev/kvm`.
        backend: &'static str,
        /// The error of KVM.
        #[source]
        source: io::Error,
    },
    /// A VM was created and could not be prepared to run.
    #[error("{backend}: cannot set up a VM ({step})")]
    SetUp {
        /// The module behind `/dev/kvm`.
        backend: &'static str,
        /// The step that failed.
        step: &'static str,
        /// The error of that step.
        #[source]
        source: io::Error,
    },
    /// The guest code stopped before its end, as on a KVM without hardware virtualization.
    #[error("{backend}: guest code does not run ({seen})")]
    GuestFailed {
        /// The module behind `/dev/kvm`.
        backend: &'static str,
        /// How the vCPU exited.
        seen: String,
    },
    /// The guest code was still running at the time limit.
    #[error("{backend}: guest code did not finish within {} s", DEADLINE.as_secs())]
    GuestHung {
        /// The module behind `/dev/kvm`.
        backend: &'static str,
    },
}

/// Runs guest code on this host's KVM and returns what was found.
///
/// Takes a few milliseconds, at most `DEADLINE` plus `STOP_DEADLINE`, and leaves nothing open.
pub fn probe() -> Result<Host, ProbeError> {
    let backend = backend();
    let kvm = open()?;
    let vm = kvm.create_vm().map_err(|e| ProbeError::CreateVm { backend, source: e.into() })?;
    let set_up = |step| move |source| ProbeError::SetUp { backend, step, source };

    let memory = load_guest().map_err(set_up("guest memory"))?;
    map_guest(&vm, &memory).map_err(set_up("KVM_SET_USER_MEMORY_REGION"))?;
    let vcpu = create_vcpu(&kvm, &vm).map_err(set_up("vCPU"))?;
    // The thread owns everything that the guest accesses, so that a vCPU that cannot be stopped
    // keeps its memory mapped instead of running over freed pages.
    run_guest(vcpu, (vm, memory), backend)?;

    Ok(Host {
        backend,
        api_version: kvm.get_api_version(),
        max_vcpus: kvm.get_max_vcpus(),
        max_memslots: kvm.get_nr_memslots(),
    })
}

/// Returns the kernel module that implements `/dev/kvm`, as far as sysfs shows it.
pub fn backend() -> &'static str {
    backend_in(Path::new("/sys/module"))
}

fn backend_in(modules: &Path) -> &'static str {
    // A module that is loaded but does not drive the CPU is never loaded together with another of
    // these, so the order does not matter.
    ["kvm_intel", "kvm_amd", "kvm_pvm"]
        .into_iter()
        .find(|name| modules.join(name).exists())
        .unwrap_or("kvm")
}

fn open() -> Result<Kvm, ProbeError> {
    if matches!(fs::metadata("/dev/kvm"), Err(e) if e.kind() == io::ErrorKind::NotFound) {
        return Err(ProbeError::NoDevice);
    }
    Kvm::new().map_err(|e| {
        let error = io::Error::from(e);
        match error.kind() {
            io::ErrorKind::PermissionDenied => ProbeError::NoPermission(error),
            // The node exists but has no driver.
            _ if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => {
                ProbeError::NoDevice
            }
            _ => ProbeError::Open(error),
        }
    })
}

// Guest-physical layout, identity-mapped by one 2 MiB page.
const MEMORY_LEN: usize = 0x2_0000;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const GDT: u64 = 0x4000;
const TSS: u64 = 0x4800;
const IDT: u64 = 0x5000;
const CODE: u64 = 0x6000;
const BREAKPOINT_HANDLER: u64 = 0x7000;
const STACK_TOP: u64 = 0x9000;
// 0xa000 is the operand of cmpxchg16b and 0xb000 the XSAVE area; both only appear in `GUEST`.

const CODE_SELECTOR: u16 = 0x08;
const DATA_SELECTOR: u16 = 0x10;
const TSS_SELECTOR: u16 = 0x18;

const REPORT_PORT: u16 = 0xf4;
const REPORT_OK: u8 = 0x5a;

/// Guest code that runs instructions which an emulating KVM refuses, and then reports.
#[rustfmt::skip]
const GUEST: &[u8] = &[
    0x0f, 0x20, 0xe0,                               // mov  rax, cr4
    0x0d, 0x00, 0x00, 0x04, 0x00,                   // or   eax, 1 << 18        OSXSAVE
    0x0f, 0x22, 0xe0,                               // mov  cr4, rax
    0x31, 0xc9,                                     // xor  ecx, ecx
    0x31, 0xd2,                                     // xor  edx, edx
    0xb8, 0x03, 0x00, 0x00, 0x00,                   // mov  eax, 3              x87 | SSE
    0x0f, 0x01, 0xd1,                               // xsetbv
    0x31, 0xed,                                     // xor  ebp, ebp
    0xcc,                                           // int3                     handler sets ebp
    0x81, 0xfd, 0x33, 0xcc, 0x00, 0x00,             // cmp  ebp, 0xcc33
    0x75, 0x38,                                     // jne  fail
    0x31, 0xc0,                                     // xor  eax, eax
    0x31, 0xd2,                                     // xor  edx, edx
    0xbb, 0x01, 0x00, 0x00, 0x00,                   // mov  ebx, 1
    0xb9, 0x02, 0x00, 0x00, 0x00,                   // mov  ecx, 2
    0xf0, 0x48, 0x0f, 0xc7, 0x0c, 0x25,             // lock cmpxchg16b [0xa000]
    0x00, 0xa0, 0x00, 0x00,
    0x75, 0x1e,                                     // jne  fail
    0xb8, 0x03, 0x00, 0x00, 0x00,                   // mov  eax, 3
    0x31, 0xd2,                                     // xor  edx, edx
    0x0f, 0xae, 0x24, 0x25, 0x00, 0xb0, 0x00, 0x00, // xsave  [0xb000]
    0x0f, 0xae, 0x2c, 0x25, 0x00, 0xb0, 0x00, 0x00, // xrstor [0xb000]
    0xb0, REPORT_OK,                                // mov  al, REPORT_OK
    0xe6, REPORT_PORT as u8,                        // out  REPORT_PORT, al
    0xf4,                                           // hlt
    0xeb, 0xfd,                                     // jmp  hlt
    // fail:
    0xb0, 0xee,                                     // mov  al, 0xee
    0xe6, REPORT_PORT as u8,                        // out  REPORT_PORT, al
    0xf4,                                           // hlt
    0xeb, 0xfd,                                     // jmp  hlt
];

#[rustfmt::skip]
const BREAKPOINT: &[u8] = &[
    0xbd, 0x33, 0xcc, 0x00, 0x00,                   // mov  ebp, 0xcc33
    0x48, 0xcf,                                     // iretq
];

/// Fills guest memory with page tables, descriptor tables and code.
fn load_guest() -> io::Result<GuestMemoryMmap> {
    let memory =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_LEN)]).map_err(io::Error::other)?;
    let quad = |address: u64, value: u64| {
        memory.write_obj(value, GuestAddress(address)).map_err(io::Error::other)
    };
    const PRESENT_WRITABLE: u64 = 0x3;
    const HUGE: u64 = 0x80;
    quad(PML4, PDPT | PRESENT_WRITABLE)?;
    quad(PDPT, PD | PRESENT_WRITABLE)?;
    quad(PD, PRESENT_WRITABLE | HUGE)?;

    // The return from the interrupt loads these again, so they must agree with `set_registers`.
    quad(GDT + u64::from(CODE_SELECTOR), 0x00af_9b00_0000_ffff)?;
    quad(GDT + u64::from(DATA_SELECTOR), 0x00cf_9300_0000_ffff)?;
    quad(GDT + u64::from(TSS_SELECTOR), 0x0000_8b00_0000_0067 | (TSS << 16))?;

    // Vector 3, a present 64-bit interrupt gate.
    let gate = (BREAKPOINT_HANDLER & 0xffff)
        | u64::from(CODE_SELECTOR) << 16
        | 0x8e00 << 32
        | (BREAKPOINT_HANDLER >> 16 & 0xffff) << 48;
    quad(IDT + 3 * 16, gate)?;

    memory.write_slice(GUEST, GuestAddress(CODE)).map_err(io::Error::other)?;
    memory.write_slice(BREAKPOINT, GuestAddress(BREAKPOINT_HANDLER)).map_err(io::Error::other)?;
    Ok(memory)
}

fn map_guest(vm: &VmFd, memory: &GuestMemoryMmap) -> io::Result<()> {
    let start = GuestAddress(0);
    let host_address = memory.get_host_address(start).map_err(io::Error::other)?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: start.raw_value(),
        memory_size: MEMORY_LEN as u64,
        userspace_addr: host_address as u64,
    };
    // SAFETY: the mapping is MEMORY_LEN bytes long, belongs to this probe alone, and moves into
    // the vCPU's thread together with the VM, so it outlives every run of the guest.
    unsafe { vm.set_user_memory_region(region) }?;
    Ok(())
}

fn create_vcpu(kvm: &Kvm, vm: &VmFd) -> io::Result<VcpuFd> {
    // Only Intel processors without unrestricted guests need it, so a failure elsewhere does not
    // matter.
    let _ = vm.set_tss_address(0xfffb_d000);
    let vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    vcpu.set_sregs(&long_mode(vcpu.get_sregs()?))?;
    vcpu.set_regs(&kvm_regs { rip: CODE, rsp: STACK_TOP, rflags: 0x2, ..Default::default() })?;
    Ok(vcpu)
}

/// Sets 64-bit mode at CPL 0 with paging on, as a kernel would.
fn long_mode(mut sregs: kvm_sregs) -> kvm_sregs {
    let code = kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: CODE_SELECTOR,
        type_: 0xb,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment { selector: DATA_SELECTOR, type_: 0x3, l: 0, db: 1, ..code };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: TSS,
        limit: 0x67,
        selector: TSS_SELECTOR,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable { base: GDT, limit: 0x27, ..Default::default() };
    sregs.idt = kvm_dtable { base: IDT, limit: 0xfff, ..Default::default() };
    sregs.cr3 = PML4;
    sregs.cr4 = 0x620; // PAE, OSFXSR, OSXMMEXCPT
    sregs.cr0 = 0x8000_0033; // PG, NE, ET, MP, PE
    sregs.efer = 0x500; // LMA, LME
    sregs
}

/// Runs the vCPU on its own thread, and takes it out of the guest when it is late.
fn run_guest<T: Send + 'static>(
    vcpu: VcpuFd,
    keep_alive: T,
    backend: &'static str,
) -> Result<(), ProbeError> {
    let set_up = |step| move |source| ProbeError::SetUp { backend, step, source };
    // A hung vCPU is kicked as those of a VM are, without a signal handler.
    unblock_while_running(&vcpu, sys::kick_signal()).map_err(set_up("signal mask"))?;
    let (report, reported) = mpsc::channel();
    // The thread inherits that the signal is blocked.
    let blocked = sys::BlockedSignals::new().map_err(set_up("signal mask"))?;
    let vcpu_thread = thread::Builder::new()
        .name("kvm-probe".into())
        .spawn(move || {
            let _keep_alive = keep_alive;
            let _ = report.send(run_vcpu(vcpu));
        })
        .map_err(set_up("vCPU thread"))?;
    drop(blocked);

    match reported.recv_timeout(DEADLINE) {
        Ok(outcome) => {
            let _ = vcpu_thread.join();
            outcome.map_err(|seen| ProbeError::GuestFailed { backend, seen })
        }
        Err(_) => {
            let until = Instant::now() + STOP_DEADLINE;
            sys::kick(&vcpu_thread);
            while !vcpu_thread.is_finished() && Instant::now() < until {
                thread::sleep(Duration::from_millis(10));
            }
            Err(ProbeError::GuestHung { backend })
        }
    }
}

/// Runs until the guest has reported and halted; `Err` describes any other exit.
fn run_vcpu(mut vcpu: VcpuFd) -> Result<(), String> {
    match vcpu.run() {
        Ok(VcpuExit::IoOut(REPORT_PORT, [REPORT_OK])) => {}
        Ok(exit) => return Err(describe(&exit)),
        Err(e) => return Err(format!("KVM_RUN: {}", io::Error::from(e))),
    }
    match vcpu.run() {
        Ok(VcpuExit::Hlt) => Ok(()),
        Ok(exit) => Err(format!("{} after the report", describe(&exit))),
        Err(e) => Err(format!("KVM_RUN after the report: {}", io::Error::from(e))),
    }
}

fn describe(exit: &VcpuExit<'_>) -> String {
    match exit {
        VcpuExit::InternalError => "exit KVM_EXIT_INTERNAL_ERROR".into(),
        VcpuExit::Shutdown => "exit KVM_EXIT_SHUTDOWN, a triple fault".into(),
        VcpuExit::FailEntry(reason, _) => format!("exit KVM_EXIT_FAIL_ENTRY, reason {reason:#x}"),
        VcpuExit::IoOut(REPORT_PORT, _) => "an instruction gave a wrong result".into(),
        other => format!("exit {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backend_of_known_module_is_its_name() {
        let modules = tempfile::tempdir().unwrap();
        fs::create_dir(modules.path().join("kvm")).unwrap();
        fs::create_dir(modules.path().join("kvm_amd")).unwrap();
        assert_eq!(backend_in(modules.path()), "kvm_amd");
    }

    #[test]
    fn backend_of_unknown_module_is_kvm() {
        let modules = tempfile::tempdir().unwrap();
        assert_eq!(backend_in(modules.path()), "kvm");
    }

    #[test]
    fn guest_jumps_on_failure_land_on_the_failing_report() {
        let fail = GUEST.len() - 7;
        assert_eq!(&GUEST[fail..fail + 2], &[0xb0, 0xee]);
        let jumps: Vec<usize> = (0..GUEST.len() - 1)
            .filter(|&at| GUEST[at] == 0x75)
            .map(|at| at + 2 + usize::from(GUEST[at + 1]))
            .collect();
        assert_eq!(jumps, [fail, fail]);
    }

    #[test]
    fn probe_answers_the_same_twice_within_its_deadline() {
        let (first, second) = (probe(), probe());
        match (first, second) {
            (Ok(first), Ok(second)) => assert_eq!(first, second),
            (Err(first), Err(second)) => assert_eq!(first.to_string(), second.to_string()),
            (first, second) => panic!("{first:?}, then {second:?}"),
        }
    }
}
