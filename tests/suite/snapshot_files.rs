//! Snapshots as two files: saved, restored in another process, merged, and refused if they do not
//! match.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use pvmm::{
    Balloon, Drive, DriveSource, ErrorKind, Kvm, Net, RateLimiterConfig, SaveKind, TapSource,
    Template,
};
use pvmm_tests::child::{Child, SOON};
use pvmm_tests::guest::Guest;
use pvmm_tests::network;
use pvmm_tests::page_server::PageServer;
use tempfile::TempDir;

const PLACE: &str = "PVMM_FILES_PLACE";

/// The two files of a snapshot, with the names that clients of Firecracker give them.
struct Files {
    dir: TempDir,
}

impl Files {
    fn new() -> Self {
        Self { dir: TempDir::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn state(&self) -> PathBuf {
        self.path("vm.state")
    }

    fn memory(&self) -> PathBuf {
        self.path("vm.mem")
    }

    fn load(&self) -> Template {
        Template::load_files(&Kvm::open().unwrap(), &self.state(), Some(&self.memory())).unwrap()
    }

    fn refused(&self, memory: &Path) -> String {
        let loaded = Template::load_files(&Kvm::open().unwrap(), &self.state(), Some(memory));
        format!("{:#}", loaded.err().expect("refused"))
    }

    /// Makes a disk that a guest writes in place.
    fn disk(&self) -> PathBuf {
        let path = self.path("disk.img");
        File::create(&path).unwrap().set_len(16 << 20).unwrap();
        path
    }
}

fn put(word: &str) -> String {
    format!("echo {word} | dd of=/dev/vdb bs=4096 seek=9 conv=sync,fsync 2>/dev/null")
}

const GET: &str = "dd if=/dev/vdb bs=4096 skip=9 count=1 iflag=direct 2>/dev/null | head -1";

#[test]
fn pair_of_files_goes_on_in_another_process_and_then_in_a_third() {
    let files = Files::new();
    let disk = files.disk();
    let mut guest = Guest::boot_with(|config| config.drives.push(Drive::writable(&disk)));
    guest.prints(&format!("{}; echo first > /tmp/word", put("first")));
    let save = |guest: &mut Guest| {
        guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Full, b"a note")
    };
    let running = save(&mut guest).unwrap_err();
    assert!(format!("{running:#}").contains("pause it first"), "{running:#}");
    guest.vm.pause().unwrap();
    let begun = Instant::now();
    save(&mut guest).unwrap();
    let memory = fs::metadata(files.memory()).unwrap();
    let (took, mib) = (begun.elapsed(), memory.blocks() >> 11);
    println!("two files of a guest with 256 MiB: {mib} MiB in {took:?}");
    assert_eq!(memory.len(), 256 << 20);
    assert!(memory.blocks() * 512 < 200 << 20, "holes are not written");
    drop(guest);

    let again = Command::new(std::env::current_exe().unwrap())
        .args(["snapshot_files::second_life", "--exact", "--ignored", "--nocapture"])
        .env(PLACE, files.dir.path())
        .status();
    assert!(again.unwrap().success());

    let template = files.load();
    assert_eq!(template.note(), b"another note");
    let mut child = Child::of(&template);
    assert_eq!(child.prints(&format!("cat /tmp/word; {GET}")), "second\nsecond");
    // The disk is written in place: the file has the word after the VM has ended.
    child.prints(&put("third"));
    // If a drive is replaced by its own image, only its size is read again.
    fs::OpenOptions::new().write(true).open(&disk).unwrap().set_len(24 << 20).unwrap();
    child.vm.replace_drive(1, DriveSource::Path(disk.clone())).unwrap();
    let grown = "for i in $(seq 100); do [ $(cat /sys/block/vdb/size) = 49152 ] && exit 0; \
                 sleep 0.1; done; exit 1";
    child.prints(grown);
    drop(child);
    assert!(fs::read(&disk).unwrap()[9 * 4096..].starts_with(b"third"));
    let left: Vec<_> = fs::read_dir(files.dir.path()).unwrap().collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
#[ignore = "run by the test above, as a process of its own"]
fn second_life() {
    let Some(place) = std::env::var_os(PLACE).map(PathBuf::from) else { return };
    let (state, memory) = (place.join("vm.state"), place.join("vm.mem"));
    let template = Template::load_files(&Kvm::open().unwrap(), &state, Some(&memory)).unwrap();
    assert_eq!(template.note(), b"a note");
    let mut child = Child::with(&template, |o| o.host.vcpu_thread_prefix = "fc_vcpu ".into());
    assert_eq!(child.prints(&format!("cat /tmp/word; {GET}")), "first\nfirst");
    child.prints(&format!("{}; echo second > /tmp/word", put("second")));
    let names = fs::read_dir("/proc/self/task")
        .unwrap()
        .map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
    assert!(names.into_iter().any(|name| name == "fc_vcpu 0\n"));
    child.vm.pause().unwrap();
    child.vm.save_files(&state, &memory, SaveKind::Full, b"another note").unwrap();
    // The VM can run on, although its memory file has been replaced.
    child.vm.resume().unwrap();
    let agent = child.vm.agent(Instant::now() + SOON).unwrap();
    assert_eq!(pvmm_tests::child::prints(&agent, "cat /tmp/word"), "second");
}

#[test]
fn diff_holds_what_changed_and_goes_on_once_it_is_merged() {
    let files = Files::new();
    let diff = files.path("diff.mem");
    let mut guest = Guest::boot_with(|config| config.host.track_changes = true);
    guest.vm.pause().unwrap();
    guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Full, b"").unwrap();
    let first_state = fs::read(files.state()).unwrap();
    guest.vm.resume().unwrap();
    let agent = guest.agent_again();
    let random = "head -c 4194304 /dev/urandom > /tmp/r; md5sum < /tmp/r";
    let sum = pvmm_tests::child::prints(&agent, random);
    guest.vm.pause().unwrap();
    guest.vm.save_files(&files.state(), &diff, SaveKind::Diff, b"").unwrap();
    let room = |path: &Path| fs::metadata(path).unwrap().blocks() >> 11;
    println!("full {} MiB, diff {} MiB", room(&files.memory()), room(&diff));
    assert!((4..room(&files.memory()) / 2).contains(&room(&diff)), "{} MiB", room(&diff));
    assert_eq!(fs::metadata(&diff).unwrap().len(), 256 << 20);

    // The state file fits neither of the two memory files.
    for memory in [files.memory(), diff.clone()] {
        let error = files.refused(&memory);
        assert!(error.contains("is not the memory"), "{error}");
    }
    // The files are merged by their owner, as rebasing tools do.
    merge(&diff, &files.memory());
    let child = Child::of(&files.load());
    assert_eq!(child.prints("md5sum < /tmp/r"), sum);
    drop(child);

    // A diff over an existing memory file is merged by pvmm.
    guest.vm.resume().unwrap();
    let agent = guest.agent_again();
    pvmm_tests::child::prints(&agent, "echo merged > /tmp/word");
    guest.vm.pause().unwrap();
    guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Diff, b"").unwrap();
    drop(guest);
    let child = Child::of(&files.load());
    assert_eq!(child.prints("md5sum < /tmp/r; cat /tmp/word"), format!("{sum}\nmerged"));
    drop(child);
    fs::write(files.state(), first_state).unwrap();
    assert!(files.refused(&files.memory()).contains("is not the memory"));
}

