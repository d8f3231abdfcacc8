//! `cargo xtask on-kvm`: runs a command where guests run, here or in a nested host.
//!
//! Says in one line which it is; everything else on the streams, and the exit code, is the
//! command's own.

use std::error::Error;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use crate::nested_host::session::{self, End};
use crate::nested_host::{HostError, NestedHost, background, image};
use crate::{report, sys};

/// Exit code for a fault of this tool, as opposed to the command's.
const OWN_FAULT: u8 = 125;

pub fn run(argv: &[OsString]) -> ExitCode {
    let Some((program, arguments)) = argv.split_first() else {
        eprintln!("usage: cargo xtask on-kvm -- COMMAND [ARGUMENT…]");
        return ExitCode::from(2);
    };
    match pvmm::kvm::host::probe() {
        Ok(host) => {
            eprintln!("on-kvm: {} runs guests here; running directly", host.backend);
            let error = Command::new(program).args(arguments).exec();
            eprintln!("on-kvm: {}: {error}", program.display());
            let missing = error.kind() == io::ErrorKind::NotFound;
            ExitCode::from(if missing { 127 } else { 126 })
        }
        Err(reason) => {
            let reason = report::chain(&reason);
            eprintln!("on-kvm: no usable KVM here ({reason}); running in the nested host");
            match in_nested_host(argv) {
                Ok(code) => ExitCode::from(code),
                Err(e) => {
                    eprintln!("on-kvm: {}", report::chain(e.as_ref()));
                    ExitCode::from(OWN_FAULT)
                }
            }
        }
    }
}

/// Runs the command in a nested host of its own and returns its exit code. A host that hangs or
/// dies is replaced once.
fn in_nested_host(argv: &[OsString]) -> Result<u8, Box<dyn Error>> {
    let image = image::prepare()?;
    let request = session::request(argv)?;
    let signals = sys::signals_as_bytes(&session::PASSED_ON)?;
    if let Some(host) = background::connect(&image) {
        match session::run(host, &request, &signals)? {
            End::Exited(code) => return Ok(code),
            End::HostLost { stdin_used: true } => return Err("the nested host died or hung".into()),
            End::HostLost { stdin_used: false } => {
                eprintln!("on-kvm: the background host is lost or full; booting another");
            }
        }
    }
    for attempt in 1..=2 {
        let host = match NestedHost::boot(&image, &signals) {
            Ok(host) => host,
            Err(HostError::Interrupted(signal)) => return Ok(128 + signal),
            Err(e @ (HostError::BootDied { .. } | HostError::BootLate { .. })) if attempt == 1 => {
                eprintln!("on-kvm: {e}\non-kvm: booting another host");
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        host.watch()?;
        match session::run(host.port(0)?, &request, &signals)? {
            End::Exited(code) => return Ok(code),
            End::HostLost { stdin_used: false } if attempt == 1 => {
                eprintln!("on-kvm: the nested host died or hung; running the command once more");
            }
            End::HostLost { .. } => {
                let console = host.console();
                return Err(format!("the nested host died or hung; its console:\n{console}").into());
            }
        }
    }
    Err("the nested host did not come up twice".into())
}
