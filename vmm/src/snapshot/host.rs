//! Whether this host can go on with a machine: processor, features, backend.
//!
//! A guest found out once what its processor can do. One that lacks any of it would fail much later, in the
//! middle of something, so it is refused here, by name.

use kvm_bindings::kvm_cpuid_entry2;

use super::SnapshotError;
use super::manifest::MachineFacts;
use super::state::MachineState;
use crate::kvm::host::backend;
use crate::kvm::vm::KvmHost;

const ARCHITECTURE: &str = "x86_64";
/// The stepping says nothing about what a processor can do.
const STEPPING: u32 = 0xf;

/// Leaves whose registers are lists of features, with the bits that are not: those which change while a
/// guest runs, and those which KVM supplies whatever the processor has.
const FEATURES: [(u32, u32, [u32; 4]); 6] = [
    (0x1, 0, [u32::MAX, u32::MAX, 1 << 21 | 1 << 24 | 1 << 27 | 1 << 31, 1 << 28]),
    (0x7, 0, [u32::MAX, 0, 1 << 4, 0]),
    (0x7, 1, [0, u32::MAX, u32::MAX, u32::MAX]),
    (0xd, 1, [0, u32::MAX, u32::MAX, u32::MAX]),
    (0x8000_0001, 0, [u32::MAX, u32::MAX, 1 << 1, 0]),
    (0x8000_0008, 0, [u32::MAX, 0, u32::MAX, u32::MAX]),
];

/// What this host is.
pub fn facts(host: &KvmHost, vcpus: u32, memory_mib: u64) -> MachineFacts {
    MachineFacts {
        architecture: ARCHITECTURE.to_owned(),
        backend: backend().to_owned(),
        cpu_vendor: vendor(host),
        cpu_signature: leaf(host.supported_cpuid().as_slice(), 1, 0).map_or(0, |leaf| leaf.eax),
        vcpus,
        memory_mib,
    }
}

/// Refuses a machine that this host cannot go on with.
pub fn check(facts: &MachineFacts, host: &KvmHost) -> Result<(), SnapshotError> {
    let here = self::facts(host, facts.vcpus, facts.memory_mib);
    let differ = |what, found: &str, here: &str| SnapshotError::Host {
        what,
        found: found.chars().take(40).collect(),
        here: here.to_owned(),
    };
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
    if found != here {
        let what = "the processor's family and model";
        return Err(differ(what, &format!("{found:#x}"), &format!("{here:#x}")));
    }
    Ok(())
}

/// Refuses a machine whose guest was told of features that this host lacks.
pub fn check_features(machine: &MachineState, host: &KvmHost) -> Result<(), SnapshotError> {
    let Some(vcpu) = machine.vcpus.first() else { return Ok(()) };
    for (function, index, ignored) in FEATURES {
        let Some(saved) = leaf(&vcpu.cpuid, function, index) else { continue };
        let here = leaf(host.supported_cpuid().as_slice(), function, index).copied();
        let (saved, here) = (registers(saved), registers(&here.unwrap_or_default()));
        for ((saved, here), ignored) in saved.into_iter().zip(here).zip(ignored) {
            let missing = saved & !here & !ignored;
            if missing != 0 {
                return Err(SnapshotError::Host {
                    what: "a processor feature",
                    found: format!("cpuid {function:#x}.{index} {missing:#x}"),
                    here: "missing".to_owned(),
                });
            }
        }
    }
    Ok(())
}

fn leaf(cpuid: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    cpuid.iter().find(|entry| entry.function == function && entry.index == index)
}

fn registers(entry: &kvm_cpuid_entry2) -> [u32; 4] {
    [entry.eax, entry.ebx, entry.ecx, entry.edx]
}

fn vendor(host: &KvmHost) -> String {
    let Some(leaf) = leaf(host.supported_cpuid().as_slice(), 0, 0) else { return String::new() };
    let words = [leaf.ebx, leaf.edx, leaf.ecx];
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
