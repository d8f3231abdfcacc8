//! Freeze: from a running machine to a template, with a pause as short as its changed pages are few.
//!
//! vCPUs and devices stand still while registers are read, each disk gets an empty layer on top, and the
//! pages that the guest has changed move into a sealed file. Writing any of it to a disk comes later.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::kvm::state;
use crate::snapshot::state::MachineState;
use crate::template::Template;
use crate::vcpu::thread::VcpuThread;
use crate::vm::Vm;

impl Vm {
    /// Everything that the machine is at this instant. It runs on afterwards if it ran before.
    pub fn freeze(&mut self) -> Result<Template, Error> {
        let was_running = self.running;
        self.pause()?;
        let frozen = self.freeze_paused();
        if was_running {
            self.resume()?;
        }
        frozen
    }

    fn freeze_paused(&mut self) -> Result<Template, Error> {
        let machine = Arc::new(self.save_state()?);
        let failed = |index: usize| {
            move |error: std::io::Error| {
                Error::new(
                    ErrorKind::HostResource,
                    format!("drive {index}: cannot freeze it"),
                    error,
                )
            }
        };
        let drives = self.held.drives.iter().enumerate();
        let drives = drives
            .map(|(index, drive)| drive.storage.freeze(&self.held.scratch).map_err(failed(index)))
            .collect::<Result<_, _>>()?;
        self.memory.freeze()?;
        Ok(Template {
            host: Template::host()?,
            machine,
            image: self.memory.image.clone(),
            drives,
            taps: self.held.taps.clone(),
            vsock_path: self.held.vsock_path.clone(),
            base: self.held.base.clone(),
        })
    }

    /// Registers of vCPUs and devices. Devices before vCPUs: they may still raise an interrupt.
    fn save_state(&self) -> Result<MachineState, Error> {
        let save = |transport: &Arc<pvmm_devices::virtio::mmio::MmioTransport>| transport.save();
        let transports = self.transports.iter().map(save).collect::<Result<_, _>>()?;
        let asked = self.vcpus.iter().map(VcpuThread::save).collect::<Result<Vec<_>, _>>()?;
        let wait = |vcpu: crate::vcpu::thread::Answer<_>| {
            vcpu.wait().map(|state: Box<_>| Arc::from(state))
        };
        let vcpus = asked.into_iter().map(wait).collect::<Result<_, _>>()?;
        Ok(MachineState {
            clock: state::save_clock(self.kvm.fd())?,
            vcpus,
            ioapic: self.ioapic.save(),
            serial: self.serial.save(),
            transports,
        })
    }
}
