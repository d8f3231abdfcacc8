//! Snapshots as hostile files: truncated, flipped, mixed, impossible. The test suite covers whole
//! folders, with a guest.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use super::checksum::{FileSums, PIECE};
use super::manifest::{BaseFacts, Manifest, SectionFacts};
use super::sections;
use super::testing::{manifest, saved, vcpu};
use super::*;
use crate::cpu::{CpuBaseline, CpuModifiers};
use crate::kvm::state::VcpuStateV1;

fn refused(change: impl FnOnce(&mut Manifest)) -> SnapshotError {
    let mut manifest = manifest(Vec::new());
    Manifest::decode(&manifest.encode().unwrap()).unwrap();
    change(&mut manifest);
    Manifest::decode(&manifest.encode().unwrap()).unwrap_err()
}

#[test]
fn h1_manifest_cut_at_every_byte_is_refused() {
    let text = manifest(sections::encode(&saved()).unwrap().1).encode().unwrap();
    Manifest::decode(&text).unwrap();
    assert!((0..text.len()).all(|end| Manifest::decode(&text[..end]).is_err()));
}

#[test]
fn h2_manifest_with_any_byte_flipped_is_refused() {
    let text = manifest(sections::encode(&saved()).unwrap().1).encode().unwrap();
    for index in 0..text.len() {
        for bit in [0x01, 0x20, 0x80] {
            let mut text = text.clone();
            text[index] ^= bit;
            assert!(Manifest::decode(&text).is_err(), "byte {index} bit {bit:#x}");
        }
    }
}

#[test]
fn h1_h2_state_cut_or_flipped_anywhere_is_refused() {
    let (bytes, table) = sections::encode(&saved()).unwrap();
    sections::decode(&bytes, &table).unwrap();
    for index in 0..bytes.len() {
        assert!(sections::decode(&bytes[..index], &table).is_err(), "cut at {index}");
        let mut flipped = bytes.clone();
        flipped[index] ^= 1;
        assert!(sections::decode(&flipped, &table).is_err(), "flipped at {index}");
    }
}

#[test]
fn section_is_read_from_a_line_of_five_words() {
    let table = sections::encode(&saved()).unwrap().1;
    let SectionFacts { kind, version, offset, len, crc32 } = &table[1];
    let line = serde_json::to_string(&table[1]).unwrap();
    assert_eq!(line, format!("\"{kind} {version} {offset} {len} {crc32}\""));
    assert_eq!(serde_json::from_str::<SectionFacts>(&line).unwrap(), table[1]);
    for bad in ["", "vcpu", "vcpu 1 2 3", "vcpu 1 2 3 4 5", "vcpu 1 2 3 -4", "vcpu 1  2 3 4"] {
        let text = serde_json::to_string(bad).unwrap();
        assert!(serde_json::from_str::<SectionFacts>(&text).is_err(), "{bad}");
    }
}

#[test]
fn baseline_is_saved_and_masks_what_is_loaded_with_it() {
    let without = sections::encode(&saved()).unwrap().1;
    assert!(without.iter().all(|section| section.kind != "cpu"), "as before there were baselines");
    let template = br#"{"cpuid_modifiers": [{"leaf": "1", "subleaf": "0", "flags": 0,
        "modifiers": [{"register": "ecx", "bitmap": "0b0xxx"}]}]}"#;
    let custom = CpuModifiers::from_json(template).unwrap().into();
    let level = CpuBaseline::named("x86-64-v2").unwrap();
    for (cpu, left) in [(level, 0b0001), (custom, 0b0111), (CpuBaseline::Host, 0b1111)] {
        let mut saved = saved();
        saved.machine.cpu = cpu.clone();
        let mut vcpu = vcpu();
        vcpu.cpuid[0].ecx = 0b1111;
        let vcpu = Arc::new(vcpu);
        saved.machine.vcpus = vec![vcpu.clone(), vcpu];
        let (bytes, table) = sections::encode(&saved).unwrap();
        let loaded = sections::decode(&bytes, &table).unwrap().machine;
        assert_eq!(loaded.cpu, cpu);
        let seen: Vec<_> = loaded.vcpus.iter().map(|vcpu| vcpu.cpuid[0].ecx).collect();
        assert_eq!(seen, [left, left], "{}", cpu.name());
        let stamps = Vec::new();
        let disks = sections::SavedDisks { cpu: cpu.clone(), sums: Vec::new(), note: None, stamps };
        let (bytes, table) = sections::encode_disks(&disks).unwrap();
        assert_eq!(sections::decode_disks(&bytes, &table).unwrap().cpu, cpu);
    }
}

