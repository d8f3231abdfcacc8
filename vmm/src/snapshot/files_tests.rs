//! Hostile state files, and how two files are written: over existing files, next to others, or not
//! at all.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::files::{self, refuse_foreign};
use super::manifest::{FILES_FORMAT, Manifest};
use super::sections::{self, Saved};
use super::testing::{manifest, saved, saved_as_files as for_files};
use super::written_file::WrittenFile;
use super::*;
use crate::Kvm;

fn encode(change: impl FnOnce(&mut Manifest), saved: &Saved) -> Vec<u8> {
    let (bytes, table) = sections::encode(saved).unwrap();
    let mut manifest = manifest(table);
    manifest.format = FILES_FORMAT.into();
    manifest.disks = vec![DiskFacts::Named { path: Some("/disk".into()), read_only: false }];
    change(&mut manifest);
    files::join(&manifest.encode().unwrap(), &bytes).unwrap()
}

#[test]
fn state_file_gives_back_what_it_was_given() {
    let (manifest, saved) = files::decode(&encode(|_| {}, &for_files())).unwrap();
    assert_eq!(saved.note.unwrap(), b"{\"drives\":[]}");
    assert_eq!(saved.sums, for_files().sums);
    assert_eq!(saved.machine.clock, for_files().machine.clock);
    assert_eq!(manifest.memory.size, 64 << 20);
}

#[test]
fn h1_h2_state_file_cut_or_flipped_anywhere_is_refused() {
    let bytes = encode(|_| {}, &for_files());
    for index in 0..bytes.len() {
        assert!(files::decode(&bytes[..index]).is_err(), "cut at {index}");
        let mut flipped = bytes.clone();
        flipped[index] ^= 1;
        assert!(files::decode(&flipped).is_err(), "flipped at {index}");
    }
    let longer = [bytes.as_slice(), b"x"].concat();
    assert!(files::decode(&longer).is_err());
}

#[test]
fn h3_state_file_with_parts_of_a_folder_is_refused() {
    let inside = DiskFacts::Inside { file: "disk-0.img".into(), size: 512, read_only: false };
    assert!(files::decode(&encode(|m| m.disks = vec![inside], &for_files())).is_err());
    assert!(files::decode(&encode(|m| m.format = manifest::FORMAT.into(), &for_files())).is_err());
    assert!(files::decode(&encode(|m| m.machine.vcpus = 2, &for_files())).is_err());
    for bad in [
        Saved { note: None, ..for_files() },
        Saved { note: Some(vec![0; NOTE_MAX + 1]), ..for_files() },
        Saved { sums: Vec::new(), ..for_files() },
        Saved { sums: [for_files().sums, for_files().sums].concat(), ..for_files() },
        saved(),
    ] {
        assert!(files::decode(&encode(|_| {}, &bad)).is_err());
    }
    // A folder's manifest with the disk of a state file is refused, too.
    let (_, table) = sections::encode(&saved()).unwrap();
    let mut folder = manifest(table);
    folder.disks = vec![DiskFacts::Named { path: None, read_only: true }];
    assert!(Manifest::decode(&folder.encode().unwrap()).is_err());
}

#[test]
fn foreign_state_is_refused_by_name_whatever_its_version() {
    let number = 0x0710_1984_8664_0000u64.to_le_bytes();
    let packed = [&[0], number.as_slice(), b"\x0611.0.0"].concat();
    for bytes in [[number.as_slice(), &[7; 100]].concat(), packed] {
        let error = refuse_foreign(&bytes, "vm.state").unwrap_err().to_string();
        assert!(error.contains("vm.state: is a snapshot of Firecracker; bake it again"), "{error}");
    }
    assert!(refuse_foreign(&encode(|_| {}, &for_files()), "vm.state").is_ok());
    assert!(refuse_foreign(b"", "vm.state").is_ok());
}

fn load(state: &std::path::Path, memory: Option<&std::path::Path>) -> (ErrorKind, String) {
    let error = crate::Template::load_files(&Kvm::open().unwrap(), state, memory)
        .err()
        .expect("should be refused");
    (error.kind(), format!("{error:#}"))
}

