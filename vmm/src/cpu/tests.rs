//! Tests of processor baselines on an invented host, which has AVX-512 and more.

use super::*;
use crate::arch::x86_64::cpuid::{self, Topology};
use crate::kvm::state::VcpuStateV1;

const AVX: u32 = 1 << 28;
const XSAVE: u32 = 1 << 26;
const AES: u32 = 1 << 25;
const RDRAND: u32 = 1 << 30;
const AVX2: u32 = 1 << 5;
const BMI2: u32 = 1 << 8;
const AVX512F: u32 = 1 << 16;
const SHA: u32 = 1 << 29;
const HYPERVISOR: u32 = 1 << 31;
const ARCH_CAPABILITIES: u32 = 0x10a;

fn entry(function: u32, index: u32, values: Registers) -> kvm_cpuid_entry2 {
    let mut entry = kvm_cpuid_entry2 { function, index, ..Default::default() };
    set_registers(&mut entry, values);
    entry
}

/// The leaves of a host with AVX-512, protection keys, AMX and features without names here.
fn host() -> Vec<kvm_cpuid_entry2> {
    let all = u32::MAX;
    let [ebx, edx, ecx] = [b"Auth", b"enti", b"cAMD"].map(|word| u32::from_le_bytes(*word));
    vec![
        entry(0x0, 0, [0x20, ebx, ecx, edx]),
        entry(FEATURES, 0, [0xa20f12, 0, all, all]),
        entry(0x6, 0, [0x77, 2, 9, 0]),
        entry(STRUCTURED_FEATURES, 0, [2, all, all, all]),
        entry(STRUCTURED_FEATURES, 1, [all; 4]),
        entry(EXTENDED_STATE, 0, [0x602e7, 11008, 11008, 0]),
        entry(EXTENDED_STATE, 1, [0x1f, 11008, 0x1800, 0]),
        entry(EXTENDED_STATE, 2, [256, 576, 0, 0]),
        entry(EXTENDED_STATE, 5, [64, 1088, 0, 0]),
        entry(EXTENDED_STATE, 6, [512, 1152, 0, 0]),
        entry(EXTENDED_STATE, 7, [1024, 1664, 0, 0]),
        entry(EXTENDED_STATE, 9, [8, 2688, 0, 0]),
        entry(EXTENDED_STATE, 11, [16, 0, 1, 0]),
        entry(EXTENDED_STATE, 17, [64, 2752, 2, 0]),
        entry(EXTENDED_STATE, 18, [8192, 2816, 6, 0]),
        entry(0x1d, 0, [1, 0, 0, 0]),
        entry(0x4000_0000, 0, [KVM_FEATURES, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
        entry(KVM_FEATURES, 0, [all, 0, 0, 1]),
        entry(0x8000_0000, 0, [0x8000_0021, 0, 0, 0]),
        entry(EXTENDED_FEATURES, 0, [0xa20f12, 0, all, all]),
        entry(0x8000_0007, 0, [0, 0, 0, 1 << 8]),
        entry(ADDRESS_SIZES, 0, [0x3930, all, 0, 0]),
        entry(0x8000_0021, 0, [all, 0, 0, 0]),
    ]
}

fn level(name: &str) -> CpuBaseline {
    CpuBaseline::named(name).unwrap()
}

fn custom(json: &str) -> CpuBaseline {
    CpuModifiers::from_json(json.as_bytes()).unwrap().into()
}

/// A template that clears AVX-512, protection keys and AMX, sets ERMS, and says what the processor
/// is safe from.
fn modified() -> CpuBaseline {
    custom(
        r#"{"kvm_capabilities": ["3", "!56"],
            "cpuid_modifiers": [
              {"leaf": "0x7", "subleaf": "0x0", "flags": 1, "modifiers": [
                {"register": "ebx", "bitmap": "0b00x0_xxxx_xxx0_xx00_xxxx_xx1x_xxxx_xxxx"},
                {"register": "edx", "bitmap": "0b1"}]},
              {"leaf": "0xd", "subleaf": "0", "flags": 1, "modifiers": [
                {"register": "eax", "bitmap": "0b0000_0000_0000_0000_0000_0000_0000_0xxx"},
                {"register": "ebx", "bitmap": "0bxx"}]},
              {"leaf": "1", "subleaf": "0x0", "flags": 0, "modifiers": [
                {"register": "ecx", "bitmap": "0b00xx_xxxx_xx0x_xxxx_xxxx_xxxx_xxxx_xxxx"}]}],
            "msr_modifiers": [{"addr": "0x10a", "bitmap": "0b0000_10xx"}]}"#,
    )
}

#[test]
fn level_leaves_its_own_features_and_what_every_guest_needs() {
    for (name, avx, avx512) in
        [("x86-64-v2", false, false), ("x86-64-v3", true, false), ("x86-64-v4", true, true)]
    {
        let offered = level(name).offered(&host()).unwrap();
        let [eax, _, ecx, edx] = leaf(&offered, FEATURES, 0);
        let [_, ebx, more_ecx, more_edx] = leaf(&offered, STRUCTURED_FEATURES, 0);
        assert_eq!((ecx & AVX != 0, ebx & (AVX2 | BMI2) == AVX2 | BMI2), (avx, avx), "{name}");
        assert_eq!((ecx & XSAVE != 0, ebx & AVX512F != 0), (avx, avx512), "{name}");
        assert_eq!((ecx & (AES | RDRAND), ebx & SHA, more_ecx & !(1 << 4), more_edx), (0, 0, 0, 0));
        assert_ne!(ecx & HYPERVISOR, 0);
        for bit in [0, 4, 5, 6, 8, 9, 11, 12, 13, 15, 16, 19, 23, 24, 25, 26] {
            assert_ne!(edx >> bit & 1, 0, "{name} {bit}");
        }
        assert_eq!(eax, 0xa20f12, "family and model are the host's");
        let [_, _, lahf, long] = leaf(&offered, EXTENDED_FEATURES, 0);
        assert_eq!((lahf & 1, lahf >> 5 & 1), (1, avx.into()), "{name}");
        assert_eq!(long & (1 << 11 | 1 << 20 | 1 << 29), 1 << 11 | 1 << 20 | 1 << 29);
        assert_eq!(leaf(&offered, ADDRESS_SIZES, 0)[..2], [0x3028, 0]);
        for unknown in [0x1d, 0x8000_0007, 0x8000_0021] {
            assert_eq!(leaf(&offered, unknown, 0), [0; 4], "{name} {unknown:#x}");
        }
        assert_eq!(leaf(&offered, STRUCTURED_FEATURES, 1), [0; 4], "{name}");
        assert_eq!(leaf(&offered, KVM_FEATURES, 0)[0], 0x0100_7efb, "{name}");
    }
}

#[test]
fn save_area_shrinks_to_the_parts_that_are_left() {
    let cases = [
        (level("x86-64-v2"), 0, 0, 0),
        (level("x86-64-v3"), 0b111, 832, 0),
        (level("x86-64-v4"), 0b1110_0111, 2688, 0),
        (modified(), 0b111, 832, 0x1f),
        (CpuBaseline::Host, 0x602e7, 11008, 0x1f),
    ];
    for (cpu, parts, size, ways) in cases {
        let offered = cpu.offered(&host()).unwrap();
        assert_eq!(leaf(&offered, EXTENDED_STATE, 0), [parts, size, size, 0], "{}", cpu.name());
        assert_eq!(cpuid::extended_state(&offered), u64::from(parts));
        let [eax, ebx, ..] = leaf(&offered, EXTENDED_STATE, 1);
        assert_eq!((eax, ebx == 0), (ways, ways == 0), "{}", cpu.name());
        for index in [2, 5, 6, 7, 9, 17, 18] {
            let is_left = leaf(&offered, EXTENDED_STATE, index) != [0; 4];
            assert_eq!(is_left, parts >> index & 1 == 1, "{} part {index}", cpu.name());
        }
    }
}

#[test]
fn every_vcpu_of_a_baseline_is_masked_alike_and_masking_it_again_changes_nothing() {
    for cpu in [level("x86-64-v2"), level("x86-64-v3"), level("x86-64-v4"), modified()] {
        let offered = cpu.offered(&host()).unwrap();
        for (id, topology) in [
            (0, Topology { vcpus: 1, threads_per_core: 1 }),
            (2, Topology { vcpus: 3, threads_per_core: 1 }),
            (3, Topology { vcpus: 4, threads_per_core: 2 }),
        ] {
            let vcpu = cpuid::for_vcpu(&offered, id, topology).unwrap().as_slice().to_vec();
            let mut again = vcpu.clone();
            cpu.mask(&mut again);
            assert_eq!(cpuid::masked(&again), vcpu, "{} vCPU {id}", cpu.name());
            let [.., ecx, _] = leaf(&vcpu, FEATURES, 0);
            assert_eq!(ecx & RDRAND, 0, "{} vCPU {id}", cpu.name());
        }
    }
}

#[test]
fn saved_features_and_registers_beyond_the_baseline_do_not_come_back() {
    let hostile = || VcpuStateV1 {
        cpuid: host(),
        msrs: vec![(0x10, 5), (ARCH_CAPABILITIES, 9), (0x48, 1), (0xc000_0104, 1 << 32)],
        ..crate::snapshot::testing::vcpu()
    };
    let mut limited = hostile();
    limited.xsave[128] = 0x2e7;
    limited.limit_to(&level("x86-64-v3"));
    assert_eq!(leaf(&limited.cpuid, STRUCTURED_FEATURES, 0)[1] & (AVX2 | AVX512F), AVX2);
    assert_eq!(limited.msrs, [(0x10, 5)]);
    assert_eq!(limited.xsave_features().1, 0b111);
    let mut limited = hostile();
    limited.limit_to(&modified());
    let [_, ebx, ..] = leaf(&limited.cpuid, STRUCTURED_FEATURES, 0);
    assert_eq!(ebx & (AVX2 | AVX512F), AVX2);
    assert_eq!(limited.msrs.len(), 4);
    let mut limited = hostile();
    limited.limit_to(&CpuBaseline::Host);
    assert_eq!((limited.cpuid, limited.msrs.len()), (host(), 4));
}

#[test]
fn host_that_lacks_a_bit_of_a_level_is_refused_by_its_name() {
    let without = |function: u32, index: u32, register: usize, bit: u32| {
        let mut entries = host();
        let found =
            entries.iter_mut().find(|entry| (entry.function, entry.index) == (function, index));
        let entry = found.unwrap();
        let mut values = registers(entry);
        values[register] &= !(1 << bit);
        set_registers(entry, values);
        entries
    };
    for (name, lacking, feature) in [
        ("x86-64-v2", without(FEATURES, 0, 2, 20), "sse4_2"),
        ("x86-64-v2", without(EXTENDED_FEATURES, 0, 2, 0), "lahf_lm"),
        ("x86-64-v3", without(FEATURES, 0, 2, 23), "popcnt"),
        ("x86-64-v3", without(STRUCTURED_FEATURES, 0, 1, 5), "avx2"),
        ("x86-64-v3", without(EXTENDED_STATE, 0, 0, 2), "the registers of avx"),
        ("x86-64-v4", without(STRUCTURED_FEATURES, 0, 1, 31), "avx512vl"),
        ("x86-64-v4", without(EXTENDED_STATE, 0, 0, 6), "the registers of avx512f"),
    ] {
        let error = level(name).offered(&lacking).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("{name} needs {feature}, which this host lacks")), "{text}");
        assert!(text.contains("use a lower baseline") && !text.contains('\n'), "{text}");
        assert_eq!(Error::from(error).kind(), ErrorKind::HostUnsupported);
    }
    let lower = without(STRUCTURED_FEATURES, 0, 1, 5);
    level("x86-64-v2").offered(&lower).unwrap();
}

