//! Kills a writer of two files at every system call: no pair that is left loads with memory of
//! another moment.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use vm_memory::{Bytes, GuestAddress};

use super::crash_tests::{Place, held_victim, marked};
use super::files::{self, SaveKind};
use super::*;
use crate::memory::{Memory, MemoryImage, Mode, Region};

const VICTIM: &str = "snapshot::files_crash_tests::files_victim";
const SIZE: u64 = 64 << 20;
/// Far from all other data, so that a few samples would not find it.
const GENERATION: u64 = 0x123_4000;

/// Writes a pair over the existing one; state and memory both contain the generation.
fn write(dir: &Path, generation: u8, kind: SaveKind) -> Result<(), Error> {
    let region = Region { address: 0, len: SIZE };
    let memory = Memory::map(MemoryImage::empty(vec![region]), Mode::Tracked, None).unwrap();
    for page in [0, 0x30_0000, 0x200_0000, SIZE - 4096] {
        memory.guest.write_slice(&[7; 4096], GuestAddress(page)).unwrap();
    }
    memory.guest.write_slice(&[generation; 16], GuestAddress(GENERATION)).unwrap();
    marked(|| {
        let (state, path) = (dir.join("vm.state"), dir.join("vm.mem"));
        let (file, sums) = files::write_memory(&memory, &path, kind, true, None)?;
        files::publish(&file, kind, &state, |stamps| {
            let note = Some(vec![generation]);
            let saved = sections::Saved {
                sums: vec![sums],
                note,
                stamps,
                ..super::testing::saved_as_files()
            };
            let (bytes, table) = sections::encode(&saved)?;
            let mut manifest = super::testing::manifest(table);
            manifest.format = manifest::FILES_FORMAT.into();
            manifest.disks.clear();
            files::join(&manifest.encode()?, &bytes)
        })?;
        Ok(())
    })
}

#[test]
#[ignore = "run by the other tests here"]
fn files_victim() {
    let place = held_victim();
    let kind = if place.join("diff").exists() { SaveKind::Diff } else { SaveKind::Full };
    write(&place, 2, kind).expect("written");
}

/// Returns the generation that a load of the pair would resume.
fn generation(dir: &Path) -> Result<u8, SnapshotError> {
    let (state, memory) = (dir.join("vm.state"), dir.join("vm.mem"));
    let (_, saved) = files::read_state(&state)?;
    let file = files::open_memory(&memory, &state, &saved, SIZE)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, GENERATION).unwrap();
    assert_eq!(saved.note.as_deref(), Some(&byte[..]), "memory of another moment");
    Ok(byte[0])
}

fn killed_everywhere(kind: SaveKind) {
    let place = Place::empty(VICTIM);
    let dir = place.dir.path();
    if kind == SaveKind::Diff {
        fs::write(dir.join("diff"), b"").unwrap();
    }
    let begin = || write(dir, 1, SaveKind::Full).unwrap();
    begin();
    let calls = place.calls();
    assert!(calls.len() > 30, "{calls:?}");
    let (mut old, mut new, mut refused) = (0, 0, 0);
    for (name, count) in &calls {
        begin();
        assert_eq!(generation(dir).unwrap(), 1);
        let written = place.run(&format!("inject={name}:signal=KILL:when={count}"));
        assert!(!written, "{name} {count}: was to be killed");
        match generation(dir) {
            Ok(1) => old += 1,
            Ok(_) => new += 1,
            Err(error) => {
                assert!(matches!(error, SnapshotError::Mixed { .. }), "{name} {count}: {error}");
                refused += 1;
            }
        }
    }
    println!("killed at {} calls: old {old}, new {new}, refused {refused}", calls.len());
    assert!(old > 0 && new > 0 && refused > 0, "{old} {new} {refused}");
}

#[test]
fn writer_of_two_files_killed_at_any_system_call_leaves_no_pair_of_two_moments() {
    killed_everywhere(SaveKind::Full);
}

#[test]
fn writer_of_differences_killed_at_any_system_call_leaves_no_pair_of_two_moments() {
    killed_everywhere(SaveKind::Diff);
}

/// A diff alone is not all of memory, even with a matching stamp.
#[test]
fn h5_diff_without_its_base_is_refused() {
    let place = tempfile::tempdir().unwrap();
    write(place.path(), 1, SaveKind::Diff).unwrap();
    assert_eq!(generation(place.path()).unwrap(), 1, "all of it changed");
    let memory = fs::File::options().write(true).open(place.path().join("vm.mem")).unwrap();
    let (_, saved) = files::read_state(&place.path().join("vm.state")).unwrap();
    assert!(saved.stamps.is_empty());
    memory.write_all_at(&[0; 4096], SIZE - 4096).unwrap();
    assert!(matches!(generation(place.path()), Err(SnapshotError::Mixed { .. })));
}

/// H5: a thousand pages of sixteen thousand differ, or a single one, at any place.
#[test]
fn h5_memory_of_another_moment_is_refused_whichever_page_differs() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    write(dir, 1, SaveKind::Full).unwrap();
    let old = fs::read(dir.join("vm.state")).unwrap();
    write(dir, 2, SaveKind::Full).unwrap();
    assert_eq!(generation(dir).unwrap(), 2);
    fs::write(dir.join("vm.state"), old).unwrap();
    assert!(matches!(generation(dir), Err(SnapshotError::Mixed { .. })));
    write(dir, 2, SaveKind::Full).unwrap();
    for page in [0, 4096, SIZE / 2, SIZE - 4096] {
        let memory = fs::File::options().read(true).write(true).open(dir.join("vm.mem")).unwrap();
        let mut byte = [0];
        memory.read_exact_at(&mut byte, page + 9).unwrap();
        memory.write_all_at(&[byte[0] ^ 1], page + 9).unwrap();
        assert!(matches!(generation(dir), Err(SnapshotError::Mixed { .. })), "{page}");
        memory.write_all_at(&byte, page + 9).unwrap();
        assert_eq!(generation(dir).unwrap(), 2, "its bytes are right again");
    }
}
