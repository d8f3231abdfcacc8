//! Checks that this host can run a saved VM: backend, processor, features, registers, clock.
//!
//! A guest determines its processor's features once. On a host that lacks one of them it would fail
//! much later, so the VM is refused here, with a named reason, before anything is mapped.

use kvm_bindings::kvm_cpuid_entry2;

use super::SnapshotError;
use super::manifest::MachineFacts;
use crate::arch::x86_64::cpuid;
use crate::cpu::CpuBaseline;
use crate::error::Error;
use crate::kvm::host::backend;
use crate::kvm::state::{self, StateShape, VcpuStateV1};
use crate::kvm::vm::KvmHost;
use crate::state::MachineState;

const ARCHITECTURE: &str = "x86_64";
/// The stepping of a signature, which does not determine the features of a processor.
const STEPPING: u32 = 0xf;

/// CPUID leaves whose registers are lists of features, each with the bits to ignore: bits that
/// change while a guest runs, bits that KVM supplies on every processor, and bits that only
/// describe the topology of the vCPUs.
const FEATURES: [(u32, u32, [u32; 4]); 10] = [
    (0x1, 0, [u32::MAX, u32::MAX, 1 << 21 | 1 << 24 | 1 << 27 | 1 << 31, 1 << 28]),
    (0x7, 0, [u32::MAX, 0, 1 << 4, 0]),
    (0x7, 1, [0, u32::MAX, u32::MAX, u32::MAX]),
    (0x7, 2, [u32::MAX, u32::MAX, u32::MAX, 0]),
    (0xd, 1, [0, u32::MAX, u32::MAX, u32::MAX]),
    (KVM_FEATURES, 0, [0, u32::MAX, u32::MAX, u32::MAX]),
    (0x8000_0001, 0, [u32::MAX, u32::MAX, 1 << 1 | 1 << 22, 0]),
    (0x8000_0007, 0, [u32::MAX, u32::MAX, u32::MAX, 0]),
    (ADDRESS_SIZES, 0, [u32::MAX, 0, u32::MAX, u32::MAX]),
    (0x8000_0021, 0, [0, u32::MAX, u32::MAX, u32::MAX]),
];
/// The CPUID leaf with KVM's paravirtual features.
const KVM_FEATURES: u32 = 0x4000_0001;
const ADDRESS_SIZES: u32 = 0x8000_0008;
/// The CPUID leaf of extended state: the supported components, and the size and offset of each.
const EXTENDED_STATE: u32 = 0xd;
/// The MSR that lists the vulnerabilities a processor does not have; a microcode update may add
/// bits.
const ARCH_CAPABILITIES: u32 = 0x10a;
/// The only bit of `ARCH_CAPABILITIES` that reports a vulnerability.
const RSBA: u64 = 1 << 2;

/// Returns the properties of this host, for the manifest.
pub fn facts(host: &KvmHost, cpu: &CpuBaseline, vcpus: u32, memory_mib: u64) -> MachineFacts {
    MachineFacts {
        architecture: ARCHITECTURE.to_owned(),
        backend: backend().to_owned(),
        cpu_vendor: cpuid::vendor(host.supported_cpuid().as_slice()),
        cpu_signature: leaf(host.supported_cpuid().as_slice(), 1, 0).map_or(0, |leaf| leaf.eax),
        cpu_baseline: baseline(cpu),
        vcpus,
        memory_mib,
    }
}

/// Returns the name of a baseline as it is in the manifest.
fn baseline(cpu: &CpuBaseline) -> Option<String> {
    (!cpu.is_host()).then(|| cpu.name().to_owned())
}

/// Refuses a VM whose architecture, KVM backend or processor model differs from this host's. The
/// model of a VM with a processor baseline may differ: [`check_machine`] looks at what its guest
/// was offered.
pub fn check(facts: &MachineFacts, host: &KvmHost) -> Result<(), SnapshotError> {
    let here = self::facts(host, &CpuBaseline::Host, facts.vcpus, facts.memory_mib);
    check_facts(facts, &here)
}

