//! The generation identifier: 16 random bytes that change when a machine is restored or forked.
//!
//! A guest cannot detect by itself that it was restored or forked. The bytes are in guest memory,
//! where a snapshot keeps them, and an interrupt notifies the guest of new ones: Linux then reseeds
//! its random generator.

use std::io;

use vm_memory::{Bytes, GuestAddress};

use crate::lines::Line;
use crate::{GuestMemory, sys};

/// The length of the identifier.
pub const SIZE: usize = 16;

/// Why the identifier could not be written.
#[derive(Debug, thiserror::Error)]
pub enum VmGenIdError {
    #[error("the host has no random bytes for a generation identifier")]
    Random(#[source] io::Error),
    #[error("the generation identifier at {address:#x} is not in guest memory")]
    Memory { address: u64, source: vm_memory::GuestMemoryError },
}

/// The identifier of one machine. The guest may overwrite the bytes; the host never reads them.
#[derive(Debug)]
pub struct VmGenId {
    memory: GuestMemory,
    address: GuestAddress,
    line: Line,
}

impl VmGenId {
    /// Creates the device. The bytes in guest memory stay as they are until `write` or `renew`.
    pub fn new(memory: &GuestMemory, address: GuestAddress, line: Line) -> Self {
        Self { memory: memory.clone(), address, line }
    }

    /// Writes a new identifier and notifies the guest. Call it only once the I/O APIC and the local
    /// APICs are restored: an earlier interrupt is lost.
    pub fn renew(&self) -> Result<(), VmGenIdError> {
        self.write()?;
        self.line.raise();
        Ok(())
    }

    /// Writes the first identifier of a machine, whose guest has not read one yet.
    pub fn write(&self) -> Result<(), VmGenIdError> {
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
    use crate::lines::testing;

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
    fn write_puts_bytes_there_without_an_interrupt() {
        let (memory, (line, raised)) = (memory(), testing::line());
        VmGenId::new(&memory, ADDRESS, line).write().unwrap();
        assert_ne!(bytes(&memory), [0; SIZE]);
        assert_eq!(raised.take(), 0);
    }

    #[test]
    fn new_keeps_the_bytes_and_renew_changes_them_with_an_interrupt() {
        let (memory, (line, raised)) = (memory(), testing::line());
        memory.write_slice(&[7; SIZE], ADDRESS).unwrap();
        let generation = VmGenId::new(&memory, ADDRESS, line);
        assert_eq!(bytes(&memory), [7; SIZE]);
        generation.renew().unwrap();
        let first = bytes(&memory);
        generation.renew().unwrap();
        assert!(first != [7; SIZE] && first != bytes(&memory));
        assert_eq!(raised.take(), 2);
    }

    #[test]
    fn write_outside_of_memory_is_refused() {
        for address in [0x1ff8, 0x2000, u64::MAX] {
            let generation = VmGenId::new(&memory(), GuestAddress(address), testing::line().0);
            let refused = generation.write().unwrap_err();
            assert!(matches!(refused, VmGenIdError::Memory { .. }), "{refused}");
        }
    }
}
