//! Boots of real Linux guests: kernels, sizes and ends.

use pvmm::{BootProtocol, Initrd, Outcome};
use pvmm_agent_image::AGENT;
use pvmm_images::initramfs::appendix;
use pvmm_images::kernel::Format;
use pvmm_images::{Kernel, Silent};
use pvmm_tests::guest::{self, Guest};

#[test]
fn boot_by_pvh_answers() {
    let guest = Guest::boot_with(|config| config.boot_protocol = BootProtocol::Pvh);
    assert_eq!(guest.prints("echo $((6*7))"), "42");
}

#[test]
fn boot_by_the_64_bit_protocol_answers() {
    let guest = Guest::boot_with(|config| config.boot_protocol = BootProtocol::Linux64);
    assert_eq!(guest.prints("echo $((6*7))"), "42");
}

#[test]
fn boot_of_two_vcpus_has_both_in_one_package() {
    let guest = Guest::boot_with(|config| config.vcpus = 2);
    assert_eq!(guest.prints("nproc"), "2");
    let topology = "cat /sys/devices/system/cpu/cpu*/topology/core_id | sort -u | wc -l; \
                    cat /sys/devices/system/cpu/cpu*/topology/physical_package_id | sort -u | wc -l";
    assert_eq!(guest.prints(topology), "2\n1");
}

#[test]
fn boot_of_eight_vcpus_has_them_all_at_work() {
    let guest = Guest::boot_with(|config| config.vcpus = 8);
    assert_eq!(guest.prints("nproc"), "8");
    // Each vCPU is used: a command that is pinned to it prints its number.
    let pinned = "for cpu in 0 1 2 3 4 5 6 7; do \
                  taskset -c $cpu sh -c 'set -- $(cat /proc/self/stat); echo ${39}'; done";
    assert_eq!(guest.prints(pinned), "0\n1\n2\n3\n4\n5\n6\n7");
}

#[test]
#[ignore = "make soak"]
fn soak_boot_of_32_vcpus_has_them_all_at_work() {
    let begun = std::time::Instant::now();
    let guest = Guest::boot_with(|config| {
        config.vcpus = 32;
        config.memory_mib = 512;
    });
    println!("boot: 32 vCPUs answer after {:?}", begun.elapsed());
    assert_eq!(guest.prints("nproc"), "32");
    let pinned = "for cpu in $(seq 0 31); do \
                  taskset -c $cpu sh -c 'set -- $(cat /proc/self/stat); echo ${39}'; done";
    let expected: Vec<String> = (0..32).map(|cpu| cpu.to_string()).collect();
    assert_eq!(guest.prints(pinned), expected.join("\n"));
}

#[test]
fn booted_guests_have_machine_ids_of_their_own() {
    let id = || Guest::boot().prints("cat /etc/machine-id");
    let (one, other) = (id(), id());
    assert!(one.len() == 32 && one.bytes().all(|b| b.is_ascii_hexdigit()), "{one}");
    assert_ne!(one, other);
}

#[test]
fn boot_with_memory_above_the_hole_has_all_of_it() {
    let guest = Guest::boot_with(|config| config.memory_mib = 4096);
    let mib: u64 = guest.prints("free -m | awk '/Mem:/{print $2}'").parse().unwrap();
    assert!((3800..=4096).contains(&mib), "{mib} MiB");
}

#[test]
fn boot_of_stock_debian_kernel_answers() {
    let kernel = Kernel::debian(&guest::cache(), &mut Silent).unwrap();
    let guest = Guest::boot_kernel(&kernel, |_| {});
    assert!(guest.prints("uname -r").ends_with("-cloud-amd64"));
    assert_eq!(guest.prints("python3 -c 'print(6*7)'"), "42");
}