#[test]
fn h3_other_formats_and_versions_are_refused_by_name() {
    let format = refused(|m| m.format = "other".into());
    assert!(format.to_string().contains("other"), "{format}");
    let version = refused(|m| m.version = 2);
    assert!(matches!(version, SnapshotError::Version { found: 2, known: 1 }));
    refused(|m| m.version = 0);
    let later = br#"{"format":"pvmm-snapshot","version":9,"shape":{"new":true}}"#;
    assert!(matches!(Manifest::decode(later), Err(SnapshotError::Version { found: 9, .. })));
    assert!(Manifest::decode(b"\x00\x01firecracker").is_err());
}

#[test]
fn h3_unknown_and_doubled_and_missing_sections_are_refused() {
    let (bytes, table) = sections::encode(&saved()).unwrap();
    let mut unknown = table.clone();
    unknown[0].kind = "flux".into();
    let error = sections::decode(&bytes, &unknown).err().unwrap();
    assert!(matches!(error, SnapshotError::SectionVersion { .. }), "{error}");
    let mut newer = table.clone();
    newer[1].version = 2;
    assert!(sections::decode(&bytes, &newer).is_err());
    let clock = table[0].clone();
    let doubled_bytes = [&bytes[..clock.len as usize], &bytes].concat();
    let shifted = table.iter().map(|s| SectionFacts { offset: s.offset + clock.len, ..s.clone() });
    let doubled: Vec<_> = std::iter::once(clock.clone()).chain(shifted).collect();
    assert!(sections::decode(&doubled_bytes, &doubled).is_err());
    assert!(sections::decode(&bytes[..clock.len as usize], &table[..1]).is_err());
}

#[test]
fn h7_impossible_regions_are_refused_before_anything_is_mapped() {
    let size = 64u64 << 20;
    let bad: [&[(u64, u64)]; 7] = [
        &[],
        &[(0, 0)],
        &[(0, size / 2), (4096, size / 2)],
        &[(u64::MAX - 4095, size)],
        &[(0, 1 << 63), (1 << 63, 1 << 63)],
        &[(0, size / 2), (size, size / 4)],
        &[(1, size)],
    ];
    for regions in bad {
        refused(|m| m.memory.regions = regions.to_vec());
    }
    refused(|m| m.machine.memory_mib = 1 << 50);
    refused(|m| m.machine.vcpus = 33);
    refused(|m| m.disks = vec![m.disks[0].clone(); 17]);
    refused(|m| {
        m.disks = vec![DiskFacts::Inside { file: "../x".into(), size: 1, read_only: false }]
    });
    refused(|m| m.memory.base = Some(BaseFacts { id: "..".into(), path: "/".into() }));
}

#[test]
fn h8_huge_counts_are_refused_without_being_allocated() {
    let mut table = sections::encode(&saved()).unwrap().1;
    table.truncate(1);
    // A list of four billion registers in five bytes, and one of as many bytes for packed lists.
    for bomb in [[0xdd, 0xff, 0xff, 0xff, 0xff], [0xc6, 0xff, 0xff, 0xff, 0xff]] {
        for kind in ["vcpu", "virtio", "checksums", "runs", "working_set", "ioapic"] {
            let (len, crc32) = (bomb.len() as u64, crc32fast::hash(&bomb));
            let section = SectionFacts { kind: kind.into(), version: 1, offset: 0, len, crc32 };
            assert!(sections::decode(&bomb, &[section]).is_err(), "{kind}");
        }
    }
    for change in [
        (|v: &mut VcpuStateV1| v.cpuid.clear()) as fn(&mut VcpuStateV1),
        |v| v.cpuid = vec![Default::default(); 257],
        |v| v.msrs = vec![(0, 0); 1025],
        |v| v.xsave.truncate(1000),
        |v| v.tsc_khz = 0,
    ] {
        let mut vcpu = vcpu();
        change(&mut vcpu);
        let mut saved = saved();
        saved.machine.vcpus = vec![Arc::new(vcpu)];
        let (bytes, table) = sections::encode(&saved).unwrap();
        assert!(sections::decode(&bytes, &table).is_err());
    }
}