/// All of these are refused before KVM is used.
#[test]
fn load_of_what_is_no_pair_says_which_file_and_why() {
    let place = tempfile::tempdir().unwrap();
    let (state, memory) = (place.path().join("vm.state"), place.path().join("vm.mem"));
    let (kind, missing) = load(&state, Some(&memory));
    assert!(kind == ErrorKind::InvalidConfig && missing.contains("vm.state"), "{missing}");
    let (kind, folder) = load(place.path(), Some(&memory));
    assert!(kind == ErrorKind::InvalidConfig && folder.contains("is a folder"), "{folder}");
    fs::write(&state, b"garbage that is long enough").unwrap();
    let (kind, garbage) = load(&state, Some(&memory));
    assert!(kind == ErrorKind::SnapshotCorrupt, "{kind:?}");
    assert!(garbage.contains("vm.state") && garbage.contains("not a state file"), "{garbage}");
    fs::write(&state, [&0x0710_1984_8664_0000u64.to_le_bytes()[..], &[0; 64]].concat()).unwrap();
    let (kind, foreign) = load(&state, Some(&memory));
    assert!(
        kind == ErrorKind::SnapshotIncompatible && foreign.contains("Firecracker"),
        "{foreign}"
    );
    let as_folder =
        crate::Template::load(&Kvm::open().unwrap(), place.path(), LoadOptions::default())
            .err()
            .unwrap();
    assert!(format!("{as_folder:#}").contains("Firecracker"), "{as_folder:#}");

    fs::write(&state, encode(|_| {}, &for_files())).unwrap();
    let as_folder =
        crate::Template::load(&Kvm::open().unwrap(), place.path(), LoadOptions::default())
            .err()
            .unwrap();
    assert!(format!("{as_folder:#}").contains("of two files"), "{as_folder:#}");
    fs::write(&memory, b"short").unwrap();
    let (_, short) = load(&state, Some(&memory));
    assert!(short.contains("vm.mem: is 5 bytes"), "{short}");
    fs::File::create(&memory).unwrap().set_len(64 << 20).unwrap();
    let (kind, mixed) = load(&state, Some(&memory));
    assert!(kind == ErrorKind::SnapshotCorrupt && mixed.contains("is not the memory"), "{mixed}");
    let (_, pipe) = load(&state, Some(std::path::Path::new("/dev/null")));
    assert!(pipe.contains("/dev/null"), "{pipe}");
}

fn names(dir: &std::path::Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names.into_iter().map(|name| name.into_string().unwrap()).collect()
}

#[test]
fn written_file_replaces_its_elder_whole_or_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("vm.state");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let mut file = WrittenFile::create(&path).unwrap();
    file.write_all(b"new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    drop(file);
    assert_eq!(names(place.path()), ["vm.state"]);
    let mut file = WrittenFile::create(&path).unwrap();
    file.write_all(b"new").unwrap();
    file.publish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    // A link stays a link, and a file that a killed writer left is removed.
    let link = place.path().join("link");
    symlink(&path, &link).unwrap();
    fs::write(place.path().join(".pvmm-unfinished-of-the-dead"), "x").unwrap();
    let mut file = WrittenFile::create(&link).unwrap();
    file.write_all(b"through").unwrap();
    file.publish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"through");
    assert_eq!(names(place.path()), ["link", "vm.state"]);
    for bad in [place.path(), std::path::Path::new("/"), &place.path().join("no/where")] {
        assert!(WrittenFile::create(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn written_file_over_another_keeps_what_is_not_written() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("vm.mem");
    fs::write(&path, [5; 8192]).unwrap();
    let file = WrittenFile::over(&path, 8192).unwrap();
    std::os::unix::fs::FileExt::write_all_at(file.file(), &[6; 4096], 4096).unwrap();
    file.publish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), [[5; 4096], [6; 4096]].concat());
    // A file of another size has nothing to keep.
    WrittenFile::over(&path, 4096).unwrap().publish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), [0; 4096]);
    assert_eq!(names(place.path()), ["vm.mem"]);
}
