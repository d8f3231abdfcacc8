//! Snapshots of earlier versions, kept in `tests/golden`, are restored for ever after.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use pvmm::snapshot::{LoadOptions, Manifest, WriteOptions};
use pvmm::{ErrorKind, Outcome, Overrides, Template};
use pvmm_tests::tiny::{self, PATIENCE};
use tempfile::TempDir;

/// Counts to 400 with a pause between two numbers, then asks for a reset.
const CODE: [u8; 27] = [
    0xbb, 0x90, 0x01, 0x00, 0x00, // mov ebx, 400
    0xb9, 0x00, 0x00, 0x08, 0x00, // again: mov ecx, 0x80000
    0xff, 0xc9, // pause: dec ecx
    0x75, 0xfc, // jnz pause
    0xff, 0xcb, // dec ebx
    0x75, 0xf3, // jnz again
    0xb0, 0xfe, // mov al, 0xfe
    0xe6, 0x64, // out 0x64, al
    0xf4, 0xeb, 0xfd, // hlt; jmp hlt
    0x00, 0x00,
];

/// A snapshot of that, in the middle of it.
fn snapshot(dir: &Path) {
    let mut vm = tiny::machine(&CODE);
    vm.resume().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let template = vm.freeze().unwrap();
    assert_eq!(vm.wait(Some(Duration::ZERO)), None, "it was to be frozen in the middle");
    template.write(dir, WriteOptions::default()).unwrap();
}

fn unpack(archive: &Path, into: &Path) -> PathBuf {
    let tar = Command::new("tar").arg("-C").arg(into).arg("-xzf").arg(archive).status().unwrap();
    assert!(tar.success(), "{}", archive.display());
    into.join("golden")
}

#[test]
fn golden_snapshots_go_on_or_are_refused_for_their_processor() {
    let here = TempDir::new().unwrap();
    snapshot(&here.path().join("now"));
    let this_host = Manifest::read(&here.path().join("now")).unwrap().machine;
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let mut count = 0;
    for entry in fs::read_dir(golden).unwrap().flatten() {
        let place = TempDir::new().unwrap();
        let dir = unpack(&entry.path(), place.path());
        let manifest = Manifest::read(&dir).unwrap();
        count += 1;
        match Template::load(&dir, LoadOptions::default()) {
            Ok(template) => {
                let mut vm = template.fork(Overrides::default()).unwrap().without_refresh();
                vm.resume().unwrap();
                assert_eq!(vm.wait(Some(PATIENCE)), Some(Outcome::Reboot), "{entry:?}");
            }
            Err(error) => {
                assert_ne!(manifest.machine, this_host, "{entry:?} is of this host: {error}");
                assert_eq!(error.kind(), ErrorKind::SnapshotIncompatible, "{error}");
            }
        }
    }
    assert!(count > 0);
}

/// Prints a new golden snapshot, for `tests/golden`: `cargo xtask soak golden_is_made`, and what stands between its
/// name and `ok` through `base64 -d`.
#[test]
#[ignore = "run by cargo xtask soak golden_is_made, to make one"]
fn golden_is_made() {
    let place = TempDir::new().unwrap();
    snapshot(&place.path().join("golden"));
    let script = "tar --sparse --owner=0 --group=0 -C \"$0\" -cf - golden | gzip -9n | base64";
    assert!(Command::new("sh").args(["-c", script]).arg(place.path()).status().unwrap().success());
}
