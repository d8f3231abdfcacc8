//! The generation identifier: 16 random bytes that change when a machine lives a second time.
//!
//! A guest cannot see that it was restored or forked; this is how it is told. The bytes lie in guest
//! memory, where a snapshot keeps them, and an interrupt says that they are new: Linux then reseeds its
//! random generator.

use std::io;

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{GuestMemory, sys};

/// Bytes of the identifier.
pub const SIZE: usize = 16;

/// What kept the identifier from being made or changed.
#[derive(Debug, thiserror::Error)]
pub enum VmGenIdError {
    #[error("cannot make the event descriptor of the generation identifier")]
    Event(#[source] io::Error),
    #[error("the host has no random bytes for a generation identifier")]
    Random(#[source] io::Error),
    #[error("the generation identifier at {address:#x} is not in guest memory")]
    Memory { address: u64, source: vm_memory::GuestMemoryError },
    #[error("cannot tell the guest of its new generation")]
    Signal(#[source] io::Error),
}

/// The identifier of one machine. The guest may overwrite the bytes; nobody here reads them.
#[derive(Debug)]
pub struct VmGenId {
    memory: GuestMemory,
    address: GuestAddress,
    event: EventFd,
}

impl VmGenId {
    /// For a machine that boots: writes its first identifier.
    pub fn new(memory: &GuestMemory, address: GuestAddress) -> Result<Self, VmGenIdError> {
        let generation = Self::existing(memory, address)?;
        generation.write()?;
        Ok(generation)
    }

    /// For a machine whose memory holds an identifier already; it stays until `renew`.
    pub fn existing(memory: &GuestMemory, address: GuestAddress) -> Result<Self, VmGenIdError> {
        let event = EventFd::new(EFD_NONBLOCK).map_err(VmGenIdError::Event)?;
        Ok(Self { memory: memory.clone(), address, event })
    }

    /// Writes a new identifier and tells the guest. Only once the interrupt's route and the local APICs
    /// are in place: an event that comes before them is lost.
    pub fn renew(&self) -> Result<(), VmGenIdError> {
        self.write()?;
        self.event.write(1).map_err(VmGenIdError::Signal)
    }

    /// The descriptor to connect to an interrupt of the guest.
    pub fn interrupt(&self) -> &EventFd {
        &self.event
    }

    fn write(&self) -> Result<(), VmGenIdError> {
        let mut bytes = [0; SIZE];
        let got = sys::random(&mut bytes).map_err(VmGenIdError::Random)?;
        if got != SIZE {
            return Err(VmGenIdError::Random(io::ErrorKind::UnexpectedEof.into()));
        }
        let address = self.address;
        self.memory
            .write_slice(&bytes, address)
            .map_err(|source| VmGenIdError::Memory { address: address.0, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: GuestAddress = GuestAddress(0x1000);

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0), 0x2000)]).unwrap()
    }

    fn bytes(memory: &GuestMemory) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        memory.read_slice(&mut bytes, ADDRESS).unwrap();
        bytes
    }

    #[test]
    fn new_writes_bytes_without_an_event() {
        let memory = memory();
        let generation = VmGenId::new(&memory, ADDRESS).unwrap();
        assert_ne!(bytes(&memory), [0; SIZE]);
        assert!(generation.interrupt().read().is_err());
    }

    #[test]
    fn existing_keeps_the_bytes_and_renew_changes_them_with_an_event() {
        let memory = memory();
        memory.write_slice(&[7; SIZE], ADDRESS).unwrap();
        let generation = VmGenId::existing(&memory, ADDRESS).unwrap();
        assert_eq!(bytes(&memory), [7; SIZE]);
        generation.renew().unwrap();
        let first = bytes(&memory);
        generation.renew().unwrap();
        assert!(first != [7; SIZE] && first != bytes(&memory));
        assert_eq!(generation.interrupt().read().unwrap(), 2);
    }

    #[test]
    fn new_outside_of_memory_is_refused() {
        for address in [0x1ff8, 0x2000, u64::MAX] {
            let refused = VmGenId::new(&memory(), GuestAddress(address)).unwrap_err();
            assert!(matches!(refused, VmGenIdError::Memory { .. }), "{refused}");
        }
    }
}