/// Copies the data of a file over another file, without its holes.
fn merge(from: &Path, onto: &Path) {
    let dd = Command::new("python3").arg("-c").arg(MERGE).arg(from).arg(onto).status();
    assert!(dd.unwrap().success());
}

const MERGE: &str = "
import os, sys
a, b = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_WRONLY)
at = 0
while True:
    try: at = os.lseek(a, at, os.SEEK_DATA)
    except OSError: break
    end = os.lseek(a, at, os.SEEK_HOLE)
    while at < end:
        at += os.pwrite(b, os.pread(a, min(end - at, 1 << 20), at), at)
";

#[test]
fn drive_of_a_loaded_machine_is_opened_when_it_runs_and_may_be_a_block_device() {
    let files = Files::new();
    let disk = files.disk();
    let mut guest = Guest::boot_with(|config| config.drives.push(Drive::writable(&disk)));
    guest.prints(&put("baked"));
    guest.vm.pause().unwrap();
    guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Full, b"").unwrap();
    let copy = files.path("copy.img");
    fs::copy(&disk, &copy).unwrap();

    // The saved path of the drive may be missing or in use: it is opened only when the VM is
    // resumed.
    let loop_device = losetup(&["--find", "--show"], &copy);
    let memory_device = losetup(&["--find", "--show", "--read-only"], &files.memory());
    let template = Template::load_files(
        &Kvm::open().unwrap(),
        &files.state(),
        Some(Path::new(&memory_device)),
    )
    .unwrap();
    let socket = files.path("v");
    let own_socket = || pvmm::Overrides {
        vsock: Some(pvmm::Vsock::new(3, socket.clone())),
        ..Default::default()
    };
    let mut vm = template.fork(own_socket()).unwrap().without_refresh();
    let error = vm.resume().unwrap_err();
    assert!(format!("{error:#}").contains("in use"), "{error:#}");
    drop(guest);
    fs::remove_file(&disk).unwrap();
    let error = vm.resume().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    assert!(format!("{error:#}").contains("disk.img"), "{error:#}");
    vm.replace_drive(1, DriveSource::Path(loop_device.clone().into())).unwrap();
    vm.resume().unwrap();
    let agent = vm.agent(Instant::now() + SOON).unwrap();
    assert_eq!(pvmm_tests::child::prints(&agent, GET), "baked");
    pvmm_tests::child::prints(&agent, &put("on the device"));
    drop((agent, vm, template));
    assert!(fs::read(&copy).unwrap()[9 * 4096..].starts_with(b"on the device"));
    for device in [loop_device, memory_device] {
        Command::new("losetup").args(["--detach", &device]).status().unwrap();
    }
}

