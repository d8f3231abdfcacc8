//! Disks under real guests: what is written is there, whatever happens to the machine.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use pvmm::config::BucketConfig;
use pvmm::{CacheMode, Drive, DriveSource, EngineKind, RateLimiterConfig};
use pvmm_tests::cli::User;
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

/// Three disks beside the root, each another way to the host: what a guest wrote is what it reads after
/// its caches are dropped, and what the host finds in the file.
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
    // Discarded blocks are given back to the host and read as zero.
    // BLKDISCARD, which the base template has no program for.
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
    // In use: neither for writing nor for reading.
    for words in [drive.clone(), format!("{drive},ro")] {
        let said = user.pvmm(["run", "--drive", &words, "--", "true"]);
        assert_eq!(said.code, Some(2), "{said:?}");
        assert!(said.stderr.contains("in use"), "{said:?}");
    }
    let said = user.pvmm(["kill", "--signal", "KILL", &vm]);
    assert_eq!(said.code, Some(0), "{said:?}");
    // Replays the journal, then must find nothing to repair.
    let replay = Command::new("e2fsck").arg("-fp").arg(image.path()).output().unwrap();
    assert!(replay.status.code().is_some_and(|code| code <= 1), "{replay:?}");
    let check = Command::new("e2fsck").arg("-fn").arg(image.path()).output().unwrap();
    assert_eq!(check.status.code(), Some(0), "{check:?}");
    let kept =
        Command::new("debugfs").args(["-R", "cat /kept"]).arg(image.path()).output().unwrap();
    assert_eq!(kept.stdout, b"kept\n", "{kept:?}");
}