fn check_facts(facts: &MachineFacts, here: &MachineFacts) -> Result<(), SnapshotError> {
    if facts.architecture != here.architecture {
        return Err(differ("the architecture", &facts.architecture, &here.architecture));
    }
    if facts.backend != here.backend {
        return Err(differ("the KVM backend", &facts.backend, &here.backend));
    }
    if facts.cpu_vendor != here.cpu_vendor {
        return Err(differ("the processor's vendor", &facts.cpu_vendor, &here.cpu_vendor));
    }
    let (found, here) = (facts.cpu_signature & !STEPPING, here.cpu_signature & !STEPPING);
    if found != here && facts.cpu_baseline.is_none() {
        let what = "the processor's family and model";
        return Err(differ(what, format!("{found:#x}"), format!("{here:#x}")));
    }
    Ok(())
}

/// Refuses a VM whose guest was given a feature that this host lacks, or whose clock rate this host
/// cannot provide. `facts` are those of its manifest.
pub fn check_machine(
    machine: &MachineState,
    facts: &MachineFacts,
    host: &KvmHost,
) -> Result<(), Error> {
    if facts.cpu_baseline != baseline(&machine.cpu) {
        let what = "has another processor baseline than the manifest".to_owned();
        return Err(SnapshotError::State(what).into());
    }
    host.offered(&machine.cpu).map_err(SnapshotError::Baseline)?;
    let here = host.supported_cpuid().as_slice();
    let weaknesses = host.feature_msr(ARCH_CAPABILITIES);
    for vcpu in &machine.vcpus {
        check_features(&cpuid::masked(&vcpu.cpuid), here, &machine.cpu)?;
        check_extended_state(vcpu, here, host.shape().xsave_words())?;
        check_msrs(vcpu, host.shape(), weaknesses, &machine.cpu)?;
        check_clock(vcpu, host.clock_khz()?, host.scales_clock())?;
    }
    Ok(())
}

/// Refuses features that this host lacks.
fn check_features(
    saved: &[kvm_cpuid_entry2],
    here: &[kvm_cpuid_entry2],
    cpu: &CpuBaseline,
) -> Result<(), SnapshotError> {
    for (function, index, ignored) in FEATURES {
        let Some(saved) = leaf(saved, function, index) else { continue };
        let here = leaf(here, function, index).copied();
        let (saved, here) = (registers(saved), registers(&here.unwrap_or_default()));
        let asserted = cpu.asserted(function, index);
        let ignored = ignored.into_iter().zip(asserted).map(|(ignored, told)| ignored | told);
        for ((saved, here), ignored) in saved.into_iter().zip(here).zip(ignored) {
            let missing = saved & !here & !ignored;
            if missing != 0 {
                let what = match function {
                    KVM_FEATURES => "a feature of KVM",
                    _ => "a processor feature",
                };
                let found = format!("cpuid {function:#x}.{index} {missing:#x}");
                return Err(SnapshotError::Host { what, found, here: "missing".to_owned() });
            }
        }
    }
    let bits = |leaves| leaf(leaves, ADDRESS_SIZES, 0).map_or(0, |sizes| sizes.eax & 0xff);
    let (found, here) = (bits(saved), bits(here));
    if found > here {
        return Err(differ("the width of physical addresses", found, here));
    }
    Ok(())
}

/// Refuses extended state that is larger than this host's, laid out differently, or not supported
/// here.
fn check_extended_state(
    vcpu: &VcpuStateV1,
    here: &[kvm_cpuid_entry2],
    words: usize,
) -> Result<(), SnapshotError> {
    if vcpu.xsave.len() > words {
        let what = "the size of extended state";
        return Err(differ(what, vcpu.xsave.len() * 4, words * 4));
    }
    let parts = |leaves| leaf(leaves, EXTENDED_STATE, 0).map_or(0, |leaf| wide(leaf.eax, leaf.edx));
    let (switched_on, in_use) = vcpu.xsave_features();
    let (used, supported) = (switched_on | in_use, parts(here));
    // Every x86_64 processor has x87 and SSE.
    if used & !supported & !0b11 != 0 {
        let what = "the set of extended state";
        return Err(differ(what, format!("{used:#x}"), format!("{supported:#x}")));
    }
    for part in (2..63).filter(|part| used >> part & 1 == 1) {
        let place = |leaves| leaf(leaves, EXTENDED_STATE, part).map(|leaf| (leaf.ebx, leaf.eax));
        let (found, here) = (place(&vcpu.cpuid), place(here));
        if found != here {
            let text = |place: Option<(u32, u32)>| match place {
                Some((at, size)) => format!("part {part} at {at} with {size} bytes"),
                None => format!("without part {part}"),
            };
            return Err(differ("the layout of extended state", text(found), text(here)));
        }
    }
    Ok(())
}

