//! The CPUID leaves of a guest: the host's features, less those that a guest must not or cannot
//! have, and a topology of one socket with one or two vCPUs per core.

use std::ops::Range;

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

const VENDOR: u32 = 0x0;
const FEATURES: u32 = 0x1;
const CACHES: u32 = 0x4;
const THERMAL: u32 = 0x6;
const PERFORMANCE_MONITOR: u32 = 0xa;
const TOPOLOGY: u32 = 0xb;
const EXTENDED_STATE: u32 = 0xd;
const TOPOLOGY_V2: u32 = 0x1f;
const EXTENDED_FEATURES: u32 = 0x8000_0001;
const POWER: u32 = 0x8000_0007;
const SVM: u32 = 0x8000_000a;
const EXTENDED_SIZES: u32 = 0x8000_0008;
const AMD_CACHES: u32 = 0x8000_001d;
const AMD_TOPOLOGY: u32 = 0x8000_001e;
/// The CPUID range of hypervisors. A guest is offered only KVM's own two leaves of it.
const HYPERVISORS: Range<u32> = 0x4000_0000..0x5000_0000;
const KVM_SIGNATURE: u32 = 0x4000_0000;
const KVM_FEATURES: u32 = 0x4000_0001;
/// `KVMKVMKVM` in EBX, ECX, EDX.
const KVM_NAME: (u32, u32, u32) = (0x4b4d_564b, 0x564b_4d56, 0x4d);

// Leaf 1, ECX.
const MONITOR: u32 = 1 << 3;
const VMX: u32 = 1 << 5;
const SMX: u32 = 1 << 6;
const SPEED_STEP: u32 = 1 << 7;
const THERMAL_MONITOR_2: u32 = 1 << 8;
const PERF_CAPABILITIES: u32 = 1 << 15;
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
// Leaf 1, EDX.
const HYPER_THREADING: u32 = 1 << 28;
// Leaf 6, EAX.
/// The local APIC timer never stops. A kernel that cannot rely on that, and finds no other timer to
/// wake it, keeps its tick in idle and gives up high-resolution timers.
const ALWAYS_RUNNING_TIMER: u32 = 1 << 2;
// Leaf 0x8000_0001, ECX.
const CMP_LEGACY: u32 = 1 << 1;
const NESTED_SVM: u32 = 1 << 2;
const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;

// Leaf 0x8000_0007, EDX.
const INVARIANT_TSC: u32 = 1 << 8;

const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Returns saved CPUID leaves without the features that no guest is offered. A snapshot is an
/// untrusted file: a guest must not get back through it what boot removes.
pub fn masked(saved: &[kvm_cpuid_entry2]) -> Vec<kvm_cpuid_entry2> {
    let mut entries = saved.to_vec();
    entries.retain(|entry| match entry.function {
        KVM_SIGNATURE => (entry.ebx, entry.ecx, entry.edx) == KVM_NAME,
        function => function == KVM_FEATURES || !HYPERVISORS.contains(&function),
    });
    entries.iter_mut().for_each(mask);
    entries
}

/// Returns whether the guest was given an invariant TSC, which runs at one rate in every processor
/// state.
pub fn has_invariant_clock(cpuid: &[kvm_cpuid_entry2]) -> bool {
    cpuid.iter().any(|leaf| leaf.function == POWER && leaf.edx & INVARIANT_TSC != 0)
}

/// Returns the parts of extended state that the guest may enable in XCR0.
pub fn extended_state(cpuid: &[kvm_cpuid_entry2]) -> u64 {
    let found = |leaf: &&kvm_cpuid_entry2| leaf.function == EXTENDED_STATE && leaf.index == 0;
    let parts = |leaf: &kvm_cpuid_entry2| u64::from(leaf.edx) << 32 | u64::from(leaf.eax);
    cpuid.iter().find(found).map_or(0, parts)
}

/// Clears the features of one leaf that a guest must not or cannot have.
fn mask(entry: &mut kvm_cpuid_entry2) {
    match entry.function {
        FEATURES => {
            entry.ecx &=
                !(MONITOR | VMX | SMX | SPEED_STEP | THERMAL_MONITOR_2 | PERF_CAPABILITIES);
        }
        THERMAL => {
            clear(entry);
            entry.eax = ALWAYS_RUNNING_TIMER;
        }
        PERFORMANCE_MONITOR | SVM => clear(entry),
        EXTENDED_FEATURES => entry.ecx &= !NESTED_SVM,
        _ => {}
    }
}

/// The arrangement of a VM's vCPUs in its one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    pub vcpus: u32,
    /// 1 or 2; with 2, the number of vCPUs must be even.
    pub threads_per_core: u32,
}

impl Topology {
    /// Returns the number of bits that the thread number within a core takes in an APIC id.
    fn thread_bits(self) -> u32 {
        self.threads_per_core.next_power_of_two().trailing_zeros()
    }

    /// Returns the number of bits that an APIC id takes within the package; all ids of the package
    /// share the other bits.
    fn package_bits(self) -> u32 {
        self.vcpus.next_power_of_two().trailing_zeros()
    }

