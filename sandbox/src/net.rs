//! Asks the egress process of a running VM, and changes its policy.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pvmm_egress::ConnectionKey;
use pvmm_egress::policy::PolicyDocument;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::sys::lock::{self, Guard};
use crate::vm_dir::VmEntry;

/// How long the process may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the process may take to tell a counter.
const COUNTER_PATIENCE: Duration = Duration::from_secs(1);
/// The longest answer.
const ANSWER_MAX: u64 = 4 << 20;

/// Changes the policy, in the process and in the VM's directory. The old policy stays if the new
/// one is refused.
pub fn change(vm: &VmEntry, edit: impl FnOnce(&mut PolicyDocument)) -> Result<(), Failure> {
    // Two changes at once would lose one of them.
    let folder = File::open(vm.dir.path())?;
    if !lock::exclusive(&folder, PATIENCE)? {
        return Err(Failure::fault(format!(
            "'{}' is being changed by another command",
            vm.label()
        )));
    }
    let _held = Guard::of(folder);
    let mut egress = vm.dir.read_egress().unwrap_or_default();
    edit(&mut egress.policy);
    let policy = serde_json::to_value(&egress.policy).map_err(io::Error::other)?;
    ask(vm, &json!({ "set": policy }))?;
    vm.dir.write_egress(&egress)?;
    Ok(())
}

/// Returns the guest's connections through the VM's egress process. One that cannot be asked has
/// none: they end with it.
pub fn connections(vm: &VmEntry) -> Vec<ConnectionKey> {
    if !vm.has_egress() {
        return Vec::new();
    }
    let asked = ask(vm, &json!({ "connections": {} }));
    let listed = asked.map(|mut answer| serde_json::from_value(answer["connections"].take()));
    match listed {
        Ok(Ok(connections)) => connections,
        Ok(Err(error)) => {
            log::warn!("the connections of '{}' are not known: {error}", vm.label());
            Vec::new()
        }
        Err(failure) => {
            log::warn!("the connections of '{}' are not known: {}", vm.label(), failure.message);
            Vec::new()
        }
    }
}

/// Returns how many attempts of the guest the VM's egress process has denied since its start.
pub fn denied(vm: &VmEntry) -> Option<u64> {
    if !vm.has_egress() {
        return None;
    }
    let status = ask_within(vm, &json!({ "status": {} }), COUNTER_PATIENCE).ok()?;
    status["totals"]["denied"].as_u64()
}

/// Sends a request to the VM's egress process and returns the answer.
pub fn ask(vm: &VmEntry, request: &Value) -> Result<Value, Failure> {
    ask_within(vm, request, PATIENCE)
}

fn ask_within(vm: &VmEntry, request: &Value, patience: Duration) -> Result<Value, Failure> {
    let failed = |error: io::Error| {
        Failure::fault(format!("cannot ask the network process of '{}': {error}", vm.label()))
    };
    let exchange = || -> io::Result<Value> {
        let mut socket = UnixStream::connect(vm.dir.egress_socket())?;
        socket.set_read_timeout(Some(patience))?;
        socket.set_write_timeout(Some(patience))?;
        socket.write_all(format!("{request}\n").as_bytes())?;
        let mut line = String::new();
        BufReader::new(socket.take(ANSWER_MAX)).read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    };
    let answer = exchange().map_err(failed)?;
    match answer["error"].as_str() {
        Some(error) => Err(Failure::usage(error)),
        None => Ok(answer),
    }
}
