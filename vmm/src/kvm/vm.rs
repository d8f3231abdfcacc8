//! A KVM virtual machine, made in the order that keeps it fast.
//!
//! Memory slots and vCPUs come before anything that registers on KVM's I/O bus: since Linux 6.18
//! such a registration makes the next slot or vCPU wait for an RCU grace period, milliseconds each.
//! That is also why the irqchip is split: KVM keeps the local APICs, the I/O APIC is in `devices/`.
#![allow(unsafe_code)] // Memory slots hand host addresses to the kernel.

use std::io;
use std::process;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kvm_bindings::{
    CpuId, KVM_CAP_PRE_FAULT_MEMORY, KVM_CAP_SPLIT_IRQCHIP, KVM_MAX_CPUID_ENTRIES, KVMIO, Msrs,
    kvm_cpuid_entry2, kvm_enable_cap, kvm_msi, kvm_msr_entry, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, Kvm as KvmFd, VcpuFd, VmFd};
use pvmm_devices::GuestMemory;
use pvmm_devices::lines::{self, Deliver};
use pvmm_devices::virtio::mmio::KickShortcut;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::ioctl;
use vmm_sys_util::ioctl_io_nr;

use super::state::StateShape;
use crate::ablation::Mechanism;
use crate::arch::x86_64::{cpuid, layout};
use crate::cpu::{CpuBaseline, CpuError};
use crate::error::{Error, ErrorKind};

/// How often creating a VM is retried when a signal interrupts it.
const CREATE_ATTEMPTS: u32 = 5;
/// The most kinds of new vCPUs whose initial MSRs are cached.
const MAX_FRESH: usize = 64;

ioctl_io_nr!(KVM_GET_TSC_KHZ, KVMIO, 0xa3);

const REQUIRED: [(Cap, &str); 6] = [
    (Cap::SignalMsi, "message-signalled interrupts"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::SplitIrqchip, "split irqchip"),
    (Cap::UserMemory, "user memory"),
    (Cap::TscDeadlineTimer, "TSC deadline timer"),
    (Cap::AdjustClock, "clock"),
];