    fn cores(self) -> u32 {
        self.vcpus / self.threads_per_core
    }

    /// Returns how many vCPUs share a cache of this level, less one, as encoded in the cache
    /// leaves.
    fn cache_shared_by(self, level: u32) -> u32 {
        if level == 3 { self.vcpus - 1 } else { self.threads_per_core - 1 }
    }
}

/// Returns the CPUID leaves of vCPU `id`, made from those that the guest is offered.
pub fn for_vcpu(
    offered: &[kvm_cpuid_entry2],
    id: u32,
    topology: Topology,
) -> Result<CpuId, vmm_sys_util::fam::Error> {
    let Topology { vcpus, threads_per_core } = topology;
    let mut entries: Vec<_> = offered
        .iter()
        .copied()
        .filter(|entry| !matches!(entry.function, TOPOLOGY | TOPOLOGY_V2))
        .collect();
    for entry in &mut entries {
        mask(entry);
        match entry.function {
            FEATURES => {
                entry.ecx |= X2APIC | TSC_DEADLINE | HYPERVISOR;
                entry.ebx = entry.ebx & 0xffff | vcpus << 16 | id << 24;
                set(&mut entry.edx, HYPER_THREADING, vcpus > 1);
            }
            CACHES => {
                let level = entry.eax >> 5 & 0x7;
                let shared_by = topology.cache_shared_by(level);
                let cores = if entry.eax & 0x1f == 0 { 0 } else { topology.cores() - 1 };
                entry.eax = entry.eax & 0x3fff | shared_by << 14 | cores << 26;
            }
            EXTENDED_FEATURES if vcpus == 1 => entry.ecx &= !CMP_LEGACY,
            EXTENDED_SIZES => {
                entry.ecx = entry.ecx & !0xf0ff | topology.package_bits() << 12 | (vcpus - 1);
            }
            AMD_CACHES => {
                let shared_by = topology.cache_shared_by(entry.eax >> 5 & 0x7);
                entry.eax = entry.eax & !(0xfff << 14) | shared_by << 14;
            }
            AMD_TOPOLOGY => *entry = amd_topology(id, topology),
            _ => {}
        }
    }
    // AMD processors report only here which threads share a core, and kernels read it only if the
    // extension is announced.
    if threads_per_core > 1 && entries.iter().any(is_amd) {
        entries.retain(|entry| entry.function != AMD_TOPOLOGY);
        entries.push(amd_topology(id, topology));
        let features = entries.iter_mut().filter(|entry| entry.function == EXTENDED_FEATURES);
        features.for_each(|entry| entry.ecx |= TOPOLOGY_EXTENSIONS);
        let deepest = entries.iter_mut().find(|entry| entry.function == 0x8000_0000);
        if let Some(entry) = deepest {
            entry.eax = entry.eax.max(AMD_TOPOLOGY);
        }
    }
    let deepest = entries.iter().map(|entry| entry.function).filter(|f| *f < 0x4000_0000).max();
    for leaf in [TOPOLOGY, TOPOLOGY_V2] {
        if deepest.is_some_and(|deepest| leaf <= deepest) {
            entries.extend(levels(leaf, id, topology));
        }
    }
    CpuId::from_entries(&entries)
}

/// Returns the processor's vendor; empty if there is no leaf with it.
pub fn vendor(cpuid: &[kvm_cpuid_entry2]) -> String {
    let Some(leaf) = cpuid.iter().find(|leaf| leaf.function == VENDOR) else {
        return String::new();
    };
    let words = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    String::from_utf8_lossy(words.as_flattened()).into_owned()
}

/// Returns whether the processor is from AMD, or from Hygon, which kernels treat alike.
fn is_amd(entry: &kvm_cpuid_entry2) -> bool {
    let words = [entry.ebx, entry.edx, entry.ecx].map(u32::to_le_bytes);
    let names: [&[u8]; 2] = [b"AuthenticAMD", b"HygonGenuine"];
    entry.function == VENDOR && names.contains(&words.as_flattened())
}

fn amd_topology(id: u32, topology: Topology) -> kvm_cpuid_entry2 {
    let core = (id / topology.threads_per_core) & 0xff;
    let ebx = (topology.threads_per_core - 1) << 8 | core;
    kvm_cpuid_entry2 { function: AMD_TOPOLOGY, eax: id, ebx, ..Default::default() }
}

/// Returns the topology levels: threads of a core, cores of the package, the end of the list.
fn levels(leaf: u32, id: u32, topology: Topology) -> [kvm_cpuid_entry2; 3] {
    let level = |index, shift, count, kind: u32| kvm_cpuid_entry2 {
        function: leaf,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: kind << 8 | index,
        edx: id,
        ..Default::default()
    };
    [
        level(0, topology.thread_bits(), topology.threads_per_core, LEVEL_THREAD),
        level(1, topology.package_bits(), topology.vcpus, LEVEL_CORE),
        level(2, 0, 0, 0),
    ]
}

