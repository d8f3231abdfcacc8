//! Writes a VM to a folder, ends it, and goes on from the folder.
//!
//! `cargo run --release --package pvmm --example snapshot`

mod guest;

use std::error::Error;

use pvmm::agent::{Agent, CodeRequest, Language, Refresh, SessionOptions};
use pvmm::snapshot::{LoadOptions, WriteOptions};
use pvmm::{Kvm, Template, Vm};

/// Runs code in the Python session `notes` and returns the value of its last expression.
fn python(agent: &Agent, code: &str) -> Result<Option<String>, Box<dyn Error>> {
    let output = agent.run_code("notes", &CodeRequest::new(code).timeout(guest::PATIENCE))?;
    Ok(output.result.and_then(|result| result.text("text/plain")))
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let folder = dir.path().join("before-lunch");

    // A guest in the middle of something: an interpreter with a variable.
    let kvm = Kvm::open()?;
    let mut vm = Vm::boot(&kvm, guest::guest(dir.path())?)?;
    vm.resume()?;
    let agent = vm.agent(guest::soon())?;
    agent.open_session(&SessionOptions::named(Language::Python, "notes"))?;
    python(&agent, "answer = 41")?;

    // The workload stands still in the snapshot, until whoever goes on from it has refreshed it.
    let socket = vm.vsock_path().ok_or("no vsock")?.to_owned();
    let control = Agent::connect_control(&socket, guest::soon())?;
    control.freeze(guest::soon())?;
    let template = vm.freeze()?;

    // The folder has its name only once all of it is written. The root image is named in it and
    // not copied, because it is read-only.
    let manifest = template.write(&folder, WriteOptions::default())?;
    println!("wrote {} MiB, {} vCPU", template.memory_mib(), manifest.machine.vcpus);

    // Nothing is left of the VM but the folder.
    drop((agent, control, template, vm));

    // Loading maps the memory and reads none of it. Another process, or this host after a reboot,
    // would do the same; a folder from elsewhere should be signed (`WriteOptions::key`).
    let template = Template::load(&kvm, &folder, LoadOptions::default())?;
    let forked = template.fork(guest::fork_in(dir.path(), "after-lunch"))?;
    let (_vm, agent) = forked.refreshed(&Refresh::new(1)?, guest::soon())?;
    println!("answer + 1 = {}", python(&agent, "answer + 1")?.ok_or("no result")?);
    Ok(())
}