fn losetup(options: &[&str], file: &Path) -> String {
    let made = Command::new("losetup").args(options).arg(file).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).unwrap().trim().to_owned()
}

#[test]
fn machine_served_by_a_page_server_is_saved_whole() {
    let files = Files::new();
    let mut guest = Guest::boot();
    guest.prints("echo served > /tmp/word");
    guest.vm.pause().unwrap();
    guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Full, b"").unwrap();
    drop(guest);
    let template = Template::load_files(&Kvm::open().unwrap(), &files.state(), None).unwrap();
    let server = PageServer::start(&files.memory());
    let mut child = Child::with(&template, |o| o.page_server = Some(server.socket()));
    assert_eq!(child.prints("cat /tmp/word; echo more > /tmp/more"), "served");
    child.vm.pause().unwrap();
    let (state, memory) = (files.path("second.state"), files.path("second.mem"));
    child.vm.save_files(&state, &memory, SaveKind::Full, b"").unwrap();
    drop((child, server));
    let child =
        Child::of(&Template::load_files(&Kvm::open().unwrap(), &state, Some(&memory)).unwrap());
    assert_eq!(child.prints("cat /tmp/word /tmp/more"), "served\nmore");
}

const ADDRESSES: &str = " ip=10.9.0.2::10.9.0.1:255.255.255.0::eth0:off";

#[test]
fn network_card_and_balloon_go_on_after_a_restore_on_another_tap() {
    network::isolated(|| {
        let files = Files::new();
        // Both taps have one address, as taps for forks usually have, because the guest remembers
        // it.
        for tap in ["tap-old", "tap-new"] {
            network::host(&["tuntap", "add", tap, "mode", "tap", "vnet_hdr"]);
            network::host(&["link", "set", tap, "address", "02:00:00:00:00:01", "up"]);
        }
        let mut guest = Guest::boot_with(|config| {
            config.cmdline += ADDRESSES;
            config.nets.push(Net::new(TapSource::Name("tap-old".into())));
            config.balloon = Some(Balloon::default());
        });
        network::host(&["addr", "add", "10.9.0.1/24", "dev", "tap-old"]);
        let pings = "busybox ping -c 2 -W 20 10.9.0.1 | grep -c 'seq='";
        assert_eq!(guest.prints(pings), "2");
        guest.vm.set_balloon(32).unwrap();
        guest.vm.pause().unwrap();
        guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Full, b"").unwrap();
        drop(guest);
        network::host(&["link", "del", "tap-old"]);

        let template = files.load();
        let other = Net::new(TapSource::Name("tap-new".into()));
        let child = Child::with(&template, |o| o.nets.push((0, other)));
        network::host(&["addr", "add", "10.9.0.1/24", "dev", "tap-new"]);
        assert_eq!(child.prints(pings), "2");
        assert_eq!(stream(&child, 4), 4 << 20);

        // The limit is set while the VM runs. It is so low that even a busy host is faster without
        // it.
        let slow = RateLimiterConfig {
            bytes: Some(pvmm::config::BucketConfig::per_second(256 << 10)),
            ops: None,
        };
        child.vm.limit_net(0, None, Some(slow)).unwrap();
        let begun = Instant::now();
        stream(&child, 4);
        let limited = begun.elapsed();
        assert!(limited >= Duration::from_millis(12_500), "{limited:?}");
        child.vm.limit_net(0, None, Some(RateLimiterConfig::default())).unwrap();
        let begun = Instant::now();
        stream(&child, 4);
        assert!(begun.elapsed() < limited, "{:?}", begun.elapsed());
        assert!(child.vm.limit_net(1, None, None).is_err());

        // The balloon works after the restore.
        for target in [64, 0] {
            child.vm.set_balloon(target).unwrap();
            let deadline = Instant::now() + SOON;
            while child.vm.balloon_stats(SOON).unwrap().actual_bytes != target << 20 {
                assert!(Instant::now() < deadline, "the balloon follows to {target} MiB");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    });
}

/// Makes the guest send `mib` MiB. Returns the number of received bytes.
fn stream(child: &Child, mib: usize) -> usize {
    let listener = TcpListener::bind("10.9.0.1:5001").unwrap();
    let counted = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        stream.write_all(b".").unwrap();
        all.len()
    });
    child.prints(&format!(
        "python3 -c \"import socket; s = socket.create_connection(('10.9.0.1', 5001), 60); \
         s.sendall(bytes({mib} << 20)); s.shutdown(1); s.recv(1)\""
    ));
    counted.join().unwrap()
}

