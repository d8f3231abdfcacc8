//! The MP table: processors and interrupt lines for a kernel that does not read ACPI.
//!
//! A kernel with `acpi=off`, or built without ACPI, finds its virtio devices by
//! `virtio_mmio.device=` on the command line, which names interrupt lines but not how they reach a
//! processor. This table, of Intel's MultiProcessor Specification 1.4, describes that.

use pvmm_devices::GuestMemory;
use pvmm_devices::lines::PINS;
use vm_memory::Bytes;

use super::layout;
use crate::error::{Error, ErrorKind};

const SPEC_1_4: u8 = 4;
/// The length of the floating pointer in units of 16 bytes, as encoded in the pointer.
const POINTER_UNITS: u8 = 1;
const POINTER_LEN: u32 = 16;
const HEADER_LEN: u16 = 44;
/// The offsets of the checksum bytes, which make the sum of a table zero.
const POINTER_CHECKSUM: usize = 10;
const HEADER_CHECKSUM: usize = 7;

const PROCESSOR: u8 = 0;
const BUS: u8 = 1;
const IOAPIC: u8 = 2;
const IO_INTERRUPT: u8 = 3;
const LOCAL_INTERRUPT: u8 = 4;

const ENABLED: u8 = 1;
const BOOT_PROCESSOR: u8 = 2;
const LOCAL_APIC_VERSION: u8 = 0x14;
const IOAPIC_VERSION: u8 = 0x11;
const ISA: u8 = 0;
const FIXED: u8 = 0;
const NMI: u8 = 1;
const EVERY_LOCAL_APIC: u8 = 0xff;
const NMI_PIN: u8 = 1;

/// Reasons why the table could not be written.
#[derive(Debug, thiserror::Error)]
pub enum MpTableError {
    #[error("an MP table of {0} bytes does not fit into its page")]
    TooBig(usize),
    #[error("guest memory cannot be written")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

impl From<MpTableError> for Error {
    fn from(error: MpTableError) -> Self {
        Self::new(ErrorKind::Bug, "cannot write the machine's tables", error)
    }
}

/// Writes the table at the address where kernels search for it.
pub fn write(vcpus: u32, memory: &GuestMemory) -> Result<(), MpTableError> {
    let address = layout::MP_TABLE.0 as u32 + POINTER_LEN;
    let table = [floating_pointer(address), configuration(vcpus as u8)].concat();
    if table.len() > layout::MP_TABLE_SIZE {
        return Err(MpTableError::TooBig(table.len()));
    }
    memory.write_slice(&table, layout::MP_TABLE).map_err(MpTableError::Memory)
}

/// Returns the floating pointer, which kernels search for and which contains the address of the
/// configuration.
fn floating_pointer(configuration: u32) -> Vec<u8> {
    let fields: [&[u8]; 4] =
        [b"_MP_", &configuration.to_le_bytes(), &[POINTER_UNITS, SPEC_1_4], &[0; 6]];
    with_checksum(fields.concat(), POINTER_CHECKSUM)
}

/// Returns the header and its entries, sorted by type as the specification requires.
fn configuration(vcpus: u8) -> Vec<u8> {
    // The I/O APIC's id must not be that of a processor.
    let (ioapic, address) = (vcpus, (layout::IOAPIC as u32).to_le_bytes());
    let mut entries: Vec<Vec<u8>> = (0..vcpus).map(processor).collect();
    entries.push([&[BUS, ISA], b"ISA   ".as_slice()].concat());
    entries.push([[IOAPIC, ioapic, IOAPIC_VERSION, ENABLED], address].concat());
    let line = |pin: u8| vec![IO_INTERRUPT, FIXED, 0, 0, ISA, pin, ioapic, pin];
    entries.extend((0..PINS as u8).map(line));
    entries.push(vec![LOCAL_INTERRUPT, NMI, 0, 0, ISA, 0, EVERY_LOCAL_APIC, NMI_PIN]);

    let (count, body) = (entries.len() as u16, entries.concat());
    let length = HEADER_LEN + body.len() as u16;
    let fields: [&[u8]; 10] = [
        b"PCMP",
        &length.to_le_bytes(),
        &[SPEC_1_4, 0],
        b"PVMM    ",
        b"PVMM        ",
        &[0; 6],
        &count.to_le_bytes(),
        &(layout::LOCAL_APIC as u32).to_le_bytes(),
        &[0; 4],
        &body,
    ];
    with_checksum(fields.concat(), HEADER_CHECKSUM)
}

fn processor(id: u8) -> Vec<u8> {
    let flags = if id == 0 { ENABLED | BOOT_PROCESSOR } else { ENABLED };
    // Signature and feature flags stay zero: a kernel reads CPUID.
    [[PROCESSOR, id, LOCAL_APIC_VERSION, flags].as_slice(), &[0; 16]].concat()
}

/// Sets the byte at `index`, which must be zero, so that all bytes add up to zero.
fn with_checksum(mut table: Vec<u8>, index: usize) -> Vec<u8> {
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(checksum) = table.get_mut(index) {
        *checksum = sum.wrapping_neg();
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MAX_VCPUS;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    #[test]
    fn mp_table_is_found_whole_and_adds_up() {
        let pointer = floating_pointer(0xf_0010);
        assert_eq!((pointer.len(), sum(&pointer)), (16, 0));
        assert_eq!(pointer[..8], [b'_', b'M', b'P', b'_', 0x10, 0, 0xf, 0]);
        for vcpus in [1, 2, MAX_VCPUS as u8] {
            let table = configuration(vcpus);
            let length = u16::from_le_bytes([table[4], table[5]]);
            assert_eq!((length as usize, sum(&table)), (table.len(), 0));
            assert!(16 + table.len() <= layout::MP_TABLE_SIZE, "{vcpus}");
        }
    }

    /// Walks the entries as a kernel does, by the length of each type.
    #[test]
    fn mp_table_counts_its_processors_and_interrupt_lines() {
        let table = configuration(3);
        let (mut rest, mut of_type) = (&table[44..], [0; 5]);
        while let [kind, ..] = *rest {
            of_type[kind as usize] += 1;
            rest = &rest[if kind == PROCESSOR { 20 } else { 8 }..];
        }
        assert_eq!(of_type, [3, 1, 1, PINS, 1]);
        let count = u16::from_le_bytes([table[34], table[35]]);
        assert_eq!(count as usize, of_type.iter().sum::<usize>());
    }
}
