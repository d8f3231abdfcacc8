//! Interrupt routes: what each line of our I/O APIC delivers, told to KVM.
//!
//! With the routes in place an event on a device's descriptor reaches a vCPU without any of our code.

use std::sync::Arc;

use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry};
use kvm_ioctls::VmFd;
use log::warn;
use pvmm_devices::ioapic::{Message, PINS, Routes};

/// The routes of one machine.
pub struct KvmRoutes {
    vm: Arc<VmFd>,
    messages: [Option<Message>; PINS],
}

impl KvmRoutes {
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm, messages: [None; PINS] }
    }

    // KVM only takes the whole table. A guest changes it a handful of times while it boots.
    fn apply(&self) {
        let routed = self.messages.iter().enumerate();
        let entries: Vec<_> = routed
            .filter_map(|(pin, message)| message.map(|message| entry(pin as u32, message)))
            .collect();
        let applied = KvmIrqRouting::from_entries(&entries)
            .map_err(|error| error.to_string())
            .and_then(|table| self.vm.set_gsi_routing(&table).map_err(|error| error.to_string()));
        if let Err(error) = applied {
            // The guest asked for a message that KVM refuses: its interrupt stays away.
            warn!("interrupt routes refused: {error}");
        }
    }
}

impl Routes for KvmRoutes {
    fn route(&mut self, changes: &[(usize, Option<Message>)]) {
        for (pin, message) in changes {
            self.messages[*pin] = *message;
        }
        self.apply();
    }
}

fn entry(gsi: u32, message: Message) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    entry.u.msi.address_lo = message.address as u32;
    entry.u.msi.address_hi = (message.address >> 32) as u32;
    entry.u.msi.data = message.data;
    entry
}
