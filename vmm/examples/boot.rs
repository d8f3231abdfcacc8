//! Boots a guest, asks it what it is and switches it off.
//!
//! `cargo run --release --package pvmm --example boot`

mod guest;

use std::error::Error;

use pvmm::agent::ShutdownHow;
use pvmm::exec::ExecRequest;
use pvmm::{Kvm, Vm};

fn main() -> Result<(), Box<dyn Error>> {
    // The VM's sockets go here. What is declared first is dropped last: the VM goes before it.
    let dir = tempfile::tempdir()?;
    let mut config = guest::guest(dir.path())?;
    config.vcpus = 2;

    // The kernel is loaded, and the VM is paused before its first instruction.
    let kvm = Kvm::open()?;
    let mut vm = Vm::boot(&kvm, config)?;
    vm.resume()?;

    // Waits until the agent in the guest is ready.
    let agent = vm.agent(guest::soon())?;
    let output = agent.exec(&ExecRequest::argv(["uname", "-srm"]))?;
    print!("{}", String::from_utf8_lossy(&output.stdout.bytes));

    // `wait` says how the guest ended, whoever ended it: an agent that was asked to, a kernel that
    // crashed, a host that failed. With a limit it returns `None` while the guest still runs.
    agent.shutdown(ShutdownHow::Poweroff, None)?;
    let outcome = vm.wait(Some(guest::PATIENCE)).ok_or("the guest still runs")?;
    println!("outcome: {outcome:?}");

    // Dropping the VM ends its threads and removes its socket. A guest that still ran would end
    // with it, like a computer that is unplugged.
    Ok(())
}