#[test]
fn modified_leaf_or_instruction_that_the_host_lacks_is_refused_by_its_place() {
    let one = |leaf: &str, register: &str, bitmap: &str| {
        custom(&format!(
            r#"{{"cpuid_modifiers": [{{"leaf": "{leaf}", "subleaf": "0x0", "flags": 0,
                 "modifiers": [{{"register": "{register}", "bitmap": "{bitmap}"}}]}}]}}"#
        ))
    };
    let mut poor = host();
    poor.retain(|entry| entry.function != 0x1d);
    poor[3].ebx = 0;
    let told = |cpu: CpuBaseline| cpu.offered(&poor).unwrap_err().to_string();
    assert!(told(one("0x1d", "eax", "0b0")).contains("no leaf 0x1d.0x0"));
    let text = told(one("0x7", "ebx", "0b1xx"));
    assert!(text.contains("needs cpuid 0x7.0x0 ebx bit 2, which this host lacks"), "{text}");
    // What only describes a processor can be told to every guest.
    let described = one("0x80000021", "ecx", "0b1");
    assert_eq!(leaf(&described.offered(&poor).unwrap(), 0x8000_0021, 0)[2], 1);
    assert_eq!(described.asserted(0x8000_0021, 0), [0, 0, 1, 0]);
    assert_eq!(modified().asserted_msr(ARCH_CAPABILITIES), 0b1000);
}

