//! General and system registers at the first instruction, for both boot protocols.
//!
//! PVH starts in 32-bit protected mode without paging; the 64-bit Linux boot protocol starts in
//! long mode with the first gigabytes identity-mapped.

use kvm_bindings::{
    kvm_cpuid_entry2, kvm_fpu, kvm_regs, kvm_segment, kvm_sregs, kvm_xcr, kvm_xcrs,
};
use pvmm_devices::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::{cpuid, layout};

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

const CODE: u16 = 0x08;
const DATA: u16 = 0x10;
const TASK: u16 = 0x18;

const PRESENT_WRITABLE: u64 = 0b11;
const HUGE: u64 = 1 << 7;
/// The memory mapped for the 64-bit entry: enough for any kernel, its initrd and the zero page.
const MAPPED_GIB: u64 = 4;

/// The entry point of a kernel, by boot protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryPoint {
    Pvh(GuestAddress),
    Linux64(GuestAddress),
}

/// A segment, as encoded both in the descriptor table and in the hidden registers.
struct Segment {
    selector: u16,
    kind: u8,
    limit: u32,
    code_or_data: bool,
    long: bool,
    big: bool,
}

/// Returns the general registers of the boot processor.
pub fn general(entry: EntryPoint) -> kvm_regs {
    // Bit 1 of the flags is always set.
    let base = kvm_regs { rflags: 2, ..Default::default() };
    match entry {
        EntryPoint::Pvh(rip) => kvm_regs { rip: rip.0, rbx: layout::PVH_START_INFO.0, ..base },
        EntryPoint::Linux64(rip) => kvm_regs {
            rip: rip.0,
            rsi: layout::ZERO_PAGE.0,
            rsp: layout::BOOT_STACK.0,
            rbp: layout::BOOT_STACK.0,
            ..base
        },
    }
}

/// Returns the floating-point state after `finit`.
pub fn fpu() -> kvm_fpu {
    kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() }
}

/// Returns XCR0 with every extended state component enabled that the guest may use.
///
/// The kernel will set this value, too. But where KVM itself runs in an emulated machine it may not
/// see that write and uses its own copy of the register: sizes in CPUID are then wrong, and AVX is
/// disabled again at every entry. Starting with the kernel's value keeps both right.
/// Returns nothing for a guest that is offered no extended state.
pub fn extended_control(offered: &[kvm_cpuid_entry2]) -> Option<kvm_xcrs> {
    let value = cpuid::extended_state(offered);
    if value == 0 {
        return None;
    }
    let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
    xcrs.xcrs[0] = kvm_xcr { xcr: 0, value, ..Default::default() };
    Some(xcrs)
}

/// Converts the power-on system registers to those of `entry`, and writes the tables they point to.
pub fn system(
    mut sregs: kvm_sregs,
    entry: EntryPoint,
    memory: &GuestMemory,
) -> Result<kvm_sregs, GuestMemoryError> {
    let long = matches!(entry, EntryPoint::Linux64(_));
    let flat = |selector, kind, long, big| Segment {
        selector,
        kind,
        limit: u32::MAX,
        code_or_data: true,
        long,
        big,
    };
    let code = flat(CODE, 0xb, long, !long);
    let data = flat(DATA, 0x3, false, true);
    let task =
        Segment { code_or_data: false, big: false, limit: 0x67, ..flat(TASK, 0xb, false, false) };

    let gdt = [0, code.descriptor(), data.descriptor(), task.descriptor()];
    for (index, descriptor) in gdt.iter().enumerate() {
        memory.write_obj(*descriptor, GuestAddress(layout::GDT.0 + 8 * index as u64))?;
    }
    memory.write_obj(0u64, layout::IDT)?;
    (sregs.gdt.base, sregs.gdt.limit) = (layout::GDT.0, size_of_val(&gdt) as u16 - 1);
    (sregs.idt.base, sregs.idt.limit) = (layout::IDT.0, 7);

    sregs.cs = code.hidden();
    let data = data.hidden();
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = task.hidden();

    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    if long {
        map_identity(memory)?;
        sregs.cr3 = layout::PML4.0;
        sregs.cr4 = CR4_PAE;
        sregs.cr0 |= CR0_PG;
        sregs.efer |= EFER_LME | EFER_LMA;
    }
    Ok(sregs)
}

/// Writes page tables that identity-map the first gigabytes with 2 MiB pages.
fn map_identity(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    memory.write_obj(layout::PDPT.0 | PRESENT_WRITABLE, layout::PML4)?;
    for gib in 0..MAPPED_GIB {
        let directory = layout::PAGE_DIRECTORY.0 + gib * 0x1000;
        let entry = GuestAddress(layout::PDPT.0 + 8 * gib);
        memory.write_obj(directory | PRESENT_WRITABLE, entry)?;
        for page in 0..512 {
            let target = gib << 30 | page << 21;
            let entry = GuestAddress(directory + 8 * page);
            memory.write_obj(target | PRESENT_WRITABLE | HUGE, entry)?;
        }
    }
    Ok(())
}

impl Segment {
    fn descriptor(&self) -> u64 {
        let granular = self.limit > 0xf_ffff;
        let limit = u64::from(if granular { self.limit >> 12 } else { self.limit });
        let access = u64::from(self.kind) | u64::from(self.code_or_data) << 4 | 1 << 7;
        let flags = u64::from(self.long) << 1 | u64::from(self.big) << 2 | u64::from(granular) << 3;
        limit & 0xffff | access << 40 | (limit >> 16 & 0xf) << 48 | flags << 52
    }

    fn hidden(&self) -> kvm_segment {
        kvm_segment {
            limit: self.limit,
            selector: self.selector,
            type_: self.kind,
            present: 1,
            s: self.code_or_data.into(),
            l: self.long.into(),
            db: self.big.into(),
            g: u8::from(self.limit > 0xf_ffff),
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
    }

    #[test]
    fn system_for_pvh_has_flat_32_bit_segments_and_no_paging() {
        let entry = EntryPoint::Pvh(GuestAddress(0x100_0000));
        let sregs = system(kvm_sregs::default(), entry, &memory()).unwrap();
        assert_eq!((sregs.cr0, sregs.cr4, sregs.efer), (CR0_PE | CR0_ET, 0, 0));
        assert_eq!((sregs.cs.db, sregs.cs.l, sregs.cs.limit), (1, 0, u32::MAX));
    }

    #[test]
    fn system_for_linux_maps_low_memory_to_itself() {
        let memory = memory();
        let entry = EntryPoint::Linux64(GuestAddress(0x100_0200));
        let sregs = system(kvm_sregs::default(), entry, &memory).unwrap();
        assert_eq!((sregs.cs.db, sregs.cs.l), (0, 1));
        let last = GuestAddress(layout::PAGE_DIRECTORY.0 + 4 * 0x1000 - 8);
        assert_eq!(memory.read_obj::<u64>(last).unwrap(), 0xffe0_0083);
    }

    #[test]
    fn descriptors_are_those_of_the_textbook() {
        let memory = memory();
        let entry = EntryPoint::Linux64(GuestAddress(0));
        system(kvm_sregs::default(), entry, &memory).unwrap();
        let at =
            |index: u64| memory.read_obj::<u64>(GuestAddress(layout::GDT.0 + 8 * index)).unwrap();
        assert_eq!((at(1), at(2)), (0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff));
    }
}