#[test]
fn clock_that_catches_up_counts_the_time_away() {
    let files = Files::new();
    let mut guest = Guest::boot();
    let uptime = "cut -d. -f1 /proc/uptime";
    let before: u64 = guest.prints(uptime).parse().unwrap();
    guest.vm.pause().unwrap();
    guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Full, b"").unwrap();
    drop(guest);
    std::thread::sleep(Duration::from_secs(20));
    let template = files.load();
    let up = |catch_up: bool| -> u64 {
        let child = Child::with(&template, |o| o.catch_up = catch_up);
        child.prints(uptime).parse().unwrap()
    };
    let (hidden, counted) = (up(false), up(true));
    println!("up {before} s, then {hidden} s, and {counted} s when it catches up");
    assert!(counted >= before + 20 && hidden < before + 20, "{before} {hidden} {counted}");
}

#[test]
fn files_that_cannot_be_written_leave_nothing_and_say_so() {
    let files = Files::new();
    let mut guest = Guest::boot_with(|config| {
        config.drives.push(Drive::from_file(tempfile::tempfile().unwrap()));
        let Some(Drive { source: DriveSource::File(file), .. }) = config.drives.last() else {
            return;
        };
        file.set_len(1 << 20).unwrap();
    });
    guest.vm.pause().unwrap();
    let own = guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Full, b"");
    let own = format!("{:#}", own.unwrap_err());
    assert!(own.contains("drive 1: is the machine's own"), "{own}");
    drop(guest);

    // A full disk, and a folder that does not exist.
    let small = files.path("small");
    fs::create_dir(&small).unwrap();
    let mount = |arguments: &[&str]| Command::new("mount").args(arguments).arg(&small).status();
    assert!(mount(&["-t", "tmpfs", "-o", "size=8m", "tmpfs"]).unwrap().success());
    let mut guest = Guest::boot();
    guest.vm.pause().unwrap();
    let full =
        guest.vm.save_files(&small.join("vm.state"), &small.join("vm.mem"), SaveKind::Full, b"");
    let full = full.unwrap_err();
    assert_eq!(full.kind(), ErrorKind::HostResource);
    assert!(format!("{full:#}").contains("vm.mem"), "{full:#}");
    assert!(format!("{full:#}").contains("No space left"), "{full:#}");
    assert_eq!(fs::read_dir(&small).unwrap().count(), 0);
    assert!(Command::new("umount").arg(&small).status().unwrap().success());
    let nowhere = files.path("none/vm.mem");
    assert!(guest.vm.save_files(&files.state(), &nowhere, SaveKind::Full, b"").is_err());
    let long = vec![0; pvmm::NOTE_MAX + 1];
    assert!(guest.vm.save_files(&files.state(), &files.memory(), SaveKind::Full, &long).is_err());
    assert!(!files.state().exists() && !files.memory().exists());
    // The guest still runs.
    guest.vm.resume().unwrap();
    let agent = guest.agent_again();
    assert_eq!(pvmm_tests::child::prints(&agent, "echo on"), "on");
}