/// Only the command line and the MP table describe the VM.
#[test]
fn boot_without_acpi_finds_its_devices_by_virtio_mmio_words() {
    let guest = Guest::boot_with(|config| config.cmdline += " acpi=off");
    assert_eq!(guest.prints("test -e /sys/firmware/acpi || echo none; nproc"), "none\n2");
    let bound = guest.prints("cd /sys/bus/platform/drivers/virtio-mmio && ls -d virtio-mmio.*");
    assert!(bound.lines().count() >= 3, "{bound}");
    // The disk and the vsock interrupt through the I/O APIC.
    assert_ne!(guest.prints("grep -c 'IO-APIC.*virtio' /proc/interrupts"), "0");
    assert_eq!(guest.prints("python3 -c 'print(6*7)'"), "42");
}

/// Where a device is announced in ACPI and on the command line, ACPI's counts, and no device is
/// bound twice.
#[test]
fn boot_with_acpi_and_words_binds_each_device_once() {
    let guest = Guest::boot();
    let bound = "cd /sys/bus/platform/drivers/virtio-mmio && ls -d";
    assert!(guest.prints(&format!("{bound} LNRO0005:*")).lines().count() >= 3);
    assert_eq!(guest.prints(&format!("{bound} virtio-mmio.* 2>/dev/null || echo none")), "none");
}

/// A boot script for Debian's initrd. Debian's scripts run first and load the drivers with udev;
/// the script starts the agent at the point where they would mount the root.
const HAND_OVER: &str = "mountroot() {
    mkdir -p /dev/pvmm; cat /proc/modules > /dev/pvmm/modules
    udevadm control --exit
    exec /pvmm-agent
}
";

#[test]
fn boot_of_debians_bzimage_with_debians_initrd_answers() {
    let stock = guest::cache().path("stock", "current");
    let mut initrd = std::fs::read(stock.join("initrd")).unwrap();
    initrd.resize(initrd.len().next_multiple_of(4), 0);
    initrd.extend(appendix(&[
        ("pvmm-agent", 0o755, AGENT),
        ("scripts/pvmm", 0o644, HAND_OVER.as_bytes()),
    ]));
    let kernel = Kernel::from_path(&stock.join("vmlinuz")).unwrap();
    assert_eq!(kernel.format, Format::BzImage);
    let guest = Guest::boot_kernel(&kernel, |config| {
        config.memory_mib = 512;
        config.initrd = Some(Initrd::Bytes(initrd));
        config.cmdline += " boot=pvmm";
    });
    assert_eq!(guest.prints("uname -r"), kernel.release);
    assert_eq!(guest.prints("nproc; python3 -c 'print(6*7)'"), "2\n42");
    // udev loaded the driver of the disk.
    assert_ne!(guest.prints("grep -c virtio_blk /dev/pvmm/modules"), "0");
}

#[test]
fn clock_and_timer_of_the_guest_are_right() {
    let guest = Guest::boot();
    let source = "cat /sys/devices/system/clocksource/clocksource0/current_clocksource";
    assert!(["kvm-clock", "tsc"].contains(&guest.prints(source).as_str()));
    let host = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let there: u64 = guest.prints("date +%s").parse().unwrap();
    assert!(there.abs_diff(host.as_secs()) <= 5, "guest {there}, host {}", host.as_secs());
    let slept = guest.prints("a=$(date +%s%N); sleep 1; echo $(( ($(date +%s%N) - a) / 1000000 ))");
    assert!((1000..3000).contains(&slept.parse::<u32>().unwrap()), "slept {slept} ms");
}

#[test]
fn idle_guest_has_no_tick_and_sleeps_finer_than_one() {
    let guest = Guest::boot();
    let ticks = "awk '/LOC:/ { print $2 }' /proc/interrupts";
    let line = format!("before=$({ticks}); sleep 5; echo $(($({ticks}) - before))");
    let ticks: u32 = guest.prints(&line).parse().unwrap();
    assert!(ticks < 200, "{ticks} timer interrupts in five idle seconds");
    let timers = guest.prints("grep -m1 hres_active /proc/timer_list");
    assert!(timers.ends_with(": 1"), "{timers}");
}

