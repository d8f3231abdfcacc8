//! `pvmm ps VM`: lists the commands that `pvmm exec -d` started in a VM.
//!
//! Separate from the list of VMs, because it queries the guest and so has a deadline.

use pvmm::exec::{ExecStatus, Listed};
use serde::Serialize;

use super::ps::shortened;
use crate::exit::Outcome;
use crate::output::{self, Table};
use pvmm_sandbox::guest_agent;
use pvmm_sandbox::vm_dir::Base;

pub fn ps(vm: &str, json: bool, quiet: bool) -> Outcome {
    let vm = Base::open()?.find(vm)?;
    vm.require_running()?;
    let agent =
        guest_agent::connect(&vm.dir, guest_agent::PATIENCE).map_err(guest_agent::refuse)?;
    let listed = agent.processes().map_err(guest_agent::refuse_exec)?;
    match (json, quiet) {
        (true, _) => output::json(&listed.iter().map(Row::of).collect::<Vec<_>>())?,
        (false, true) => {
            for process in &listed {
                output::line(&process.id.to_string())?;
            }
        }
        (false, false) => table(&listed).print()?,
    }
    Ok(0)
}

fn table(listed: &[Listed]) -> Table {
    let mut table = Table::new(&["ID", "PID", "STATE", "AGE", "TTY", "OUTPUT", "COMMAND"]);
    for process in listed {
        table.row(vec![
            process.id.to_string(),
            process.pid.to_string(),
            state(process),
            output::age(process.age.as_secs()),
            if process.terminal { "yes" } else { "-" }.to_owned(),
            output::bytes(process.stdout.to.saturating_add(process.stderr.to)),
            shortened(&process.command),
        ]);
    }
    table
}

fn state(process: &Listed) -> String {
    match &process.ended {
        Some(status) => format!("exited ({})", status.shell_code()),
        None => "running".to_owned(),
    }
}

/// A detached command in the `--json` output.
#[derive(Serialize)]
struct Row<'a> {
    id: u64,
    pid: u32,
    state: &'static str,
    exit_code: Option<u8>,
    signal: Option<i32>,
    age_s: f64,
    tty: bool,
    attached: u32,
    /// Bytes written, and the offset of the oldest byte that is kept.
    stdout: [u64; 2],
    stderr: [u64; 2],
    command: &'a str,
}

impl<'a> Row<'a> {
    fn of(process: &'a Listed) -> Self {
        let signal = match process.ended.map(|status| status.status) {
            Some(ExecStatus::Signaled { signal, .. }) => Some(signal),
            _ => None,
        };
        Self {
            id: process.id,
            pid: process.pid,
            state: if process.ended.is_some() { "exited" } else { "running" },
            exit_code: process.ended.map(|status| status.shell_code()),
            signal,
            age_s: process.age.as_secs_f64(),
            tty: process.terminal,
            attached: process.attached,
            stdout: [process.stdout.to, process.stdout.from],
            stderr: [process.stderr.to, process.stderr.from],
            command: &process.command,
        }
    }
}
