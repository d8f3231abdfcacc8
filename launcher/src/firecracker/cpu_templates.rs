//! Firecracker's named CPU templates, as the bits that each clears and sets.
//!
//! Clients ask for them by name in `machine-config`, so their bits are facts that must be known
//! here. Each makes the models of one vendor look like an instance type of AWS.

use pvmm::cpu::{Bitmap, CpuModifiers, CpuidModifier, CpuidRegister, MsrModifier};

use CpuidRegister::{Eax, Ebx, Ecx, Edx};

use super::bodies::CpuTemplate;

/// The vendors as CPUID leaf 0 has them.
const INTEL: &str = "GenuineIntel";
const AMD: &str = "AuthenticAMD";

/// A register of a CPUID leaf: leaf, sub-leaf, register, bits to clear, bits to set.
type Row = (u32, u32, CpuidRegister, u32, u32);

/// The features of a Haswell server, which T2 and its relatives have in common. The first row is
/// family and model.
const HASWELL: [Row; 8] = [
    (0x1, 0, Eax, 0x0ffc_390d, 0x0003_06f2),
    (0x1, 0, Ecx, 0x0004_cdfc, 0),
    (0x1, 0, Edx, 0xe864_0000, 0x1080),
    (0x7, 0, Ebx, 0xffef_d814, 0x200),
    (0x7, 0, Ecx, 0x4041_5f5e, 0),
    (0x7, 0, Edx, 0x11c, 0),
    (0xd, 0, Eax, 0x2f8, 0),
    (0xd, 1, Eax, 0xe, 0),
];
const T2: [Row; 3] = [
    (0x8000_0001, 0, Ecx, 0x2000_0100, 0),
    (0x8000_0001, 0, Edx, 0x0400_0000, 0),
    (0x8000_0008, 0, Ebx, 0x200, 0),
];
/// T2 for a fleet with AMD's Milan, without what only one of the two has.
const T2CL: [Row; 3] = [
    (0x8000_0001, 0, Ecx, 0x2000_01c0, 0),
    (0x8000_0001, 0, Edx, 0x07c0_0000, 0),
    (0x8000_0008, 0, Ebx, 0x200, 0),
];
const T2A: [Row; 3] = [
    (0x8000_0001, 0, Ecx, 0x2000_01c4, 0),
    (0x8000_0001, 0, Edx, 0x0640_0000, 0),
    (0x8000_0008, 0, Ebx, 0x201, 0x001c_0004),
];
/// The features of an Ivy Bridge server.
const C3: [Row; 10] = [
    (0x1, 0, Eax, 0x0ffc_391b, 0x0003_06e4),
    (0x1, 0, Ecx, 0x0040_dd3c, 0),
    (0x1, 0, Edx, 0xa864_0000, 0x1080),
    (0x7, 0, Ebx, 0xffaf_dd3c, 0),
    (0x7, 0, Ecx, 0x4041_481e, 0),
    (0x7, 0, Edx, 0xc, 0),
    (0xd, 0, Eax, 0x2f8, 0),
    (0xd, 1, Eax, 0xe, 0),
    (0x8000_0001, 0, Ecx, 0x120, 0),
    (0x8000_0001, 0, Edx, 0x0400_0000, 0),
];

/// The MSR that lists what a processor is safe from.
const ARCH_CAPABILITIES: u32 = 0x10a;

/// Returns the vendor that a template is for, and its bits; nothing for `None` and for one of
/// another architecture.
pub fn facts(template: CpuTemplate) -> Option<(&'static str, CpuModifiers)> {
    let safe_from = |clear, set| vec![(ARCH_CAPABILITIES, Bitmap { clear, set })];
    let (vendor, rows, msrs) = match template {
        CpuTemplate::T2 => (INTEL, [&HASWELL[..], &T2].concat(), Vec::new()),
        // A value that hides the differences between Skylake and Cascade Lake.
        CpuTemplate::T2S => {
            let msrs = safe_from(0xffff_ffff_f3f5_f3b3, 0x0c0a_0c4c);
            (INTEL, [&HASWELL[..], &T2].concat(), msrs)
        }
        CpuTemplate::T2CL => {
            let msrs = safe_from(0xffff_ffff_e2f5_1e00, 0);
            (INTEL, [&HASWELL[..], &T2CL].concat(), msrs)
        }
        CpuTemplate::T2A => (AMD, [&HASWELL[..], &T2A].concat(), Vec::new()),
        CpuTemplate::C3 => (INTEL, C3.to_vec(), Vec::new()),
        CpuTemplate::V1N1 | CpuTemplate::None => return None,
    };
    let cpuid = rows.into_iter().map(|(leaf, subleaf, register, clear, set)| {
        let bitmap = Bitmap { clear, set };
        CpuidModifier { leaf, subleaf, register, bitmap }
    });
    let msrs = msrs.into_iter().map(|(address, bitmap)| MsrModifier { address, bitmap });
    let modifiers =
        CpuModifiers { capabilities: Vec::new(), cpuid: cpuid.collect(), msrs: msrs.collect() };
    Some((vendor, modifiers))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [CpuTemplate; 5] =
        [CpuTemplate::T2, CpuTemplate::T2S, CpuTemplate::T2CL, CpuTemplate::T2A, CpuTemplate::C3];

    #[test]
    fn no_template_sets_and_clears_one_bit_or_changes_a_register_twice() {
        for template in ALL {
            let (_, modifiers) = facts(template).unwrap();
            for (at, one) in modifiers.cpuid.iter().enumerate() {
                assert_eq!(one.bitmap.clear & one.bitmap.set, 0, "{template:?}");
                let place = |it: &CpuidModifier| (it.leaf, it.subleaf, it.register as u32);
                let others = &modifiers.cpuid[at + 1..];
                assert!(others.iter().all(|other| place(other) != place(one)), "{template:?}");
            }
            for msr in modifiers.msrs {
                assert_eq!(msr.bitmap.clear & msr.bitmap.set, 0, "{template:?}");
            }
        }
        assert!(facts(CpuTemplate::V1N1).is_none() && facts(CpuTemplate::None).is_none());
    }

    #[test]
    fn templates_hide_avx512_and_only_c3_hides_avx2() {
        for template in ALL {
            let (_, modifiers) = facts(template).unwrap();
            let cleared = |leaf, register: CpuidRegister| {
                let found = |it: &&CpuidModifier| (it.leaf, it.register) == (leaf, register);
                modifiers.cpuid.iter().find(found).map_or(0, |it| it.bitmap.clear)
            };
            assert_ne!(cleared(0x7, Ebx) >> 16 & 1, 0, "{template:?}");
            let avx2 = cleared(0x7, Ebx) >> 5 & 1 != 0;
            assert_eq!(avx2, template == CpuTemplate::C3, "{template:?}");
            assert_eq!(cleared(0xd, Eax) & 0b111, 0, "{template:?} keeps AVX");
        }
    }
}
