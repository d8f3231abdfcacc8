//! The guest-physical memory map.
//!
//! The first MiB holds what the host writes for the kernel. RAM fills the rest up to the device
//! hole, which ends at 4 GiB, and continues above it.

use vm_memory::GuestAddress;

use crate::memory::Region;

/// Descriptor tables for the first instruction.
pub const GDT: GuestAddress = GuestAddress(0x500);
pub const IDT: GuestAddress = GuestAddress(0x520);
/// PVH start info, its memory map and its module list.
pub const PVH_START_INFO: GuestAddress = GuestAddress(0x6000);
pub const PVH_MODULES: GuestAddress = GuestAddress(0x6040);
pub const PVH_MEMORY_MAP: GuestAddress = GuestAddress(0x6100);
/// The Linux boot protocol's zero page.
pub const ZERO_PAGE: GuestAddress = GuestAddress(0x7000);
pub const BOOT_STACK: GuestAddress = GuestAddress(0x8ff0);
/// Page tables for the 64-bit entry: one page each, then a page of 2 MiB entries per GiB.
pub const PML4: GuestAddress = GuestAddress(0x9000);
pub const PDPT: GuestAddress = GuestAddress(0xa000);
pub const PAGE_DIRECTORY: GuestAddress = GuestAddress(0xb000);
pub const CMDLINE: GuestAddress = GuestAddress(0x2_0000);
/// The end of conventional memory; kernels look for an EBDA from here.
pub const LOW_MEMORY_END: u64 = 0x9_fc00;
/// ACPI tables, in the range that firmware uses for them.
pub const ACPI: GuestAddress = GuestAddress(0xe_0000);
pub const ACPI_END: u64 = 0xf_0000;
/// The MP table, at the start of the range where kernels search for it.
pub const MP_TABLE: GuestAddress = GuestAddress(0xf_0000);
pub const MP_TABLE_SIZE: usize = 0x1000;
/// The page of the generation identifier, reserved like the tables before it.
pub const GENERATION: GuestAddress = GuestAddress(0xf_f000);
/// The address from which kernels are loaded.
pub const HIGH_MEMORY: GuestAddress = GuestAddress(0x10_0000);

/// The device hole.
pub const HOLE_START: u64 = 0xc000_0000;
pub const HOLE_END: u64 = 0x1_0000_0000;
/// virtio-mmio devices, one page each.
pub const VIRTIO_MMIO: u64 = 0xd000_0000;
pub const VIRTIO_MMIO_SIZE: u64 = 0x1000;
/// Registers of the caller are in between.
const _: () = {
    let range = crate::config::Registers::ADDRESSES;
    assert!(range.start >= HOLE_START && range.end <= VIRTIO_MMIO);
};
pub const IOAPIC: u64 = 0xfec0_0000;
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// Pages that Intel processors need for real mode; in the hole, where no RAM can be.
pub const IDENTITY_MAP: u64 = 0xfffb_c000;
pub const TSS: usize = 0xfffb_d000;

/// I/O ports.
pub const SERIAL_PORT: u16 = 0x3f8;
pub const I8042_PORT: u16 = 0x60;
pub const POWER_PORT: u16 = 0x600;

/// Interrupt lines.
pub const KEYBOARD_GSI: u32 = 1;
pub const SERIAL_GSI: u32 = 4;
pub const GENERATION_GSI: u32 = 5;
pub const FIRST_VIRTIO_GSI: u32 = 6;

/// Returns RAM as ranges of guest addresses: one, or two around the hole.
pub fn ram(memory_mib: u64) -> Vec<(GuestAddress, usize)> {
    let bytes = memory_mib << 20;
    let low = bytes.min(HOLE_START);
    let mut ranges = vec![(GuestAddress(0), low as usize)];
    if bytes > low {
        ranges.push((GuestAddress(HOLE_END), (bytes - low) as usize));
    }
    ranges
}

/// Returns RAM as the regions of a memory image.
pub fn regions(memory_mib: u64) -> Vec<Region> {
    let region =
        |(address, len): (GuestAddress, usize)| Region { address: address.0, len: len as u64 };
    ram(memory_mib).into_iter().map(region).collect()
}

/// The kinds of memory in a kernel's memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    Ram = 1,
    Reserved = 2,
}

/// Returns the memory map for the kernel, as start, length and kind.
pub fn memory_map(memory_mib: u64) -> Vec<(u64, u64, MemoryKind)> {
    let high = HIGH_MEMORY.0;
    let mut map = vec![
        (0, LOW_MEMORY_END, MemoryKind::Ram),
        (LOW_MEMORY_END, high - LOW_MEMORY_END, MemoryKind::Reserved),
    ];
    for (start, len) in ram(memory_mib) {
        let from = start.0.max(high);
        map.push((from, start.0 + len as u64 - from, MemoryKind::Ram));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_above_three_gib_continues_after_the_hole() {
        assert_eq!(ram(3072), [(GuestAddress(0), 3 << 30)]);
        assert_eq!(ram(4096), [(GuestAddress(0), 3 << 30), (GuestAddress(1 << 32), 1 << 30)]);
    }

    #[test]
    fn memory_map_reserves_tables_and_generation() {
        for address in [ACPI.0, ACPI_END - 1, MP_TABLE.0, GENERATION.0, GENERATION.0 + 15] {
            let holds = |(start, len, _): &&(u64, u64, _)| (*start..start + len).contains(&address);
            let map = memory_map(32);
            assert_eq!(map.iter().find(holds).unwrap().2, MemoryKind::Reserved, "{address:#x}");
        }
    }

    #[test]
    fn memory_map_counts_all_ram_but_the_reserved_part() {
        for mib in [32, 512, 3072, 3073, 8192] {
            let ram: u64 = memory_map(mib)
                .iter()
                .filter(|(.., kind)| *kind == MemoryKind::Ram)
                .map(|(_, len, _)| len)
                .sum();
            assert_eq!(ram, (mib << 20) - (HIGH_MEMORY.0 - LOW_MEMORY_END));
        }
    }
}
