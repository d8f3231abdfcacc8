//! A pause or a rollback that fails: the whole VM runs on, or it is reported as broken.

use std::time::Duration;

use pvmm::{Drive, DriveSource, ErrorKind, Outcome};
use pvmm_tests::child::prints;
use pvmm_tests::file_system::FileSystem;
use pvmm_tests::guest::Guest;

const MIB: u64 = 1 << 20;

/// Boots a guest with two vCPUs, whose second disk is on `host`.
fn guest_on(host: &FileSystem) -> Guest {
    let image = host.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(8 * MIB).unwrap();
    Guest::boot_with(|config| {
        config.vcpus = 2;
        config.drives.push(Drive::writable(&image));
    })
}

/// Starts a write to the second disk, which cannot end before `host` is thawed, and then `line` in
/// the guest.
fn write_held_by(host: &FileSystem, guest: &Guest, line: &str) {
    let write = "dd if=/dev/urandom of=/dev/vdb bs=64k count=1 oflag=direct";
    guest.prints(&format!("{write} 2>/dev/null"));
    host.freeze();
    // The write begins after this exec was answered: no device answers while the disk is awaited.
    let later = format!("(sleep 2; {write} && touch /tmp/written) & sleep 4; {line}");
    guest.prints(&format!("({later}) </dev/null >/dev/null 2>&1 &"));
    std::thread::sleep(Duration::from_secs(7));
}

/// Checks that the VM runs on, and that it can be paused and resumed.
fn assert_goes_on(host: &FileSystem, guest: &mut Guest) {
    // The resume succeeds, because the VM runs.
    guest.vm.resume().unwrap();
    host.thaw();
    let agent = guest.agent_again();
    prints(&agent, "while [ ! -e /tmp/written ]; do sleep 0.1; done");
    guest.vm.pause().unwrap();
    guest.vm.resume().unwrap();
    assert_eq!(prints(&guest.agent_again(), "nproc"), "2");
}

#[test]
fn pause_that_the_devices_do_not_hear_leaves_the_machine_running() {
    let host = FileSystem::ext4(64);
    let mut guest = guest_on(&host);
    write_held_by(&host, &guest, "true");
    let error = guest.vm.pause().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error:#}");
    let error = guest.vm.trim().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error:#}");
    assert_goes_on(&host, &mut guest);
}

/// A vCPU that resets a device waits for the device thread, which waits for the disk.
#[test]
fn pause_that_one_vcpu_does_not_hear_leaves_the_machine_running() {
    let host = FileSystem::ext4(64);
    let mut guest = guest_on(&host);
    let driver = "/sys/bus/virtio/drivers/virtio_rng";
    write_held_by(&host, &guest, &format!("basename {driver}/virtio* > {driver}/unbind"));
    let error = guest.vm.pause().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error:#}");
    assert_goes_on(&host, &mut guest);
}

#[test]
fn rollback_that_a_drive_refuses_changes_nothing() {
    let (first, second) =
        (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
    first.as_file().set_len(MIB).unwrap();
    second.as_file().set_len(MIB).unwrap();
    let source = |file: &tempfile::NamedTempFile| DriveSource::Path(file.path().into());
    let mut guest = Guest::boot_with(|config| config.drives.push(Drive::read_only(first.path())));
    guest.prints("echo then > /tmp/word");
    guest.vm.checkpoint().unwrap();
    let agent = guest.agent_again();
    prints(&agent, "echo now > /tmp/word");
    guest.vm.replace_drive(1, source(&second)).unwrap();
    let error = guest.vm.rollback().unwrap_err();
    assert!(format!("{error:#}").contains("drive 1 cannot be taken back"), "{error:#}");
    assert_eq!(prints(&agent, "cat /tmp/word"), "now");
    guest.vm.replace_drive(1, source(&first)).unwrap();
    guest.vm.rollback().unwrap();
    assert_eq!(prints(&guest.agent_again(), "cat /tmp/word"), "then");
}

#[test]
fn rollback_that_fails_half_way_ends_the_machine() {
    let host = FileSystem::ext4(64);
    let mut guest = Guest::boot_with(|config| {
        let image = tempfile::tempfile().unwrap();
        image.set_len(8 * MIB).unwrap();
        config.drives.push(Drive::from_file(image));
        config.host.scratch_dir = Some(host.path());
    });
    guest.vm.checkpoint().unwrap();
    let agent = guest.agent_again();
    prints(&agent, "dd if=/dev/urandom of=/dev/vdb bs=64k count=1 oflag=direct 2>/dev/null");
    host.break_down();
    let error = guest.vm.rollback().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broken, "{error:#}");
    assert!(format!("{error:#}").contains("drive 1"), "{error:#}");
    let calls = [guest.vm.resume(), guest.vm.pause(), guest.vm.rollback(), guest.vm.checkpoint()];
    for error in calls.into_iter().map(Result::unwrap_err) {
        assert_eq!(error.kind(), ErrorKind::Broken, "{error:#}");
    }
    assert_eq!(guest.vm.trim().unwrap_err().kind(), ErrorKind::Broken);
    assert_eq!(guest.vm.freeze().err().unwrap().kind(), ErrorKind::Broken);
    let ended = guest.vm.wait(Some(Duration::ZERO));
    assert!(matches!(ended, Some(Outcome::Broken { .. })), "{ended:?}");
}
