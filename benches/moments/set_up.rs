//! KVM set-up: the host's part of a restore, on any `/dev/kvm`, also one that cannot run a guest.
//!
//! The part ends before the first `KVM_RUN`. The parts of a VM are made in Firecracker's order and
//! in pvmm's order; then pvmm restores a VM that has never run.
#![allow(unsafe_code)] // A memory slot hands a host address to the kernel.

use std::path::Path;
use std::time::Instant;

use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_MAX_CPUID_ENTRIES, kvm_enable_cap, kvm_pit_config,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, Kvm, VmFd};
use pvmm::snapshot::{Durability, LoadOptions, WriteOptions};
use pvmm::{Template, Vm, trace};
use vm_memory::MmapRegion;
use vmm_sys_util::eventfd::EventFd;

use crate::board::{Act, Board, Outcome, Unit, durations, millis, timed};
use crate::guest::{Guest, MEMORY_MIB};
use crate::peers::pvmm::overrides;

const MOMENT: &str = "KVM set-up";
/// The number of interrupt lines that a VM with two disks, a network card, vsock and an entropy
/// source needs.
const INTERRUPTS: u32 = 7;
const KICKS: u64 = 10;
const PINS: u64 = 24;

/// The order in which the parts of a VM are made.
#[derive(Clone, Copy)]
enum Order {
    /// Irqchip and timer, vCPU, memory, devices.
    Firecracker,
    /// Memory, vCPU, devices. The irqchip is split, there is no timer, and no interrupt has an
    /// irqfd: a device sends its interrupts itself.
    Pvmm,
}

pub fn run(place: &Path, board: &mut Board) -> Outcome<()> {
    let kvm = Kvm::new()?;
    let traces = std::cell::RefCell::new(Vec::new());
    let act = |title: &'static str, order: Order| {
        let (kvm, traces) = (&kvm, &traces);
        move || {
            let (steps, took) = set_up(kvm, order)?;
            traces.borrow_mut().push((title, steps));
            Ok(took)
        }
    };
    let acts: Vec<Act> = vec![
        ("pvmm's order".to_owned(), Box::new(act("pvmm's order", Order::Pvmm))),
        (
            "Firecracker's order".to_owned(),
            Box::new(act("Firecracker's order", Order::Firecracker)),
        ),
    ];
    let counts = board.counts;
    board.interleave(MOMENT, Unit::Millis, counts.warm_ups, counts.quick, acts)?;
    for (title, steps) in traces.into_inner().into_iter().skip(2 * counts.warm_ups) {
        board.trace(title, &steps)?;
    }
    restores(place, board)
}

/// Makes the parts of one VM. Returns the duration of each step, and the total, in milliseconds.
/// The end of the VM is a step that the total does not include.
fn set_up(kvm: &Kvm, order: Order) -> Outcome<(Vec<(String, f64)>, f64)> {
    let memory: MmapRegion = MmapRegion::new((MEMORY_MIB << 20) as usize)?;
    let mut steps = Vec::new();
    let begun = Instant::now();
    let mut from = begun;
    let mut step = |name: &str| {
        let now = Instant::now();
        steps.push((name.to_owned(), millis(now - from)));
        from = now;
    };
    let vm = kvm.create_vm()?;
    step("create VM");
    let vcpu = match order {
        Order::Firecracker => {
            vm.create_irq_chip()?;
            step("interrupt controller");
            vm.create_pit2(kvm_pit_config::default())?;
            step("timer");
            let vcpu = vm.create_vcpu(0)?;
            step("vCPU");
            add_memory(&vm, &memory)?;
            step("memory slot");
            vcpu
        }
        Order::Pvmm => {
            let mut split = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
            split.args[0] = PINS;
            vm.enable_cap(&split)?;
            step("interrupt controller");
            add_memory(&vm, &memory)?;
            step("memory slot");
            let vcpu = vm.create_vcpu(0)?;
            step("vCPU");
            vcpu
        }
    };
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    step("CPUID");
    let mut events = Vec::new();
    if let Order::Firecracker = order {
        for gsi in 0..INTERRUPTS {
            let event = EventFd::new(0)?;
            vm.register_irqfd(&event, gsi + 5)?;
            events.push(event);
        }
        step("interrupts");
    }
    for index in 0..KICKS {
        let event = EventFd::new(0)?;
        let address = IoEventAddress::Mmio(0xd000_0050 + (index / 2) * 0x1000);
        vm.register_ioevent(&event, &address, (index % 2) as u32)?;
        events.push(event);
    }
    step("kicks");
    let took = millis(begun.elapsed());
    let ((), end) = timed(|| {
        drop((vcpu, vm, events));
        Ok(())
    })?;
    steps.push(("(end of the machine)".to_owned(), end));
    Ok((steps, took))
}

fn add_memory(vm: &VmFd, memory: &MmapRegion) -> Outcome<()> {
    let slot = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: memory.size() as u64,
        userspace_addr: memory.as_ptr() as u64,
    };
    // SAFETY: the mapping has this size and outlives the VM, whose vCPU never runs.
    unsafe { vm.set_user_memory_region(slot) }?;
    Ok(())
}

/// Measures pvmm's restore of a VM that has never run: from a snapshot, and from a template that
/// this process holds.
fn restores(place: &Path, board: &mut Board) -> Outcome<()> {
    let (guest, _) = Guest::prepare(place)?;
    let dir = place.join("native");
    std::fs::create_dir(&dir)?;
    let kvm = pvmm::Kvm::open()?;
    let mut vm = Vm::boot(&kvm, guest.spec(&dir, None).config())?;
    let snapshot = place.join("snapshot");
    let options = WriteOptions { durability: Durability::None, ..Default::default() };
    let held = vm.freeze()?;
    held.write(&snapshot, options)?;
    drop(vm);
    let (traces, made) = (std::cell::RefCell::new(Vec::new()), std::cell::Cell::new(0));
    let restore = |title: &'static str, held: Option<&Template>| {
        made.set(made.get() + 1);
        let path = dir.join(format!("v{}", made.get()));
        let begun = Instant::now();
        let (vm, steps) = trace::record(|| match held {
            Some(template) => template.fork(overrides(path, None)),
            None => Template::load(&kvm, &snapshot, LoadOptions::default())
                .and_then(|template| template.fork(overrides(path, None))),
        });
        let took = millis(begun.elapsed());
        drop(vm?);
        traces.borrow_mut().push((title, durations(begun, &steps)));
        Ok(took)
    };
    let mut acts: Vec<Act> = vec![(
        "pvmm, held template".to_owned(),
        Box::new(|| restore("load, held template", Some(&held))),
    )];
    // A KVM whose vCPUs have more features than it reports refuses its own snapshots.
    match Template::load(&kvm, &snapshot, LoadOptions::default()) {
        Ok(_) => acts.push((
            "pvmm, from its folder".to_owned(),
            Box::new(|| restore("load from a folder", None)),
        )),
        Err(e) => board.say(&format!("load from a folder is left out: {e}")),
    }
    let kinds = acts.len();
    let counts = board.counts;
    let moment = "load → ready for KVM_RUN";
    board.interleave(moment, Unit::Millis, counts.warm_ups, counts.quick, acts)?;
    for (title, steps) in traces.into_inner().into_iter().skip(kinds * counts.warm_ups) {
        board.trace(title, &steps)?;
    }
    Ok(())
}