/// A KVM call that failed, or a missing capability.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    #[error("cannot open /dev/kvm; run `pvmm doctor`")]
    Open(#[source] kvm_ioctls::Error),
    #[error("this KVM has no {0}; run `pvmm doctor`")]
    Missing(&'static str),
    #[error("cannot create a virtual machine")]
    CreateVm(#[source] kvm_ioctls::Error),
    #[error("cannot set up the interrupt controller")]
    Irqchip(#[source] kvm_ioctls::Error),
    #[error("cannot give the guest {len:#x} bytes of memory at {address:#x}")]
    MemorySlot { address: u64, len: u64, source: kvm_ioctls::Error },
    #[error("cannot create vCPU {id}")]
    CreateVcpu { id: u32, source: kvm_ioctls::Error },
    #[error("cannot read what the processor supports")]
    Cpuid(#[source] kvm_ioctls::Error),
    #[error("cannot read the rate of the host's clock")]
    ClockRate(#[source] io::Error),
    #[error("cannot read or set the guest's clock")]
    Clock(#[source] kvm_ioctls::Error),
    #[error("{what} of vCPU {id}: not accepted")]
    Vcpu { id: u32, what: &'static str, source: io::Error },
}

impl KvmError {
    /// Returns whose fault the error is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Open(_) | Self::Missing(_) | Self::Cpuid(_) => ErrorKind::HostUnsupported,
            Self::CreateVm(_)
            | Self::Irqchip(_)
            | Self::MemorySlot { .. }
            | Self::CreateVcpu { .. }
            | Self::ClockRate(_)
            | Self::Clock(_)
            | Self::Vcpu { .. } => ErrorKind::HostResource,
        }
    }
}

impl From<KvmError> for Error {
    fn from(error: KvmError) -> Self {
        Self::new(error.kind(), "KVM", error)
    }
}

/// A handle to this host's KVM, which is open and whose capabilities are known. A program makes one
/// and passes it to whatever makes VMs; clones share it.
#[derive(Clone)]
pub struct Kvm(pub(crate) Arc<KvmHost>);

impl Kvm {
    /// Opens `/dev/kvm`. Fails with [`ErrorKind::HostUnsupported`] if this user may not open it, or
    /// if it lacks a capability that every VM needs.
    pub fn open() -> Result<Self, Error> {
        Ok(Self(Arc::new(KvmHost::open()?)))
    }

    /// Returns the vendor of this host's processor, as in CPUID leaf 0: `GenuineIntel`,
    /// `AuthenticAMD` or another.
    pub fn cpu_vendor(&self) -> String {
        cpuid::vendor(self.0.supported_cpuid.as_slice())
    }
}

impl std::fmt::Debug for Kvm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kvm").finish_non_exhaustive()
    }
}

/// This host's KVM and its capabilities, queried once.
pub struct KvmHost {
    kvm: KvmFd,
    supported_cpuid: CpuId,
    shape: Arc<StateShape>,
    pre_faults: bool,
    scales_clock: bool,
    clock_khz: OnceLock<u32>,
    /// The VM that was created to query the clock rate, and the process that may use it. The next
    /// VM of this process is made of it.
    spare: Mutex<Option<(u32, VmFd)>>,
    initial_msrs: Mutex<Vec<InitialMsrs>>,
}

/// The nonzero MSRs of a new vCPU with this number and these CPUID leaves.
struct InitialMsrs {
    id: u32,
    cpuid: Vec<kvm_cpuid_entry2>,
    msrs: Arc<[(u32, u64)]>,
}

impl KvmHost {
    /// Opens `/dev/kvm` and queries its capabilities.
    pub fn open() -> Result<Self, KvmError> {
        let kvm = KvmFd::new().map_err(KvmError::Open)?;
        for (cap, name) in REQUIRED {
            if !kvm.check_extension(cap) {
                return Err(KvmError::Missing(name));
            }
        }
        let most = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(KvmError::Cpuid)?;
        // Without the unused capacity.
        let supported_cpuid = CpuId::from_entries(most.as_slice()).unwrap_or(most);
        let shape = Arc::new(StateShape::of(&kvm).map_err(KvmError::Cpuid)?);
        let pre_faults = kvm.check_extension_raw(KVM_CAP_PRE_FAULT_MEMORY.into()) > 0;
        let scales_clock = kvm.check_extension(Cap::TscControl);
        Ok(Self {
            kvm,
            supported_cpuid,
            shape,
            pre_faults,
            scales_clock,
            clock_khz: OnceLock::new(),
            spare: Mutex::default(),
            initial_msrs: Mutex::default(),
        })
    }

    /// Returns the rate of the host's TSC in kHz, as its kernel has measured it in this boot.
    ///
    /// Only a VM can be asked. The VM that is created for this is kept for the next [`KvmVm::new`].
    pub fn clock_khz(&self) -> Result<u32, KvmError> {
        if let Some(known) = self.clock_khz.get() {
            return Ok(*known);
        }
        let vm = create_vm(&self.kvm)?;
        // SAFETY: this call takes no argument and only returns a number.
        let khz = match unsafe { ioctl(&vm, KVM_GET_TSC_KHZ()) } {
            khz if khz > 0 => {
                let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
                *spare = Some((process::id(), vm));
                khz as u32
            }
            // Before Linux 5.16 only a vCPU can be asked.
            _ => {
                let failed = |error: kvm_ioctls::Error| KvmError::ClockRate(error.into());
                vm.create_vcpu(0).and_then(|vcpu| vcpu.get_tsc_khz()).map_err(failed)?
            }
        };
        Ok(*self.clock_khz.get_or_init(|| khz))
    }

    /// Returns whether a guest's clock can run at a rate other than the host's.
    pub fn scales_clock(&self) -> bool {
        self.scales_clock
    }

    /// Returns an MSR that lists features, as KVM supports it on this host; zero if there is none.
    pub fn feature_msr(&self, index: u32) -> u64 {
        let entry = kvm_msr_entry { index, ..Default::default() };
        let Ok(mut msrs) = Msrs::from_entries(&[entry]) else { return 0 };
        match self.kvm.get_msrs(&mut msrs) {
            Ok(1) => msrs.as_slice().first().map_or(0, |entry| entry.data),
            _ => 0,
        }
    }

    /// Returns how a vCPU's state is read and set on this host.
    pub fn shape(&self) -> &Arc<StateShape> {
        &self.shape
    }

    /// Returns an empty VM of this process.
    fn create_vm(&self) -> Result<VmFd, KvmError> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).take();
        match spare {
            // A VM that was created before a process fork belongs to the other process.
            Some((process, vm)) if process == process::id() => Ok(vm),
            _ => create_vm(&self.kvm),
        }
    }

    /// Returns whether KVM can map guest memory before it is accessed.
    pub fn pre_faults(&self) -> bool {
        self.pre_faults
    }

    pub fn supported_cpuid(&self) -> &CpuId {
        &self.supported_cpuid
    }

    /// Returns the CPUID leaves that a guest with this baseline is offered. Fails if this host
    /// lacks something of the baseline.
    pub fn offered(&self, cpu: &CpuBaseline) -> Result<Vec<kvm_cpuid_entry2>, CpuError> {
        let lacks = |number: &&u32| {
            let number = std::ffi::c_ulong::from(**number);
            self.kvm.check_extension_raw(number) <= 0
        };
        if let Some(number) = cpu.capabilities().iter().find(lacks) {
            return Err(CpuError::Capability(*number));
        }
        let keeps = |address: u32| self.shape.keeps_msr(address);
        if let Some(unknown) = cpu.msr_modifiers().iter().find(|it| !keeps(it.address)) {
            return Err(CpuError::Msr(unknown.address));
        }
        cpu.offered(self.supported_cpuid.as_slice())
    }

    /// Returns the nonzero MSRs of a new vCPU. `ask` reads them for the first vCPU of a kind.
    pub fn initial_msrs(
        &self,
        id: u32,
        cpuid: &[kvm_cpuid_entry2],
        ask: impl FnOnce() -> Result<Vec<(u32, u64)>, KvmError>,
    ) -> Result<Arc<[(u32, u64)]>, KvmError> {
        let mut known = self.initial_msrs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(initial_msrs) =
            known.iter().find(|initial_msrs| initial_msrs.id == id && initial_msrs.cpuid == cpuid)
        {
            return Ok(initial_msrs.msrs.clone());
        }
        let msrs: Arc<[_]> = ask()?.into();
        if known.len() >= MAX_FRESH {
            known.clear();
        }
        known.push(InitialMsrs { id, cpuid: cpuid.to_vec(), msrs: msrs.clone() });
        Ok(msrs)
    }
}

/// A virtual machine.
pub struct KvmVm {
    fd: Arc<VmFd>,
    host: Arc<KvmHost>,
    // KVM accesses guest memory through these mappings for as long as the VM exists.
    _memory: GuestMemory,
}

impl KvmVm {
    /// Creates a VM with `memory`, and with local APICs for vCPUs to be created.
    pub fn new(host: &Arc<KvmHost>, memory: &GuestMemory) -> Result<Self, KvmError> {
        let fd = host.create_vm()?;
        // Intel processors need two private areas for real mode; others ignore them.
        fd.set_identity_map_address(layout::IDENTITY_MAP).map_err(KvmError::CreateVm)?;
        fd.set_tss_address(layout::TSS).map_err(KvmError::CreateVm)?;
        let mut split = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
        split.args[0] = lines::PINS as u64;
        fd.enable_cap(&split).map_err(KvmError::Irqchip)?;
        for (slot, region) in memory.iter().enumerate() {
            let (address, len) = (region.start_addr().raw_value(), region.len());
            let slot = kvm_userspace_memory_region {
                slot: slot as u32,
                flags: 0,
                guest_phys_addr: address,
                memory_size: len,
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the region is a live mapping of `len` bytes, and `_memory` keeps it mapped
            // for as long as the VM exists.
            unsafe { fd.set_user_memory_region(slot) }.map_err(|source| KvmError::MemorySlot {
                address,
                len,
                source,
            })?;
        }
        Ok(Self { fd: Arc::new(fd), host: host.clone(), _memory: memory.clone() })
    }

    /// Creates a vCPU. Must be called before any `connect`.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuFd, KvmError> {
        self.fd.create_vcpu(id.into()).map_err(|source| KvmError::CreateVcpu { id, source })
    }

    /// Returns how a vCPU's state is read and set on this host.
    pub fn shape(&self) -> &Arc<StateShape> {
        self.host.shape()
    }

    pub fn fd(&self) -> &Arc<VmFd> {
        &self.fd
    }

    /// Returns the host that this VM was created on.
    pub fn host(&self) -> &Arc<KvmHost> {
        &self.host
    }

    /// Returns the function that delivers device interrupts to the vCPUs. It does not use irqfds:
    /// connecting one, and each change of its route, costs more than all interrupts of a short
    /// command.
    pub fn deliver(&self) -> Deliver {
        let vm = self.fd.clone();
        Box::new(move |message| {
            let (address_lo, data) = (message.address, message.data);
            // KVM refuses only messages that the guest itself misconfigured; their interrupts are
            // not delivered.
            let _ = vm.signal_msi(kvm_msi { address_lo, data, ..Default::default() });
        })
    }

    /// Returns the connector for ioeventfds on guest stores at `address`.
    pub fn kicks_at(&self, address: u64) -> KvmKicks {
        KvmKicks { vm: self.fd.clone(), address }
    }
}

/// Queue notifications that stay in the kernel, as ioeventfds. Adding one makes all users of KVM
/// wait for a moment.
pub struct KvmKicks {
    vm: Arc<VmFd>,
    address: u64,
}

impl KickShortcut for KvmKicks {
    fn connect(&self, queue: u32, kick: &EventFd) -> io::Result<()> {
        if !Mechanism::KickShortcut.in_use() {
            return Ok(());
        }
        let address = IoEventAddress::Mmio(self.address);
        Ok(self.vm.register_ioevent(kick, &address, queue)?)
    }
}

fn create_vm(kvm: &KvmFd) -> Result<VmFd, KvmError> {
    let mut attempt = 1;
    loop {
        match kvm.create_vm() {
            // Creating a VM waits for a kernel thread, and a signal interrupts that wait.
            Err(error) if error.errno() == libc::EINTR && attempt < CREATE_ATTEMPTS => attempt += 1,
            result => return result.map_err(KvmError::CreateVm),
        }
    }
}
