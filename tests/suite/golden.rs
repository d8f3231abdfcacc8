//! Snapshots of earlier versions, kept in `tests/golden`, are restored for ever after.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use pvmm::snapshot::testing::{self, Change};
use pvmm::snapshot::{LoadOptions, MachineFacts, Manifest, WriteOptions};
use pvmm::{
    Balloon, BootProtocol, Drive, ErrorKind, Net, Outcome, Overrides, TapSource, Template, Vm,
    VmConfig, Vsock,
};
use pvmm_tests::tiny::{self, PATIENCE};
use tempfile::TempDir;

const CLOCK: &str = "the clock rate";

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

/// A snapshot of that, in the middle of it, with a device of every kind.
fn snapshot(dir: &Path) {
    let place = TempDir::new().unwrap();
    let kernel = tiny::kernel(&CODE);
    let mut config = VmConfig::new(kernel.path());
    config.boot_protocol = BootProtocol::Linux64;
    config.memory_mib = 32;
    config.vcpus = 2;
    for byte in [1, 2] {
        let disk = tempfile::tempfile().unwrap();
        disk.write_all_at(&[byte; 8192], 0).unwrap();
        config.drives.push(Drive { read_only: byte == 1, ..Drive::from_file(disk) });
    }
    config.nets.push(Net::new(TapSource::Auto));
    config.vsock = Some(Vsock::new(3, place.path().join("v")));
    config.balloon = Some(Balloon::default());
    config.rng = true;
    let mut vm = Vm::boot(config).unwrap();
    vm.resume().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let template = vm.freeze().unwrap();
    assert_eq!(vm.wait(Some(Duration::ZERO)), None, "it was to be frozen in the middle");
    template.write(dir, WriteOptions::default()).unwrap();
}

/// Lets a golden machine go on to its end.
fn goes_on(dir: &Path) {
    let place = TempDir::new().unwrap();
    let manifest = Manifest::read(dir).unwrap();
    let vsock = manifest.vsock_path.map(|_| Vsock::new(3, place.path().join("v")));
    let nets = (0..manifest.taps.len()).map(|index| (index, Net::new(TapSource::Auto))).collect();
    let overrides = Overrides { vsock, nets, ..Overrides::default() };
    let template = Template::load(dir, LoadOptions::default()).unwrap();
    let mut vm = template.fork(overrides).unwrap().without_refresh();
    vm.resume().unwrap();
    assert_eq!(vm.wait(Some(PATIENCE)), Some(Outcome::Reboot), "{}", dir.display());
}

/// The fact about this host for which it must refuse a machine, found without the code that does so.
fn difference(there: &MachineFacts, here: &MachineFacts, dir: &Path) -> Option<&'static str> {
    let model = |facts: &MachineFacts| facts.cpu_signature & !0xf;
    let (clock, scales) = testing::host_clock();
    let saved = testing::clock_khz(dir)[0];
    let invariant = testing::cpuid(dir, 0x8000_0007, 0).is_some_and(|leaf| leaf[3] >> 8 & 1 == 1);
    let tolerance = if invariant { clock / 4000 } else { clock / 100 };
    if there.backend != here.backend {
        return Some("the KVM backend");
    }
    if there.cpu_vendor != here.cpu_vendor {
        return Some("the processor's vendor");
    }
    if model(there) != model(here) {
        return Some("the processor's family and model");
    }
    (!scales && saved.abs_diff(clock) > tolerance).then_some(CLOCK)
}

fn unpack(archive: &Path, into: &Path) -> PathBuf {
    let tar = Command::new("tar").arg("-C").arg(into).arg("-xzf").arg(archive).status().unwrap();
    assert!(tar.success(), "{}", archive.display());
    into.join("golden")
}

/// Those of this processor go on: as they are, or where only the clock runs at another rate, with this host's. Their
/// guest does not look at it.
#[test]
fn golden_snapshots_go_on_or_are_refused_for_a_fact_about_this_host() {
    let here = TempDir::new().unwrap();
    let now = here.path().join("now");
    snapshot(&now);
    goes_on(&now);
    let this_host = Manifest::read(&now).unwrap().machine;
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let mut count = 0;
    for entry in fs::read_dir(golden).unwrap().flatten() {
        let place = TempDir::new().unwrap();
        let dir = unpack(&entry.path(), place.path());
        let manifest = Manifest::read(&dir).unwrap();
        let difference = difference(&manifest.machine, &this_host, &dir);
        println!("{}: refused for {difference:?}", entry.path().display());
        count += 1;
        if let Some(fact) = difference {
            let error = Template::load(&dir, LoadOptions::default()).err().expect("refused");
            assert_eq!(error.kind(), ErrorKind::SnapshotIncompatible, "{error}");
            assert!(error.to_string().contains(fact), "{fact}: {error}");
        }
        if difference == Some(CLOCK) {
            testing::change(&dir, &[Change::ClockKhz(testing::host_clock().0)]);
        }
        if difference.is_none_or(|fact| fact == CLOCK) {
            goes_on(&dir);
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
