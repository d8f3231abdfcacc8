//! The state of a VM without memory and disks, as plain data.

use std::sync::Arc;

use pvmm_devices::ioapic::IoapicStateV1;
use pvmm_devices::legacy::SerialStateV1;
use pvmm_devices::virtio::mmio::TransportStateV1;

use crate::cpu::CpuBaseline;
use crate::kvm::state::{ClockStateV1, VcpuStateV1};

/// The registers and device states of a paused VM.
#[derive(Clone)]
pub struct MachineState {
    /// The processor features that the guest was offered.
    pub cpu: CpuBaseline,
    pub clock: ClockStateV1,
    pub vcpus: Vec<Arc<VcpuStateV1>>,
    pub ioapic: IoapicStateV1,
    pub serial: SerialStateV1,
    pub transports: Vec<TransportStateV1>,
}
