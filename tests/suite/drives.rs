//! Disks of real guests: what is written stays written, whatever happens to the VM.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use pvmm::config::BucketConfig;
use pvmm::snapshot::WriteOptions;
use pvmm::{CacheMode, Drive, DriveSource, EngineKind, RateLimiterConfig};
use pvmm_tests::child::{Child, SOON, prints};
use pvmm_tests::cli::User;
use pvmm_tests::file_system::{FileSystem, LoopDevice};
use pvmm_tests::guest::Guest;
use tempfile::NamedTempFile;

const MIB: u64 = 1 << 20;

fn image(mib: u64) -> NamedTempFile {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(mib * MIB).unwrap();
    image
}

fn drive(image: &NamedTempFile, engine: EngineKind) -> Drive {
    let mut drive = Drive::writable(image.path());
    drive.engine = engine;
    drive
}

/// Three disks in addition to the root, each with another engine or cache mode. What the guest has
/// written is what the guest reads after its caches are dropped, and what the host finds in the
/// file.
#[test]
fn drives_of_every_engine_keep_a_pattern() {
    let (plain, uring, unsafe_cache) = (image(8), image(8), image(8));
    let guest = Guest::boot_with(|config| {
        config.drives.push(drive(&plain, EngineKind::Plain));
        config.drives.push(drive(&uring, EngineKind::IoUring));
        let mut fast = drive(&unsafe_cache, EngineKind::Auto);
        (fast.cache, fast.id) = (CacheMode::Unsafe, "scratch".to_owned());
        config.drives.push(fast);
    });
    assert_eq!(guest.prints("cat /sys/block/vdd/serial"), "scratch");
    guest.prints("seq 1 2000000 | head -c 4194304 > /tmp/pattern");
    for disk in ["vdb", "vdc", "vdd"] {
        guest.prints(&format!(
            "dd if=/tmp/pattern of=/dev/{disk} bs=64k seek=16 conv=fsync 2>/dev/null; \
             echo 3 > /proc/sys/vm/drop_caches; \
             dd if=/dev/{disk} bs=64k skip=16 count=64 2>/dev/null | cmp - /tmp/pattern"
        ));
    }
    // Discarded blocks are returned to the host and read as zeros. Python calls BLKDISCARD, because
    // the base template has no program for it.
    guest.prints(
        "python3 -c \"import fcntl, struct; \
         fcntl.ioctl(open('/dev/vdc', 'r+b'), 0x1277, struct.pack('QQ', 1 << 20, 1 << 20))\"",
    );
    let wanted: Vec<u8> = (1..).flat_map(|n| format!("{n}\n").into_bytes()).take(4 << 20).collect();
    let found = |image: &NamedTempFile| fs::read(image.path()).unwrap();
    assert!(found(&plain)[MIB as usize..][..wanted.len()] == wanted);
    assert!(found(&unsafe_cache)[MIB as usize..][..wanted.len()] == wanted);
    let discarded = found(&uring);
    assert!(discarded[MIB as usize..2 * MIB as usize].iter().all(|byte| *byte == 0));
    assert!(discarded[2 * MIB as usize..][..wanted.len() - MIB as usize] == wanted[MIB as usize..]);
}

#[test]
fn drive_is_resized_replaced_and_limited_while_the_guest_runs() {
    let (first, second) = (image(8), image(32));
    fs::write(second.path(), "second image").unwrap();
    second.as_file().set_len(32 * MIB).unwrap();
    let mut guest = Guest::boot_with(|config| config.drives.push(drive(&first, EngineKind::Auto)));
    let size = |guest: &Guest| guest.prints("sleep 0.3; cat /sys/block/vdb/size");
    assert_eq!(size(&guest), (8 * MIB / 512).to_string());
    first.as_file().set_len(16 * MIB).unwrap();
    guest.vm.resize_drive(1).unwrap();
    assert_eq!(size(&guest), (16 * MIB / 512).to_string());
    guest.prints("echo end | dd of=/dev/vdb bs=512 seek=32767 conv=fsync 2>/dev/null");
    assert_eq!(fs::read(first.path()).unwrap()[32767 * 512..][..4], *b"end\n");

    guest.vm.replace_drive(1, DriveSource::Path(second.path().into())).unwrap();
    assert_eq!(size(&guest), (32 * MIB / 512).to_string());
    guest.prints("echo 3 > /proc/sys/vm/drop_caches");
    assert_eq!(guest.prints("head -c 12 /dev/vdb"), "second image");
    assert!(guest.vm.replace_drive(9, DriveSource::Path(second.path().into())).is_err());

    let ops = Some(BucketConfig { size: 10, one_time_burst: 0, refill_time_ms: 1000 });
    guest.vm.limit_drive(1, RateLimiterConfig { bytes: None, ops }).unwrap();
    let start = Instant::now();
    guest.prints("dd if=/dev/vdb of=/dev/null bs=4k count=30 iflag=direct 2>/dev/null");
    assert!(start.elapsed() > Duration::from_millis(1900), "{:?}", start.elapsed());
}