#[test]
fn template_is_read_with_its_bits_and_an_empty_one_changes_nothing() {
    let CpuBaseline::Modified(modifiers) = modified() else { panic!("nothing was read") };
    assert_eq!(modifiers.capabilities, [3]);
    let first = &modifiers.cpuid[0];
    assert_eq!((first.leaf, first.subleaf, first.register), (7, 0, CpuidRegister::Ebx));
    assert_eq!(first.bitmap, Bitmap { clear: 0xd013_0000, set: 1 << 9 });
    let bitmap = Bitmap { clear: 0b1111_0100, set: 0b1000 };
    assert_eq!(modifiers.msrs, [MsrModifier { address: 0x10a, bitmap }]);
    assert_eq!(bitmap.applied_to(0xff), 0b1011);
    assert_eq!(custom("{}"), CpuBaseline::Host);
    let keys = [level("x86-64-v2"), level("x86-64-v3"), modified()].map(|cpu| cpu.key());
    assert!(keys[0] != keys[1] && keys[1] != keys[2]);
    assert_eq!(CpuBaseline::named("x86-64-v5"), None);
}

#[test]
fn template_with_a_bad_field_is_refused_by_the_place_of_the_field() {
    let many = format!(r#"{{"kvm_capabilities": [{}"1"]}}"#, r#""1","#.repeat(256));
    let bits =
        |bitmap: &str| format!(r#"{{"msr_modifiers": [{{"addr": "1", "bitmap": {bitmap}}}]}}"#);
    let in_leaf = |fields: &str| format!(r#"{{"cpuid_modifiers": [{{{fields}}}]}}"#);
    let register = |fields: &str| {
        in_leaf(&format!(r#""leaf": "0x1", "subleaf": "0x0", "flags": 0, "modifiers": [{fields}]"#))
    };
    for (text, field) in [
        ("", "CPU template"),
        ("[]", "CPU template: must be an object"),
        (r#"{"colour": 1}"#, "colour: is not known"),
        (r#"{"reg_modifiers": []}"#, "reg_modifiers: is for aarch64"),
        (r#"{"vcpu_features": []}"#, "vcpu_features: is for aarch64"),
        (r#"{"kvm_capabilities": 1}"#, "kvm_capabilities: must be a list"),
        (r#"{"kvm_capabilities": ["1", "x"]}"#, "kvm_capabilities[1]"),
        (r#"{"kvm_capabilities": ["+1"]}"#, "kvm_capabilities[0]"),
        (r#"{"kvm_capabilities": [56]}"#, "kvm_capabilities[0]"),
        (&many, "kvm_capabilities: has more than 256"),
        (&in_leaf(""), "cpuid_modifiers[0].leaf: is missing"),
        (&in_leaf(r#""leaf": 1"#), "cpuid_modifiers[0].leaf: must be a text"),
        (&in_leaf(r#""leaf": "0x100000000""#), "cpuid_modifiers[0].leaf: must be a number"),
        (&in_leaf(r#""leaf": "1", "subleaf": "0", "flags": "1""#), "cpuid_modifiers[0].flags"),
        (
            &in_leaf(r#""leaf": "1", "subleaf": "0", "flags": 0"#),
            "cpuid_modifiers[0].modifiers: is missing",
        ),
        (&register("7"), "cpuid_modifiers[0].modifiers[0]: must be an object"),
        (
            &register(r#"{"register": "EAX", "bitmap": "0b1"}"#),
            "cpuid_modifiers[0].modifiers[0].register: must be eax",
        ),
        (
            &register(r#"{"register": "eax", "bitmap": "0b000000000000000000000000000000000"}"#),
            "cpuid_modifiers[0].modifiers[0].bitmap: has more than 32 bits",
        ),
        (
            &register(
                r#"{"register": "eax", "bitmap": "0b1"}, {"register": "eax", "bitmap": "0b0"}"#,
            ),
            "cpuid_modifiers[0].modifiers[1].register: is modified twice",
        ),
        (&bits("\"0b12\""), "msr_modifiers[0].bitmap: may only have"),
        (&bits("\"0b\""), "msr_modifiers[0].bitmap: has no bits"),
        (&bits("1"), "msr_modifiers[0].bitmap: must be a text"),
        (&bits(&format!("\"{}\"", "x".repeat(65))), "msr_modifiers[0].bitmap: has more than 64"),
        (
            r#"{"msr_modifiers": [{"addr": "1", "bitmap": "x", "mask": 0}]}"#,
            "msr_modifiers[0].mask: is not known",
        ),
    ] {
        let error = CpuModifiers::from_json(text.as_bytes()).unwrap_err();
        assert!(error.to_string().starts_with(field), "{text}: {error}");
        assert_eq!(Error::from(error).kind(), ErrorKind::InvalidConfig);
    }
    let long = " ".repeat(TEMPLATE_FILE_MAX + 1);
    let error = CpuModifiers::from_json(long.as_bytes()).unwrap_err();
    assert!(error.to_string().contains("longer than 256 KiB"), "{error}");
}
