//! A guest kernel that attacks its devices from the first instruction, on a real processor.
//!
//! The monitor must survive and count the faults. Its devices must work for a driver that starts
//! over, and another VM must start afterwards.

use pvmm::{BootProtocol, Drive, Kvm, Outcome, Vm, VmConfig, Vsock};
use pvmm_tests::script::{self, Step, store};
use pvmm_tests::tiny;
use std::time::Duration;
use tempfile::{NamedTempFile, TempDir};

const WINDOWS: u64 = 0xd000_0000;
const WINDOW: u64 = 0x1000;
const DEVICES: u64 = 3;
const RNG: u64 = 2;
/// The guest memory for rings and buffers, far from the code.
const RINGS: u64 = 0x100_0000;

const QUEUE_SELECT: u64 = 0x30;
const QUEUE_SIZE: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const NOTIFY: u64 = 0x50;
const STATUS: u64 = 0x70;
const ADDRESSES: [(u64, u64); 3] = [(0x80, 0), (0x90, 0x1000), (0xa0, 0x2000)];

fn device(index: u64) -> u64 {
    WINDOWS + index * WINDOW
}

/// Returns the address of a queue: descriptors, available ring and used ring.
fn ring(index: u64, queue: u64) -> u64 {
    RINGS + (index * 4 + queue) * 0x4000
}

/// Adds the steps from reset to DRIVER_OK, as a driver does them.
fn start(steps: &mut Vec<Step>, index: u64) {
    let at = device(index);
    for status in [0, 1, 3] {
        steps.push(store(at + STATUS, status));
    }
    // Only VERSION_1 is accepted.
    for (page, features) in [(0, 0), (1, 1)] {
        steps.push(store(at + 0x24, page));
        steps.push(store(at + 0x20, features));
    }
    steps.push(store(at + STATUS, 0xb));
    let queues = [1, 3, 1][index as usize];
    for queue in 0..queues {
        for word in 0..3 {
            // The ring indices start at zero.
            steps.push(store(ring(index, queue) + 0x1000 * word, 0));
        }
        steps.push(store(at + QUEUE_SELECT, queue as u32));
        steps.push(store(at + QUEUE_SIZE, 8));
        for (register, part) in ADDRESSES {
            steps.push(store(at + register, (ring(index, queue) + part) as u32));
            steps.push(store(at + register + 4, 0));
        }
        steps.push(store(at + QUEUE_READY, 1));
    }
    steps.push(store(at + STATUS, 0xf));
}

/// Adds steps that no driver should do to a running device.
fn attack(steps: &mut Vec<Step>, index: u64) {
    let at = device(index);
    let storm = |value| Step::Storm { address: at + STATUS, value };
    start(steps, index);
    // Queue registers after DRIVER_OK, with invalid sizes and addresses.
    for queue in [0, 1, 7, u32::MAX] {
        steps.push(store(at + QUEUE_SELECT, queue));
        for register in [QUEUE_SIZE, QUEUE_READY, 0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4] {
            for value in [u32::MAX, 0xffff, 0x8000, 0] {
                steps.push(store(at + register, value));
            }
        }
    }
    // Kicks for queues that exist and for queues that do not.
    for queue in [0, 1, 2, 3, 64, 0xffff, u32::MAX] {
        steps.push(store(at + NOTIFY, queue));
    }
    // Every register in every width, and accesses across registers.
    for register in (0..0x200).step_by(4) {
        for (width, offset) in [(1, 0), (2, 1), (8, 0), (4, 2)] {
            let address = at + register + offset;
            // There is no load of two bytes. The status register is written elsewhere in the
            // attack.
            steps.push(Step::Load { width: if width == 2 { 4 } else { width }, address });
            if register != STATUS {
                steps.push(Step::Store { width, address, value: 0x5a5a_5a5a_5a5a_5a5a });
            }
        }
    }
    // The device reports that it needs a reset. Without this wait the next reset could come first.
    let seen = Step::Await { address: at + STATUS, not: 0xf };
    // An available ring whose index claims more than the ring holds, in the first queue that the
    // device reads.
    start(steps, index);
    let queue = [0, 1, 0][index as usize];
    let available = ring(index, queue) + 0x1000;
    steps.push(Step::Store { width: 2, address: available + 2, value: 0x7fff });
    steps.extend([store(at + NOTIFY, queue as u32), seen]);
    // A descriptor that links to itself, one in a device register, and one across the end of the
    // address space.
    for (address, len, flags_next) in
        [(RINGS, 16, 0x0000_0001u32), (WINDOWS, 64, 2), (u64::MAX - 7, 16, 2)]
    {
        start(steps, index);
        let table = ring(index, queue);
        steps.push(Step::Store { width: 8, address: table, value: address });
        steps.push(store(table + 8, len));
        steps.push(store(table + 12, flags_next));
        steps.push(store(available + 4, 0));
        steps.push(Step::Store { width: 2, address: available + 2, value: 1 });
        steps.extend([store(at + NOTIFY, queue as u32), seen]);
    }
    // Many resets and incomplete starts.
    steps.push(storm(0));
    steps.push(storm(0xf));
    steps.push(storm(u32::MAX));
}