#[test]
fn filesystem_on_a_drive_survives_kill_of_the_vmm() {
    let user = User::new();
    let image = image(64);
    let made =
        Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(image.path()).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let drive = image.path().display().to_string();
    let vm = user.detached(&["--name", "killed", "--drive", &drive]);
    let write = "mount /dev/vdc /mnt && echo kept > /mnt/kept && sync && \
                 (while :; do date > /mnt/$RANDOM; done > /dev/null 2>&1 &) ; sleep 1";
    let said = user.pvmm(["exec", "killed", "--", "bash", "-c", write]);
    assert_eq!(said.code, Some(0), "{said:?}");
    // The drive is in use: no other VM can open it, not even read-only.
    for words in [drive.clone(), format!("{drive},ro")] {
        let said = user.pvmm(["run", "--drive", &words, "--", "true"]);
        assert_eq!(said.code, Some(2), "{said:?}");
        assert!(said.stderr.contains("in use"), "{said:?}");
    }
    let said = user.pvmm(["kill", "--signal", "KILL", &vm]);
    assert_eq!(said.code, Some(0), "{said:?}");
    // The first check replays the journal; the second must find nothing to repair.
    let replay = Command::new("e2fsck").arg("-fp").arg(image.path()).output().unwrap();
    assert!(replay.status.code().is_some_and(|code| code <= 1), "{replay:?}");
    let check = Command::new("e2fsck").arg("-fn").arg(image.path()).output().unwrap();
    assert_eq!(check.status.code(), Some(0), "{check:?}");
    let kept =
        Command::new("debugfs").args(["-R", "cat /kept"]).arg(image.path()).output().unwrap();
    assert_eq!(kept.stdout, b"kept\n", "{kept:?}");
}

/// Fills a file with bytes that are not zero.
fn fill(path: &Path, mib: u64) {
    let file = fs::File::create(path).unwrap();
    (0..mib).for_each(|at| file.write_all_at(&[at as u8 | 1; MIB as usize], at * MIB).unwrap());
}

/// A program that writes a counter to the first block of the disk and then to its last block, in a
/// loop.
const COUNT: &str = "python3 -c \"
import os, mmap
disk = os.open('/dev/vdb', os.O_RDWR | os.O_DIRECT)
block = mmap.mmap(-1, 4096)
for n in range(1, 1 << 60):
    block[:8] = n.to_bytes(8, 'little')
    for at in (0, (256 << 20) - 4096): os.pwritev(disk, [block], at)
\" </dev/null >/dev/null 2>&1 &";

/// The guest writes a drive in place, on a file system that cannot share blocks. The copy of the
/// drive is of one instant, and the guest is paused for less than half of the time it takes.
#[test]
fn writable_drive_without_reflink_is_copied_while_the_guest_runs() {
    let host = FileSystem::ext4(600);
    let (image, place) = (host.path().join("image"), tempfile::tempdir().unwrap());
    fill(&image, 256);
    let mut guest = Guest::boot_with(|config| {
        config.drives.push(Drive::writable(&image));
        config.host.scratch_dir = Some(host.path());
    });
    guest.prints(COUNT);
    guest.prints("sleep 1");
    let begun = Instant::now();
    let template = guest.vm.freeze().unwrap();
    let (pause, all) = (template.pause(), begun.elapsed());
    println!("paused for {pause:?} of {all:?}");
    assert!(pause < all / 2, "paused for {pause:?} of {all:?}");
    guest.agent_again();
    drop(guest);
    template.write(&place.path().join("snap"), WriteOptions::default()).unwrap();
    let copy = fs::File::open(place.path().join("snap/disk-1.img")).unwrap();
    let number = |at: u64| {
        let mut bytes = [0; 8];
        copy.read_exact_at(&mut bytes, at).unwrap();
        u64::from_le_bytes(bytes)
    };
    let (first, last) = (number(0), number(256 * MIB - 4096));
    assert!(first > 0 && (first == last || first == last + 1), "{first} {last}");
    let mut middle = vec![0; MIB as usize];
    copy.read_exact_at(&mut middle, 100 * MIB).unwrap();
    assert!(middle.iter().all(|byte| *byte == 101));
}

