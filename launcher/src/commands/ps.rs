//! `pvmm ps`: lists all VMs of this user, alive or not.
//!
//! Reads only the VMs' directories; no VM is queried, so a stuck one cannot block the list.

use serde::Serialize;

use crate::cli::Ps;
use crate::exit::Outcome;
use crate::output::{self, Table};
use pvmm_sandbox::hibernated::{self, Hibernated};
use pvmm_sandbox::vm_dir::{Base, Record, VmEntry, VmStatus, now};

pub fn ps(args: Ps, quiet: bool) -> Outcome {
    if let Some(vm) = &args.vm {
        return super::ps_commands::ps(vm, args.json, quiet);
    }
    let entries = Base::open()?.list()?;
    let asleep = hibernated::list()?;
    match (args.json, quiet) {
        (true, _) => {
            let rows = entries.iter().map(Row::of).chain(asleep.iter().map(Row::asleep));
            output::json(&rows.collect::<Vec<_>>())?;
        }
        (false, true) => {
            for vm in &entries {
                output::line(&vm.record.id)?;
            }
        }
        (false, false) => table(&entries, &asleep).print()?,
    }
    Ok(0)
}

fn table(entries: &[VmEntry], asleep: &[Hibernated]) -> Table {
    let heading = ["ID", "NAME", "STATE", "AGE", "TEMPLATE", "CPUS", "MEMORY", "PORTS", "COMMAND"];
    let mut table = Table::new(&heading);
    let awake = entries.iter().map(|vm| (&vm.record, state(&vm.state)));
    let asleep = asleep.iter().map(|vm| (&vm.record, "hibernated".to_owned()));
    for (record, state) in awake.chain(asleep) {
        table.row(vec![
            record.id.clone(),
            record.name.clone().unwrap_or_else(|| "-".to_owned()),
            state,
            output::age(now().saturating_sub(record.created)),
            record.template.clone(),
            record.cpus.to_string(),
            output::bytes(record.memory_mib << 20),
            ports(&record.ports),
            shortened(&record.command.join(" ")),
        ]);
    }
    table
}

fn ports(ports: &[String]) -> String {
    match ports {
        [] => "-".to_owned(),
        ports => ports.join(","),
    }
}

fn state(state: &VmStatus) -> String {
    match state {
        VmStatus::Exited(ending) => match ending.exit_code {
            Some(code) => format!("exited ({code})"),
            None => "exited".to_owned(),
        },
        other => other.word().to_owned(),
    }
}

pub(super) fn shortened(command: &str) -> String {
    const WIDTH: usize = 40;
    match command.chars().count() {
        0 => "-".to_owned(),
        count if count > WIDTH => command.chars().take(WIDTH - 1).chain(['…']).collect(),
        _ => command.to_owned(),
    }
}

/// A VM in the `--json` output.
#[derive(Serialize)]
struct Row<'a> {
    id: &'a str,
    name: Option<&'a str>,
    state: &'static str,
    exit_code: Option<u8>,
    reason: Option<&'a str>,
    created: u64,
    template: &'a str,
    kernel: &'a str,
    cpus: u32,
    memory_mib: u64,
    pid: Option<u32>,
    command: &'a [String],
    ports: &'a [String],
    taps: &'a [String],
    /// The socket of the guest's vsock device.
    vsock: Option<String>,
}

impl<'a> Row<'a> {
    fn of(vm: &'a VmEntry) -> Self {
        let ending = match &vm.state {
            VmStatus::Exited(ending) => Some(ending),
            _ => None,
        };
        Self {
            state: vm.state.word(),
            exit_code: ending.and_then(|ending| ending.exit_code),
            reason: ending.map(|ending| ending.reason.as_str()),
            pid: vm.record.pid.filter(|_| vm.state.is_alive()),
            vsock: Some(vm.dir.shown_vsock().display().to_string()),
            ..Self::of_record(&vm.record)
        }
    }

    fn asleep(vm: &'a Hibernated) -> Self {
        Self { state: "hibernated", ..Self::of_record(&vm.record) }
    }

    fn of_record(record: &'a Record) -> Self {
        Self {
            id: &record.id,
            name: record.name.as_deref(),
            state: "dead",
            exit_code: None,
            reason: None,
            created: record.created,
            template: &record.template,
            kernel: &record.kernel,
            cpus: record.cpus,
            memory_mib: record.memory_mib,
            pid: None,
            command: &record.command,
            ports: &record.ports,
            taps: &record.taps,
            vsock: None,
        }
    }
}
