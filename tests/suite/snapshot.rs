//! Snapshots as folders: written, restored, chained, and refused if they are damaged or do not fit.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Instant;

use pvmm::snapshot::{LoadOptions, WriteOptions};
use pvmm::{Drive, Error, ErrorKind, Kvm, Template};
use pvmm_tests::child::{Child, SOON};
use pvmm_tests::guest::Guest;
use pvmm_tests::tiny;
use tempfile::TempDir;

fn load(dir: &Path) -> Result<Template, Error> {
    Template::load(&Kvm::open().unwrap(), dir, LoadOptions::default())
}

fn refused(dir: &Path) -> (ErrorKind, String) {
    let error = load(dir).err().expect("the snapshot should be refused");
    (error.kind(), format!("{error:#}"))
}

/// A guest with two vCPUs, a disk of its own and a workload is snapshotted and restored.
#[test]
fn snapshot_of_a_busy_guest_with_two_vcpus_goes_on_in_every_part() {
    let place = TempDir::new().unwrap();
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(64 << 20).unwrap();
    let mut guest = Guest::boot_with(|config| {
        config.vcpus = 2;
        config.drives.push(Drive::from_file(disk));
    });
    guest.prints("echo on-disk | dd of=/dev/vdb bs=4096 seek=9 conv=sync,fsync 2>/dev/null");
    let dir = place.path().join("snap");
    let template = guest.vm.freeze().unwrap();
    // Later changes of the parent are not in the snapshot, neither on disk nor in memory.
    let agent = guest.vm.agent(Instant::now() + SOON).unwrap();
    pvmm_tests::child::prints(
        &agent,
        "echo later | dd of=/dev/vdb bs=4096 seek=9 conv=sync,fsync 2>/dev/null",
    );
    let manifest = template.write(&dir, WriteOptions::default()).unwrap();
    assert_eq!((manifest.machine.vcpus, manifest.disks.len()), (2, 2));
    drop((guest, template));

    let child = Child::of(&load(&dir).unwrap());
    assert_eq!(
        child.prints("nproc; dd if=/dev/vdb bs=4096 skip=9 count=1 2>/dev/null | head -1"),
        "2\non-disk"
    );
    child.prints("echo mine | dd of=/dev/vdb bs=4096 seek=9 conv=sync,fsync 2>/dev/null");
    let taskset = "for cpu in 0 1; do taskset -c $cpu sh -c 'echo ok'; done";
    assert_eq!(child.prints(taskset), "ok\nok");
    child.prints("echo 3 > /proc/sys/vm/drop_caches; md5sum /usr/bin/python3 >/dev/null");

    // The file is sparse: pages that were never touched take no space.
    let memory = fs::metadata(dir.join("memory.bin")).unwrap();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&memory) * 512;
    assert!(blocks < memory.len() * 3 / 4, "{blocks} of {}", memory.len());
}

#[test]
fn incremental_snapshot_holds_only_what_changed_and_restores_through_its_base() {
    let place = TempDir::new().unwrap();
    let (base, next, flat) =
        (place.path().join("a"), place.path().join("b"), place.path().join("c"));
    let mut guest = Guest::boot();
    guest.prints("echo one > /tmp/one");
    guest.vm.freeze().unwrap().write(&base, WriteOptions::default()).unwrap();
    drop(guest);
    let mut child = Child::of(&load(&base).unwrap());
    child.prints("echo two > /tmp/two");
    let only_changed = WriteOptions { incremental: true, ..Default::default() };
    child.vm.freeze().unwrap().write(&next, only_changed).unwrap();
    drop(child);
    let blocks = |dir: &Path| {
        let facts = fs::metadata(dir.join("memory.bin")).unwrap();
        std::os::unix::fs::MetadataExt::blocks(&facts)
    };
    assert!(blocks(&next) * 3 < blocks(&base), "{} of {}", blocks(&next), blocks(&base));
    let both = "cat /tmp/one /tmp/two";
    assert_eq!(Child::of(&load(&next).unwrap()).prints(both), "one\ntwo");
    load(&next).unwrap().write(&flat, WriteOptions::default()).unwrap();
    fs::remove_dir_all(&base).unwrap();
    assert!(refused(&next).1.contains("base snapshot"));
    assert_eq!(Child::of(&load(&flat).unwrap()).prints(both), "one\ntwo");
}