fn set(register: &mut u32, bit: u32, on: bool) {
    *register = if on { *register | bit } else { *register & !bit };
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supported() -> CpuId {
        let entry =
            |function, eax, ecx| kvm_cpuid_entry2 { function, eax, ecx, ..Default::default() };
        let [ebx, edx, ecx] = [b"Auth", b"enti", b"cAMD"].map(|word| u32::from_le_bytes(*word));
        CpuId::from_entries(&[
            kvm_cpuid_entry2 { function: VENDOR, ebx, ecx, edx, ..Default::default() },
            entry(FEATURES, 0, VMX | MONITOR),
            entry(CACHES, 0x163, 0),
            entry(THERMAL, 0x77, 9),
            entry(TOPOLOGY, 0, 0),
            entry(0xd, 0, 0),
            entry(EXTENDED_FEATURES, 0, NESTED_SVM),
            entry(SVM, 1, 0),
        ])
        .unwrap()
    }

    fn of(vcpus: u32, threads_per_core: u32) -> Topology {
        Topology { vcpus, threads_per_core }
    }

    fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        let found = |entry: &&kvm_cpuid_entry2| entry.function == function && entry.index == index;
        *cpuid.as_slice().iter().find(found).unwrap()
    }

    #[test]
    fn guest_has_no_nested_virtualization() {
        let cpuid = for_vcpu(supported().as_slice(), 0, of(1, 1)).unwrap();
        assert_eq!(leaf(&cpuid, FEATURES, 0).ecx & VMX, 0);
        assert_eq!(leaf(&cpuid, EXTENDED_FEATURES, 0).ecx & NESTED_SVM, 0);
        assert_eq!(leaf(&cpuid, SVM, 0).eax, 0);
        assert_eq!(leaf(&cpuid, THERMAL, 0).eax, ALWAYS_RUNNING_TIMER);
        assert_eq!(leaf(&cpuid, THERMAL, 0).ecx, 0);
    }

    #[test]
    fn saved_answers_are_masked_as_at_boot() {
        let booted = for_vcpu(supported().as_slice(), 0, of(2, 1)).unwrap();
        assert_eq!(masked(booted.as_slice()), booted.as_slice(), "an honest one stays as it is");
        let mut hostile = supported().as_slice().to_vec();
        let hyper_v = (0x7263_694d, 0x666f_736f, 0x7648_2074);
        for (ebx, ecx, edx) in [hyper_v, KVM_NAME] {
            let function = KVM_SIGNATURE;
            hostile.push(kvm_cpuid_entry2 { function, ebx, ecx, edx, ..Default::default() });
        }
        hostile.push(kvm_cpuid_entry2 { function: 0x4000_0003, ..Default::default() });
        let masked = CpuId::from_entries(&masked(&hostile)).unwrap();
        assert_eq!(leaf(&masked, FEATURES, 0).ecx & (VMX | MONITOR), 0);
        assert_eq!(leaf(&masked, EXTENDED_FEATURES, 0).ecx & NESTED_SVM, 0);
        assert_eq!(leaf(&masked, SVM, 0).eax, 0);
        let hypervisors: Vec<_> =
            masked.as_slice().iter().filter(|leaf| HYPERVISORS.contains(&leaf.function)).collect();
        assert_eq!(hypervisors.len(), 1, "{hypervisors:?}");
        assert_eq!(hypervisors[0].ebx, KVM_NAME.0);
    }

    #[test]
    fn topology_of_three_vcpus_is_three_cores_in_one_package() {
        let cpuid = for_vcpu(supported().as_slice(), 2, of(3, 1)).unwrap();
        assert_eq!(leaf(&cpuid, FEATURES, 0).ebx >> 16, 2 << 8 | 3);
        assert_eq!(leaf(&cpuid, CACHES, 0).eax >> 14, 2 << 12 | 2);
        let core = leaf(&cpuid, TOPOLOGY, 1);
        assert_eq!((core.eax, core.ebx, core.edx), (2, 3, 2));
        assert!(cpuid.as_slice().iter().all(|entry| entry.function != TOPOLOGY_V2));
        assert!(cpuid.as_slice().iter().all(|entry| entry.function != AMD_TOPOLOGY));
    }

    #[test]
    fn topology_of_two_threads_per_core_is_told_in_every_leaf() {
        let cpuid = for_vcpu(supported().as_slice(), 3, of(4, 2)).unwrap();
        let (thread, core) = (leaf(&cpuid, TOPOLOGY, 0), leaf(&cpuid, TOPOLOGY, 1));
        assert_eq!((thread.eax, thread.ebx, thread.edx), (1, 2, 3));
        assert_eq!((core.eax, core.ebx, core.edx), (2, 4, 3));
        // All vCPUs share the third level, and there are two cores.
        assert_eq!(leaf(&cpuid, CACHES, 0).eax >> 14, 1 << 12 | 3);
        assert_ne!(leaf(&cpuid, EXTENDED_FEATURES, 0).ecx & TOPOLOGY_EXTENSIONS, 0);
        let amd = leaf(&cpuid, AMD_TOPOLOGY, 0);
        assert_eq!((amd.eax, amd.ebx), (3, 1 << 8 | 1));
    }
}
