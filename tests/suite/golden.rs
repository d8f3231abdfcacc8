//! Golden snapshots: snapshots of earlier versions in `tests/golden` that every later version
//! restores.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, FreezeOptions, Refresh};
use pvmm::exec::ExecRequest;
use pvmm::snapshot::testing::{self, Change};
use pvmm::snapshot::{LoadOptions, MachineFacts, Manifest, WriteOptions};
use pvmm::{Balloon, Drive, ErrorKind, Initrd, Kvm, Net, Overrides, TapSource, Template, Vsock};
use pvmm_images::initramfs::appendix;
use pvmm_tests::guest::Guest;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

const CLOCK: &str = "the clock rate";

/// Prints what the guest kept in memory, the first bytes of its disks, the address of its card, the
/// number of its virtio devices, the number of random bytes that it gets from one of them, and the
/// number of its processors.
const LOOK: &str = "b=/busybox; $b cat /run/golden; $b head -c 3 /dev/vda; $b head -c 3 /dev/vdb; \
                    $b echo; $b cat /sys/class/net/eth0/address; $b ls /sys/bus/virtio/devices | $b wc -l; \
                    $b head -c 8 /dev/hwrng | $b wc -c; $b nproc";
const SEEN: &str = "kept\n111222\n06:00:ac:10:00:02\n6\n8\n2";

/// Writes a snapshot of a small Linux guest with a device of every kind. The folder is complete:
/// the root of the guest is its initramfs.
fn snapshot(dir: &Path) {
    let guest = Guest::boot_with(|config| {
        let busybox = fs::read("/bin/busybox").expect("busybox-static");
        let Some(Initrd::Bytes(initrd)) = &mut config.initrd else { panic!("an initramfs") };
        initrd.resize(initrd.len().next_multiple_of(4), 0);
        initrd.extend(appendix(&[("busybox", 0o755, &busybox)]));
        config.memory_mib = 64;
        config.cmdline = "console=ttyS0 quiet reboot=k panic=-1".into();
        config.drives.clear();
        for byte in *b"12" {
            let disk = tempfile::tempfile().unwrap();
            disk.write_all_at(&[byte; 8192], 0).unwrap();
            config.drives.push(Drive { read_only: byte == b'1', ..Drive::from_file(disk) });
        }
        let mac = "06:00:ac:10:00:02".parse().unwrap();
        config.nets.push(Net { mac: Some(mac), ..Net::new(TapSource::Auto) });
        config.balloon = Some(Balloon::default());
        config.rng = true;
    });
    shell(&guest.agent, "echo kept > /run/golden");
    assert_eq!(shell(&guest.agent, LOOK), SEEN);
    let deadline = Instant::now() + PATIENCE;
    let (socket, mut vm) = (guest.socket(), guest.vm);
    let control = Agent::connect_control(&socket, deadline).unwrap();
    let options = FreezeOptions { drop_caches: true, ..FreezeOptions::default() };
    control.freeze_with(options, deadline).unwrap();
    vm.freeze().unwrap().write(dir, WriteOptions::default()).unwrap();
}

/// Runs a line in the shell of busybox, which must succeed. Returns its output.
fn shell(agent: &Agent, line: &str) -> String {
    let request = ExecRequest::argv(["/busybox", "sh", "-c", line]).timeout(PATIENCE);
    let output = agent.exec(&request).expect("exec");
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8_lossy(&output.stdout.bytes).trim_end().to_owned()
}

/// Restores a golden snapshot, and checks all devices of the guest.
fn goes_on(dir: &Path) {
    let place = TempDir::new().unwrap();
    let vsock = Some(Vsock::new(3, place.path().join("v")));
    let overrides =
        Overrides { vsock, nets: vec![(0, Net::new(TapSource::Auto))], ..Overrides::default() };
    let template = Template::load(&Kvm::open().unwrap(), dir, LoadOptions::default()).unwrap();
    // A root without /etc has no identity to renew.
    let refresh = Refresh::new(1).unwrap().without_ids();
    let forked = template.fork(overrides).unwrap();
    let (_vm, agent) = forked.refreshed(&refresh, Instant::now() + PATIENCE).unwrap();
    assert_eq!(shell(&agent, LOOK), SEEN, "{}", dir.display());
}

/// Returns the fact for which this host must refuse a snapshot, without use of the code that
/// refuses it.
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
    let tar = Command::new("tar").arg("-C").arg(into).arg("-xJf").arg(archive).status().unwrap();
    assert!(tar.success(), "{}", archive.display());
    into.join("golden")
}

/// Snapshots of this processor are restored. If only the clock rate differs, it is replaced by the
/// rate of this host, for the guest does not use it.
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
            let error = Template::load(&Kvm::open().unwrap(), &dir, LoadOptions::default())
                .err()
                .expect("refused");
            assert_eq!(error.kind(), ErrorKind::SnapshotIncompatible, "{error:#}");
            assert!(format!("{error:#}").contains(fact), "{fact}: {error:#}");
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

/// Prints a new golden snapshot for `tests/golden`. Run `cargo xtask soak golden_is_made`, and
/// decode the lines between the test's name and `ok` with `base64 -d`.
#[test]
#[ignore = "run by cargo xtask soak golden_is_made, to make one"]
fn golden_is_made() {
    let place = TempDir::new().unwrap();
    snapshot(&place.path().join("golden"));
    let script = "tar --sparse --owner=0 --group=0 -C \"$0\" -cf - golden | xz -9e | base64";
    assert!(Command::new("sh").args(["-c", script]).arg(place.path()).status().unwrap().success());
}