#[test]
fn guest_has_no_virtualization_and_reads_avx_state_back() {
    let guest = Guest::boot();
    assert_eq!(guest.shell("grep -cwE 'vmx|svm' /proc/cpuinfo").stdout.bytes, b"0\n");
    assert_eq!(guest.shell("dmesg | grep -c 'XSAVE consistency'").stdout.bytes, b"0\n");
    let avx = |info: String| info.split_whitespace().any(|flag| flag == "avx");
    let here = avx(std::fs::read_to_string("/proc/cpuinfo").unwrap());
    assert_eq!(avx(guest.prints("cat /proc/cpuinfo")), here);
    // Without AVX on this host, only the lower half of the registers is tested.
    let bytes = if here { 32 } else { 16 };
    let code = format!("python3 -c '{VECTORS}' {bytes}");
    assert_eq!(guest.prints(&code), "kept 4");
}

/// A program of four processes on one vCPU. Each loads a vector register with random bytes, yields
/// the processor a thousand times, and stores the register.
const VECTORS: &str = r#"
import ctypes, mmap, os, sys
size = int(sys.argv[1])
load, store = ("c5fe6f07", "c5fe7f06") if size == 32 else ("f30f6f07", "f30f7f06")
# mov r8d, 1000; 1: mov eax, 24 (sched_yield); syscall; dec r8d; jne 1b; store; ret
code = bytes.fromhex(load + "41b8e8030000" + "b818000000" + "0f05" + "41ffc8" + "75f4" + store + "c3")
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
entry = ctypes.addressof(ctypes.c_char.from_buffer(page))
run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(entry)
children = []
for child in range(4):
    pid = os.fork()
    if pid == 0:
        given = ctypes.create_string_buffer(os.urandom(size), size)
        kept = ctypes.create_string_buffer(size)
        run(given, kept)
        os._exit(0 if given.raw == kept.raw else 1)
    children.append(pid)
print("kept", sum(os.waitpid(pid, 0)[1] == 0 for pid in children))
"#;

#[test]
fn shutdown_by_the_agent_is_poweroff() {
    let guest = Guest::boot();
    guest.agent.shutdown(pvmm::agent::ShutdownHow::Poweroff, None).unwrap();
    assert_eq!(guest.ends(), Outcome::Poweroff);
}

#[test]
fn reboot_by_the_agent_is_reboot() {
    let guest = Guest::boot();
    guest.agent.shutdown(pvmm::agent::ShutdownHow::Reboot, None).unwrap();
    assert_eq!(guest.ends(), Outcome::Reboot);
}

#[test]
fn kernel_panic_is_reboot() {
    let guest = Guest::boot();
    // The VM may end before the exit of the shell is reported.
    let _ = guest.agent.exec(&pvmm::exec::ExecRequest::shell("echo c > /proc/sysrq-trigger"));
    assert_eq!(guest.ends(), Outcome::Reboot);
}

#[test]
fn disk_written_by_the_guest_leaves_the_image_alone() {
    let image = guest::base().rootfs;
    let before = guest::digest(&image);
    let guest = Guest::boot();
    guest.prints("echo changed > /etc/os-release; rm -rf /usr/share/python3; sync");
    assert_eq!(guest.prints("cat /etc/os-release"), "changed");
    // A write to the disk itself fails too, even of the bytes that it already has.
    let write = "dd if=/dev/vda of=/dev/vda bs=4k count=1 conv=notrunc,fsync 2>/dev/null; echo $?";
    assert_eq!(guest.prints(write), "1");
    drop(guest);
    assert_eq!(guest::digest(&image), before);
}

#[test]
fn entropy_device_gives_bytes() {
    let guest = Guest::boot();
    let current = "cat /sys/class/misc/hw_random/rng_current";
    assert!(guest.prints(current).starts_with("virtio_rng"));
    assert_eq!(guest.prints("head -c 4096 /dev/hwrng | wc -c"), "4096");
}