/// Refuses MSRs that this host's KVM does not know, and a processor with vulnerabilities that the
/// guest's did not have.
fn check_msrs(
    vcpu: &VcpuStateV1,
    here: &StateShape,
    strengths: u64,
    cpu: &CpuBaseline,
) -> Result<(), SnapshotError> {
    if let Some(index) = here.unknown_msr(&vcpu.msrs) {
        let what = "a model-specific register";
        return Err(differ(what, format!("{index:#x}"), "missing"));
    }
    let told = vcpu.msrs.iter().find(|(index, _)| *index == ARCH_CAPABILITIES);
    let (_, told) = told.copied().unwrap_or_default();
    if told & !strengths & !RSBA & !cpu.asserted_msr(ARCH_CAPABILITIES) != 0 {
        let what = "what the processor (or its microcode) is safe from";
        return Err(differ(what, format!("{told:#x}"), format!("{strengths:#x}")));
    }
    Ok(())
}

/// Refuses a clock rate that this host cannot provide. A small difference is one clock that was
/// measured twice.
fn check_clock(vcpu: &VcpuStateV1, here: u32, scales: bool) -> Result<(), SnapshotError> {
    if scales || state::is_same_rate(vcpu.tsc_khz, here, &vcpu.cpuid) {
        Ok(())
    } else {
        Err(SnapshotError::ClockRate { found: vcpu.tsc_khz, here })
    }
}

fn differ(what: &'static str, found: impl ToString, here: impl ToString) -> SnapshotError {
    let cut = |text: String| text.chars().take(40).collect();
    SnapshotError::Host { what, found: cut(found.to_string()), here: cut(here.to_string()) }
}

