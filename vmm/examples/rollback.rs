//! Keeps the present of a VM, breaks the guest twice, and takes it back each time.
//!
//! `cargo run --release --package pvmm --example rollback`

mod guest;

use std::error::Error;

use pvmm::agent::{Agent, Refresh};
use pvmm::exec::ExecRequest;
use pvmm::{Kvm, Vm};

/// Asks Python in the guest; a healthy guest answers 42.
fn python(agent: &Agent) -> Result<String, Box<dyn Error>> {
    let output = agent.exec(&ExecRequest::argv(["python3", "-c", "print(6 * 7)"]))?;
    if !output.status.success() {
        return Ok(format!("broken, {:?}", output.status.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout.bytes).trim_end().to_owned())
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let kvm = Kvm::open()?;
    let mut vm = Vm::boot(&kvm, guest::guest(dir.path())?)?;
    vm.resume()?;
    let agent = vm.agent(guest::soon())?;
    println!("before: {}", python(&agent)?);

    // Keeps memory, disks and registers as they are now. The guest runs on.
    vm.checkpoint()?;

    guest::prints(&agent, "rm -f /usr/bin/python3*")?;
    println!("without its files: {}", python(&agent)?);

    // The same VM, taken back. Connections into the guest are reset and its clock is behind, so it
    // is paused first, and resumed by a refresh that ends with a new connection. It is the same
    // computer as before and keeps its identifiers.
    vm.pause()?;
    vm.rollback()?;
    let refresh = Refresh::new(1)?.without_ids();
    let agent = vm.resume_refreshed(&refresh, guest::soon())?;
    println!("taken back: {}", python(&agent)?);

    // Even a guest that has ended comes back. This one's kernel panics.
    let panic = ExecRequest::shell("echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger");
    let process = agent.start(&panic)?;
    let outcome = vm.wait(Some(guest::PATIENCE)).ok_or("the guest still runs")?;
    println!("after a panic: {outcome:?}");
    drop(process);

    vm.pause()?;
    vm.rollback()?;
    let refresh = Refresh::new(2)?.without_ids();
    let agent = vm.resume_refreshed(&refresh, guest::soon())?;
    println!("taken back: {}", python(&agent)?);
    Ok(())
}
