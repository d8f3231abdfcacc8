//! Makes two VMs out of one that runs, and shows what they share and what they do not.
//!
//! `cargo run --release --package pvmm --example fork`

mod guest;

use std::error::Error;
use std::time::Duration;

use pvmm::agent::{Agent, Refresh};
use pvmm::{Kvm, Vm};

/// The kernel's own random name for this boot.
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let kvm = Kvm::open()?;
    let mut vm = Vm::boot(&kvm, guest::guest(dir.path())?)?;
    vm.resume()?;
    let agent = vm.agent(guest::soon())?;
    guest::prints(&agent, "echo written before the fork > /tmp/note")?;
    let parent_id = guest::prints(&agent, BOOT_ID)?;

    // The agent stops all other processes of the guest first. In a fork they stand still until it
    // is refreshed, so none of them can use a random number that its twin uses too.
    let socket = vm.vsock_path().ok_or("no vsock")?.to_owned();
    let control = Agent::connect_control(&socket, guest::soon())?;
    control.freeze(guest::soon())?;
    vm.settle(Duration::from_millis(20));
    let template = vm.freeze()?;
    control.thaw(guest::soon())?;

    // Memory is shared copy-on-write: a fork copies nothing. (A VM of which much was copied for its
    // forks shares that after `Vm::adopt`.) Each has a socket of its own, and its
    // refresh gives it new random numbers, the right time and new identifiers.
    let mut forks = Vec::new();
    for (n, name) in ["left", "right"].into_iter().enumerate() {
        let forked = template.fork(guest::fork_in(dir.path(), name))?;
        let refresh = Refresh::new(n as u64 + 1)?.hostname(name);
        let (vm, agent) = forked.refreshed(&refresh, guest::soon())?;
        println!("{name} reads: {}", guest::prints(&agent, "cat /tmp/note")?);
        guest::prints(&agent, "hostname > /tmp/note")?;
        forks.push((name, vm, agent));
    }

    // They go on apart, and so does the VM that they came from.
    let mut ids = vec![parent_id];
    for (name, _vm, agent) in &forks {
        println!("{name} has now: {}", guest::prints(agent, "cat /tmp/note")?);
        ids.push(guest::prints(agent, BOOT_ID)?);
    }
    println!("parent has still: {}", guest::prints(&agent, "cat /tmp/note")?);
    ids.sort();
    ids.dedup();
    println!("different boot ids: {}", ids.len());
    Ok(())
}