/// Adds the steps of a correct driver that requests eight random bytes.
fn work(steps: &mut Vec<Step>) {
    start(steps, RNG);
    let (table, available, used) = (ring(RNG, 0), ring(RNG, 0) + 0x1000, ring(RNG, 0) + 0x2000);
    steps.push(Step::Store { width: 8, address: table, value: RINGS - 0x1000 });
    steps.push(store(table + 8, 8));
    steps.push(store(table + 12, 2)); // writable
    steps.push(store(available + 4, 0));
    steps.push(Step::Store { width: 2, address: available + 2, value: 1 });
    steps.push(store(device(RNG) + NOTIFY, 0));
    steps.push(Step::Await { address: used + 2, not: 0 });
}

fn machine(code: &[u8], disk: &NamedTempFile, dir: &TempDir) -> Vm {
    let kernel = tiny::kernel(code);
    let mut config = VmConfig::new(kernel.path());
    config.boot_protocol = BootProtocol::Linux64;
    config.memory_mib = 64;
    config.drives.push(Drive::writable(disk.path()));
    config.vsock = Some(Vsock::new(3, dir.path().join("v")));
    Vm::boot(&Kvm::open().unwrap(), config).unwrap()
}

#[test]
fn hostile_kernel_leaves_a_monitor_that_counts_and_devices_that_work() {
    let mut steps = Vec::new();
    (0..DEVICES).for_each(|index| attack(&mut steps, index));
    // Every port except those that would end the VM, and addresses without a device.
    for port in (0..0x1000).step_by(3).chain((0x1000..=0xffff).step_by(0x101)) {
        let ends = (0x60..0x70).contains(&port) || (0x600..0x610).contains(&port);
        if !ends {
            let width = [1, 2, 4][usize::from(port % 3 != 0) + usize::from(port & 8 != 0)];
            steps.push(Step::Out { width, port, value: 0xfefe_fefe });
            steps.push(Step::In { width: 4, port });
        }
    }
    for address in [WINDOWS + 0x10_0000, 0xfec0_0000, 0xfec0_0fff, 0xfed0_0000] {
        for width in [1, 4, 8] {
            steps.push(Step::Store { width, address, value: u64::MAX });
            steps.push(Step::Load { width, address });
        }
    }
    work(&mut steps);

    let (disk, dir) = (NamedTempFile::new().unwrap(), TempDir::new().unwrap());
    std::fs::write(disk.path(), [7; 64 << 10]).unwrap();
    let mut vm = machine(&script::code(&steps), &disk, &dir);
    vm.resume().unwrap();
    let outcome = vm.wait(Some(Duration::from_secs(120)));
    let counters = vm.device_counters();
    assert_eq!(outcome, Some(Outcome::Poweroff), "{counters:?}");
    for counted in &counters {
        assert!(counted.values.faults >= 4, "{counters:?}");
    }
    assert_eq!(counters.last().unwrap().values.served, 1, "{counters:?}");
    assert!(vm.missed_accesses() > 1000, "{}", vm.missed_accesses());
    drop(vm);
    assert!(std::fs::read(disk.path()).unwrap() == [7; 64 << 10], "the disk was written to");
    // The monitor process can run another VM with this disk and socket.
    let mut next = Vec::new();
    work(&mut next);
    let mut vm = machine(&script::code(&next), &disk, &dir);
    vm.resume().unwrap();
    assert_eq!(vm.wait(Some(tiny::PATIENCE)), Some(Outcome::Poweroff));
}
