//! Everything about a machine that is neither memory nor disk, as plain data.

use std::sync::Arc;

use pvmm_devices::ioapic::IoapicStateV1;
use pvmm_devices::legacy::SerialStateV1;
use pvmm_devices::virtio::mmio::TransportStateV1;

use crate::kvm::state::{ClockStateV2, VcpuStateV1};

/// A machine at one instant.
#[derive(Clone)]
pub struct MachineState {
    pub clock: ClockStateV2,
    pub vcpus: Vec<Arc<VcpuStateV1>>,
    pub ioapic: IoapicStateV1,
    pub serial: SerialStateV1,
    pub transports: Vec<TransportStateV1>,
}