fn wide(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn leaf(cpuid: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    cpuid.iter().find(|entry| entry.function == function && entry.index == index)
}

fn registers(entry: &kvm_cpuid_entry2) -> [u32; 4] {
    [entry.eax, entry.ebx, entry.ecx, entry.edx]
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::cpu::CpuModifiers;

    fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    /// A host with AVX, 40 address bits and one KVM feature.
    fn here() -> Vec<kvm_cpuid_entry2> {
        vec![
            entry(1, 0, [0, 0, 0b110, 0b11]),
            entry(EXTENDED_STATE, 0, [0b111, 832, 832, 0]),
            entry(EXTENDED_STATE, 2, [256, 576, 0, 0]),
            entry(KVM_FEATURES, 0, [0b1, 0, 0, 0]),
            entry(ADDRESS_SIZES, 0, [40, 0, 0, 0]),
        ]
    }

    fn refused(result: Result<(), SnapshotError>) -> String {
        let error = result.expect_err("should be refused");
        assert_eq!(Error::from(differ("", "", "")).kind(), error.kind(), "{error}");
        error.to_string()
    }

    #[test]
    fn h4_snapshot_of_another_clock_is_refused_with_both_rates_unless_the_host_scales() {
        let with = |tsc_khz| VcpuStateV1 { tsc_khz, ..testing::vcpu() };
        for other in [2_020_001, 1_979_999, 3_000_000, 1] {
            let error = refused(check_clock(&with(other), 2_000_000, false));
            for part in [&other.to_string(), "2000000 kHz here", "make it again"] {
                assert!(error.contains(part), "{error}");
            }
            check_clock(&with(other), 2_000_000, true).unwrap();
        }
        let mut exact = with(2_002_000);
        check_clock(&exact, 2_000_000, false).unwrap();
        exact.cpuid.push(entry(0x8000_0007, 0, [0, 0, 0, 1 << 8]));
        refused(check_clock(&exact, 2_000_000, false));
    }

    #[test]
    fn h4_missing_features_and_address_bits_are_refused_by_name() {
        let told =
            |leaf: kvm_cpuid_entry2| refused(check_features(&[leaf], &here(), &CpuBaseline::Host));
        assert!(
            told(entry(1, 0, [0, 0, 0b1000, 0])).contains("processor feature is cpuid 0x1.0 0x8")
        );
        assert!(told(entry(7, 2, [0, 0, 0, 1])).contains("cpuid 0x7.2 0x1"));
        assert!(told(entry(KVM_FEATURES, 0, [0b10, 0, 0, 0])).contains("feature of KVM"));
        assert!(told(entry(ADDRESS_SIZES, 0, [48, 0, 0, 0])).contains("physical addresses is 48"));
        check_features(&here(), &here(), &CpuBaseline::Host).unwrap();
        let narrow = [entry(ADDRESS_SIZES, 0, [36, 0, 0, 0])];
        check_features(&narrow, &here(), &CpuBaseline::Host).unwrap();
    }

    #[test]
    fn snapshot_of_a_baseline_fits_another_model_and_no_other_vendor() {
        let here = testing::manifest(Vec::new()).machine;
        let mut there = here.clone();
        there.cpu_signature ^= 0x10000;
        assert!(refused(check_facts(&there, &here)).contains("family and model"));
        there.cpu_baseline = Some("x86-64-v2".into());
        check_facts(&there, &here).unwrap();
        there.cpu_vendor = "GenuineIntel".into();
        assert!(refused(check_facts(&there, &here)).contains("vendor"));
    }

    #[test]
    fn what_a_template_tells_a_guest_in_any_case_is_not_required_of_the_host() {
        let text = br#"{"cpuid_modifiers": [{"leaf": "0x80000021", "subleaf": "0x0", "flags": 0,
            "modifiers": [{"register": "eax", "bitmap": "0b1"}]}],
            "msr_modifiers": [{"addr": "0x10a", "bitmap": "0b1x"}]}"#;
        let cpu = CpuBaseline::from(CpuModifiers::from_json(text).unwrap());
        let saved = [entry(0x8000_0021, 0, [1, 0, 0, 0])];
        check_features(&saved, &here(), &cpu).unwrap();
        refused(check_features(&saved, &here(), &CpuBaseline::Host));
        let shape = StateShape::with_msrs(vec![ARCH_CAPABILITIES]);
        let vcpu = VcpuStateV1 { msrs: vec![(ARCH_CAPABILITIES, 0b10)], ..testing::vcpu() };
        check_msrs(&vcpu, &shape, 0, &cpu).unwrap();
        refused(check_msrs(&vcpu, &shape, 0, &CpuBaseline::Host));
    }

    #[test]
    fn h4_extended_state_of_another_size_set_or_layout_is_refused_by_name() {
        let with = |change: fn(&mut VcpuStateV1)| {
            let mut vcpu = testing::vcpu();
            vcpu.cpuid = here();
            vcpu.xcrs.nr_xcrs = 1;
            vcpu.xcrs.xcrs[0].value = 0b111;
            change(&mut vcpu);
            check_extended_state(&vcpu, &here(), 1024)
        };
        with(|_| {}).unwrap();
        with(|vcpu| vcpu.cpuid[1].ebx = 0).unwrap();
        let large = refused(with(|vcpu| vcpu.xsave.resize(2048, 0)));
        assert!(large.contains("size of extended state is 8192 there and 4096"), "{large}");
        let switched_on = refused(with(|vcpu| vcpu.xcrs.xcrs[0].value |= 1 << 5));
        assert!(switched_on.contains("set of extended state is 0x27 there"), "{switched_on}");
        assert!(refused(with(|vcpu| vcpu.xsave[129] = 1)).contains("0x100000007 there"));
        let moved = refused(with(|vcpu| vcpu.cpuid[2].ebx = 640));
        assert!(moved.contains("layout of extended state is part 2 at 640"), "{moved}");
        assert!(refused(with(|vcpu| vcpu.cpuid.truncate(2))).contains("without part 2"));
    }

    #[test]
    fn h4_unknown_register_and_weaker_microcode_are_refused_by_name() {
        let shape = StateShape::with_msrs(vec![0x10, ARCH_CAPABILITIES, 0x8b]);
        let with = |msrs: &[(u32, u64)]| {
            let vcpu = VcpuStateV1 { msrs: msrs.to_vec(), ..testing::vcpu() };
            check_msrs(&vcpu, &shape, 0b1001, &CpuBaseline::Host)
        };
        assert!(refused(with(&[(0x10, 1), (0xc0de, 5)])).contains("register is 0xc0de"));
        // An MSR with value zero is not missed, nor is one that no guest is offered.
        with(&[(0xc0de, 0), (0x480, 7), (0x4000_0000, 1)]).unwrap();
        let weaker = refused(with(&[(ARCH_CAPABILITIES, 0b10)]));
        assert!(weaker.contains("microcode) is safe from is 0x2 there and 0x9 here"), "{weaker}");
        with(&[(ARCH_CAPABILITIES, 0b1000 | RSBA)]).unwrap();
        // The microcode revision itself is only reported to the guest.
        with(&[(0x8b, u64::MAX)]).unwrap();
    }
}