#[test]
fn section_with_bytes_left_over_is_refused() {
    let (bytes, table) = sections::encode(&saved()).unwrap();
    for more in [0x00, 0xc0, 0xc1, 0xdd] {
        let (mut bytes, mut table) = (bytes.clone(), table.clone());
        bytes.push(more);
        let last = table.last_mut().unwrap();
        last.len += 1;
        last.crc32 = crc32fast::hash(&bytes[last.offset as usize..]);
        let error = sections::decode(&bytes, &table).err().unwrap();
        assert!(error.to_string().contains("left over"), "{error}");
    }
}

#[test]
fn h13_sections_beyond_the_limit_are_refused() {
    let huge =
        SectionFacts { kind: "clock".into(), version: 1, offset: 0, len: u64::MAX, crc32: 0 };
    assert!(sections::decode(&[0; 64], &[huge]).is_err());
    // After a valid section the sum of the lengths overflows; and no section may overlap another.
    let (bytes, table) = sections::encode(&saved()).unwrap();
    for (offset, len) in [(table[1].offset, u64::MAX - 1), (0, table[1].len), (u64::MAX, 1)] {
        let mut table = table.clone();
        (table[1].offset, table[1].len) = (offset, len);
        let error = sections::decode(&bytes, &table).err().unwrap().to_string();
        assert!(error.contains("do not follow each other"), "{offset} {len}: {error}");
    }
}

#[test]
fn h7_impossible_ranges_of_memory_are_refused() {
    let size = 16 * 4096;
    assert_eq!(read::check_runs(&[(0, 4096), (8192, size)], size).unwrap().count(), 2);
    let bad: [&[(u64, u64)]; 6] = [
        &[(0, size + 4096)],
        &[(4096, 4096)],
        &[(8192, 4096)],
        &[(0, 8192), (4096, 12288)],
        &[(0, 100)],
        &[(u64::MAX - 4095, 0)],
    ];
    for runs in bad {
        assert!(read::check_runs(runs, size).is_err(), "{runs:?}");
    }
}

#[test]
fn h6_changed_hole_or_length_of_a_large_file_is_found() {
    let file = tempfile::tempfile().unwrap();
    let size = 3 * PIECE + 4096;
    file.set_len(size).unwrap();
    file.write_all_at(&[5; 9000], PIECE + 100).unwrap();
    let sums = FileSums::of("memory.bin", &file, size).unwrap();
    assert!(sums.is_whole());
    assert_eq!(sums.compare(&file).unwrap(), None);
    let changed = |change: fn(&File)| {
        let copy = tempfile::tempfile().unwrap();
        copy.set_len(size).unwrap();
        pvmm_devices::sparse::copy(&file, &copy, 0..size).unwrap();
        assert_eq!(sums.compare(&copy).unwrap(), None);
        change(&copy);
        sums.compare(&copy).unwrap()
    };
    assert_eq!(changed(|f| f.write_all_at(b"x", 3 * PIECE).unwrap()), Some(3 * PIECE));
    assert_eq!(changed(|f| f.write_all_at(b"x", PIECE + 200).unwrap()), Some(PIECE));
    let punch = |f: &File| pvmm_devices::sparse::punch(f, PIECE..2 * PIECE).unwrap();
    assert_eq!(changed(punch), Some(PIECE));
}

#[test]
fn large_file_is_written_by_several_threads_as_it_was_read() {
    let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let size = 300 * PIECE + 4096;
    from.set_len(size).unwrap();
    for piece in (0..300).step_by(7) {
        from.write_all_at(&[piece as u8 + 1; 9000], piece * PIECE + 4096).unwrap();
    }
    let read = |at: u64, bytes: &mut [u8]| from.read_exact_at(bytes, at).map(|()| 1);
    let mut heard = 0;
    let sums = FileSums::write("memory.bin", &to, size, read, &mut |more| heard += more).unwrap();
    assert_eq!(sums, FileSums::of("memory.bin", &from, size).unwrap());
    assert_eq!(sums.compare(&to).unwrap(), None);
    assert!(heard <= 301 && to.metadata().unwrap().blocks() * 512 < 2 << 20);
    let fails = |at: u64, _: &mut [u8]| match at {
        at if at > 100 * PIECE => Err(std::io::ErrorKind::StorageFull.into()),
        _ => Ok(0),
    };
    assert!(FileSums::write("memory.bin", &to, size, fails, &mut |_| {}).is_err());
}