/// Writes the snapshot of a tiny VM. This takes half a second, so a test can damage many of them.
fn tiny_snapshot(place: &Path) -> std::path::PathBuf {
    // The guest writes a byte, writes to a port without a device, and waits: mov byte [0x200000],
    // 7; out 0xed, al; hlt; jmp back to hlt.
    let code = [0xc6, 0x04, 0x25, 0x00, 0x00, 0x20, 0x00, 0x07, 0xe6, 0xed, 0xf4, 0xeb, 0xfd];
    let mut vm = tiny::machine(&code);
    vm.resume().unwrap();
    let until = std::time::Instant::now() + tiny::PATIENCE;
    while vm.missed_accesses() == 0 {
        assert!(std::time::Instant::now() < until, "the guest did not run");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let dir = place.join("tiny");
    vm.freeze().unwrap().write(&dir, WriteOptions::default()).unwrap();
    dir
}

fn writable(dir: &Path, name: &str) -> fs::File {
    let path = dir.join(name);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// The snapshot of a tiny VM, and copies that a test can damage.
struct Good {
    place: TempDir,
    dir: std::path::PathBuf,
}

impl Good {
    fn new() -> Self {
        let place = TempDir::new().unwrap();
        let dir = tiny_snapshot(place.path());
        Self { place, dir }
    }

    fn copy(&self, name: &str) -> std::path::PathBuf {
        let to = self.place.path().join(name);
        fs::create_dir(&to).unwrap();
        for entry in fs::read_dir(&self.dir).unwrap().flatten() {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        to
    }
}

#[test]
fn copy_of_a_snapshot_is_as_good_and_no_folder_is_told() {
    let good = Good::new();
    load(&good.dir).unwrap();
    load(&good.copy("copied")).unwrap();
    assert_eq!(refused(&good.place.path().join("absent")).0, ErrorKind::InvalidConfig);
}

/// H6: the change is also found if a stamp says that the file was verified.
#[test]
fn h2_h6_memory_flipped_holed_or_of_another_length_is_refused() {
    let good = Good::new();
    let dir = good.copy("flipped");
    load(&dir).unwrap();
    writable(&dir, "memory.bin").write_all_at(b"!", 0x30_0000).unwrap();
    assert_eq!(refused(&dir).0, ErrorKind::SnapshotCorrupt);
    assert!(refused(&dir).1.contains("memory.bin"), "{}", refused(&dir).1);
    let dir = good.copy("hole");
    writable(&dir, "memory.bin").write_all_at(&[0; 4096], 0x20_0000).unwrap();
    assert!(refused(&dir).1.contains("memory.bin: differs"));
    for (name, len) in [("short", (32 << 20) - 4096), ("long", (32 << 20) + 4096), ("empty", 0)] {
        let dir = good.copy(name);
        writable(&dir, "memory.bin").set_len(len).unwrap();
        assert!(refused(&dir).1.contains("the manifest says"), "{}", refused(&dir).1);
    }
}

#[test]
fn h5_state_of_one_snapshot_with_the_memory_of_another_is_refused() {
    let (good, other) = (Good::new(), Good::new());
    for name in ["state.bin", "manifest.json"] {
        let dir = good.copy(name);
        fs::copy(other.dir.join(name), dir.join(name)).unwrap();
        assert_eq!(refused(&dir).0, ErrorKind::SnapshotCorrupt, "{name}");
    }
}

#[test]
fn h12_link_or_folder_or_pipe_in_place_of_a_file_is_refused() {
    let good = Good::new();
    let dir = good.copy("link");
    fs::remove_file(dir.join("memory.bin")).unwrap();
    symlink(good.dir.join("memory.bin"), dir.join("memory.bin")).unwrap();
    assert!(refused(&dir).1.contains("not a regular file"), "{}", refused(&dir).1);
    for name in ["manifest.json", "state.bin", "memory.bin"] {
        let dir = good.copy(&format!("folder-{name}"));
        fs::remove_file(dir.join(name)).unwrap();
        fs::create_dir(dir.join(name)).unwrap();
        assert!(refused(&dir).1.contains(name));
        fs::remove_dir(dir.join(name)).unwrap();
        let made = std::process::Command::new("mkfifo").arg(dir.join(name)).status().unwrap();
        assert!(made.success());
        assert!(refused(&dir).1.contains(name));
    }
}

/// H4: the checksum of the manifest is corrected.
#[test]
fn h4_snapshot_of_another_backend_or_processor_is_refused() {
    let good = Good::new();
    for (from, to) in [("kvm_", "kvx_"), ("\"cpu_vendor\": \"", "\"cpu_vendor\": \"X")] {
        let dir = good.copy(&format!("host{}", to.len()));
        let text = fs::read_to_string(dir.join("manifest.json")).unwrap().replacen(from, to, 1);
        let mut manifest: pvmm::snapshot::Manifest = serde_json::from_str(&text).unwrap();
        manifest.checksum = 0;
        fs::write(dir.join("manifest.json"), manifest.encode().unwrap()).unwrap();
        let (kind, text) = refused(&dir);
        assert_eq!(kind, ErrorKind::SnapshotIncompatible, "{text}");
    }
}

#[test]
fn h13_state_of_more_than_10_mib_is_refused() {
    let good = Good::new();
    let dir = good.copy("big");
    writable(&dir, "state.bin").set_len((10 << 20) + 1).unwrap();
    assert!(refused(&dir).1.contains("more than"), "{}", refused(&dir).1);
}

/// The guest has written 7 to 0x200000 and halts; its template keeps that byte.
#[test]
fn h11_held_template_goes_on_whatever_becomes_of_its_file() {
    let good = Good::new();
    let held = LoadOptions { hold: true, ..Default::default() };
    let template = Template::load(&Kvm::open().unwrap(), &good.dir, held).unwrap();
    writable(&good.dir, "memory.bin").set_len(0).unwrap();
    let again = good.place.path().join("again");
    template.write(&again, WriteOptions::default()).unwrap();
    let byte = fs::read(again.join("memory.bin")).unwrap()[0x20_0000];
    assert_eq!(byte, 7, "the guest wrote it, and it is still there");
    let mut vm = template.fork(Default::default()).unwrap().without_refresh();
    vm.resume().unwrap();
}

const LARGE: &str = "PVMM_LARGE_SNAPSHOT";

/// H15: a VM with 4 GiB in a process that may have 2 GiB.
#[test]
fn h15_restore_into_too_small_a_limit_is_refused_up_front() {
    let place = TempDir::new().unwrap();
    let kernel = tiny::kernel(&[0xf4, 0xeb, 0xfd]);
    let mut config = pvmm::VmConfig::new(kernel.path());
    config.boot_protocol = pvmm::BootProtocol::Linux64;
    config.memory_mib = 4096;
    let dir = place.path().join("large");
    let mut vm = pvmm::Vm::boot(&Kvm::open().unwrap(), config).unwrap();
    vm.freeze().unwrap().write(&dir, WriteOptions::default()).unwrap();
    drop(vm);
    let program = std::env::current_exe().unwrap();
    let script =
        "ulimit -v 2097152; exec \"$0\" --exact snapshot::h15_victim --ignored --nocapture";
    let mut victim = std::process::Command::new("sh");
    let status = victim.args(["-c", script]).arg(program).env(LARGE, &dir).status().unwrap();
    assert!(status.success());
}

#[test]
#[ignore = "run by the test above, in a process with a limit"]
fn h15_victim() {
    let dir = std::env::var_os(LARGE).expect("a snapshot");
    let template = load(Path::new(&dir)).unwrap();
    let error = template.fork(Default::default()).err().expect("should be refused");
    assert_eq!(error.kind(), ErrorKind::HostResource, "{error:#}");
    assert!(format!("{error:#}").contains("memory"), "{error:#}");
}

#[test]
fn snapshot_that_cannot_be_finished_leaves_the_old_one_and_nothing_else() {
    let place = TempDir::new().unwrap();
    let dir = tiny_snapshot(place.path());
    let before = fs::read(dir.join("manifest.json")).unwrap();
    let template = load(&dir).unwrap();
    let error = template.write(&dir, WriteOptions::default()).unwrap_err();
    assert!(format!("{error:#}").contains("exists already"), "{error:#}");
    // The next writer removes what a killed writer has left, but not the files of a live writer.
    let stale = place.path().join(".pvmm-unfinished-0");
    fs::create_dir(&stale).unwrap();
    fs::File::create(stale.join("memory.bin")).unwrap().write_all(b"half").unwrap();
    template.write(&dir, WriteOptions { replace: true, ..Default::default() }).unwrap();
    assert_ne!(fs::read(dir.join("manifest.json")).unwrap(), before);
    let left: Vec<_> =
        fs::read_dir(place.path()).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, ["tiny"]);
    // L5: a full disk.
    let full = TempDir::new().unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=16k", "none"])
        .arg(full.path())
        .status()
        .unwrap();
    assert!(mounted.success());
    let error = template.write(&full.path().join("s"), WriteOptions::default()).unwrap_err();
    assert!(format!("{error:#}").contains("cannot write"), "{error:#}");
    assert_eq!(fs::read_dir(full.path()).unwrap().count(), 0);
    assert!(std::process::Command::new("umount").arg(full.path()).status().unwrap().success());
}