/// The guest writes a drive in place, on a file system whose files can share blocks. Nothing is
/// copied, and later writes of the guest do not reach the template.
#[test]
fn writable_drive_with_reflink_shares_its_blocks_with_the_copy() {
    let host = FileSystem::xfs(600);
    let image = host.path().join("image");
    fill(&image, 128);
    let mut guest = Guest::boot_with(|config| config.drives.push(Drive::writable(&image)));
    let write = |word: &str| {
        format!("echo {word} | dd of=/dev/vdb bs=4096 conv=sync,fsync oflag=direct 2>/dev/null")
    };
    let read = "dd if=/dev/vdb bs=4096 count=1 iflag=direct 2>/dev/null | head -n1";
    guest.prints(&write("before"));
    let before = host.used_mib();
    let template = guest.vm.freeze().unwrap();
    let agent = guest.agent_again();
    prints(&agent, &write("after"));
    let taken = host.used_mib().saturating_sub(before);
    assert!(taken < 32, "a copy that shares its blocks takes {taken} MiB");
    let child = Child::of(&template);
    assert_eq!(child.prints(read), "before");
    assert_eq!(prints(&agent, read), "after");
    drop((guest, child));
    assert_eq!(fs::read(&image).unwrap()[..6], *b"after\n");
}

/// The workload runs again before the freeze is finished, however long the copying takes.
#[test]
fn freeze_that_has_begun_lets_the_workload_go_on_before_the_copy_is_finished() {
    let mut guest = Guest::boot_with(|config| config.memory_mib = 512);
    // This is more than a freeze copies during the pause.
    guest.prints("head -c 200M /dev/urandom > /dev/shm/much");
    guest.prints("(while :; do date +%s%N > /tmp/now; done) </dev/null >/dev/null 2>&1 &");
    let control =
        pvmm::agent::Agent::connect_control(&guest.socket(), Instant::now() + SOON).unwrap();
    control.freeze(Instant::now() + SOON).unwrap();
    let begun = guest.vm.begin_freeze().unwrap();
    control.thaw(Instant::now() + SOON).unwrap();
    let agent = guest.agent_again();
    let first = prints(&agent, "cat /tmp/now");
    prints(&agent, &format!("while [ $(cat /tmp/now) = {first} ]; do sleep 0.1; done"));
    let template = begun.finish().unwrap();
    let child = Child::of(&template);
    assert_eq!(child.prints("stat -c %s /dev/shm/much"), (200 * MIB).to_string());
}

/// A block device that the guest writes in place is copied in the way a file is.
#[test]
fn writable_block_device_is_copied_for_a_fork() {
    let image = image(32);
    let device = LoopDevice::of(image.path());
    let mut guest = Guest::boot_with(|config| config.drives.push(Drive::writable(&device.path)));
    let write = |word: &str| {
        format!(
            "echo {word} | dd of=/dev/vdb bs=4096 seek=9 conv=sync,fsync oflag=direct 2>/dev/null"
        )
    };
    let read = "dd if=/dev/vdb bs=4096 skip=9 count=1 iflag=direct 2>/dev/null | head -n1";
    guest.prints(&write("before"));
    let template = guest.vm.freeze().unwrap();
    let agent = guest.agent_again();
    prints(&agent, &write("after"));
    let child = Child::of(&template);
    assert_eq!(child.prints(read), "before");
    assert_eq!(prints(&agent, read), "after");
}

/// The disk of a new VM, on a file system whose files can share blocks, has no blocks of its own at
/// first.
#[test]
fn disk_of_a_vm_with_reflink_shares_its_blocks_with_the_pristine_one() {
    let host = FileSystem::xfs(600);
    let cache = pvmm_images::Cache::at(&host.path().join("cache")).unwrap();
    let disk = pvmm_images::overlay::create_upper(&cache, &host.path(), 256 * MIB).unwrap();
    let open = format!("/proc/{}/fd/{}", std::process::id(), disk.as_raw_fd());
    let said = Command::new("filefrag").args(["-v", &open]).output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout);
    let extents: Vec<_> = text.lines().filter(|line| line.contains("..")).collect();
    assert!(!extents.is_empty() && said.status.success(), "{said:?}");
    assert!(extents.iter().all(|line| line.contains("shared")), "{text}");
}
