//! `pvmm fork` and `pvmm restore`: machines that go on where another one stands.
//!
//! A running VM stands still for a moment and hands over its memory and disks; a snapshot is read. The
//! rest is the same for both: a process for each child, all of them sharing what none has changed.

use std::sync::Arc;
use std::time::Duration;

use pvmm::Template;
use pvmm::snapshot::LoadOptions;

use crate::cli::{Fork, Restore};
use crate::control;
use crate::exit::{Failure, Outcome, USAGE};
use crate::machine::Extras;
use crate::output;
use crate::snapshots;
use crate::sys::signals::{FORWARDED, Signals};
use crate::vm_dir::{Base, Claim, Record, VmDirError, now};
use crate::vmm_process::{self, Mode, Plan, Start, VmmProcess};
use crate::warm;

/// How long a child may take until its agent has answered.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn fork(args: Fork) -> Outcome {
    let base = Base::open()?;
    let names = names(&base, args.name.as_deref(), args.count)?;
    let (template, record) = match base.find(&args.source) {
        Ok(vm) => {
            let record =
                Record { template: format!("fork of {}", vm.label()), ..vm.record.clone() };
            (control::freeze(&vm)?, record)
        }
        // Not a VM, so perhaps a template that is warm.
        Err(VmDirError::Unknown(name)) => match warm::find_named(&name)? {
            Some(warm) => {
                (warm.template, Record { template: name, kernel: warm.kernel, ..Record::default() })
            }
            None => return Err(VmDirError::Unknown(name).into()),
        },
        Err(error) => return Err(error.into()),
    };
    start(&base, template, record, names)
}

pub fn restore(args: Restore) -> Outcome {
    let base = Base::open()?;
    let names = names(&base, args.name.as_deref(), args.count)?;
    let dir = snapshots::place(&args.snapshot)?;
    let options = LoadOptions { verify: args.verify, ..LoadOptions::default() };
    let template = Template::load(&dir, options).map_err(refuse)?;
    let record = Record { template: args.snapshot.clone(), ..Record::default() };
    start(&base, template, record, names)
}

/// Starts a child for each name, all at once, and prints their ids as they answer.
fn start(base: &Base, template: Template, like: Record, names: Vec<Option<String>>) -> Outcome {
    let signals = Signals::hold(&FORWARDED)?;
    let template = Arc::new(template);
    let mut children = Vec::with_capacity(names.len());
    for name in names {
        let record = Record {
            name,
            created: now(),
            template: like.template.clone(),
            kernel: like.kernel.clone(),
            cpus: template.vcpus() as u32,
            memory_mib: template.memory_mib(),
            ..Record::default()
        };
        let mut claim = base.create(record)?;
        let record = claim.dir().read_record().unwrap_or_default();
        let plan = Plan {
            start: Start::Template(template.clone()),
            record,
            console_copy: None,
            boot_patience: PATIENCE,
            mode: Mode::Detached { command: None },
            ports: Vec::new(),
            extras: Extras::default(),
        };
        let process = vmm_process::spawn(plan, &claim)?;
        claim.hand_over_lock();
        children.push(Child { process, claim, kept: false });
    }
    for mut child in children {
        child.process.wait_ready(&signals, None)?;
        let id = child.claim.dir().read_record().unwrap_or_default().id;
        child.keep();
        output::line(&id)?;
    }
    Ok(0)
}

/// A name for each child: the given one, with a number behind it if there are several.
fn names(base: &Base, name: Option<&str>, count: u32) -> Result<Vec<Option<String>>, Failure> {
    let each = |number: u32| match (name, count) {
        (None, _) => None,
        (Some(name), 1) => Some(name.to_owned()),
        (Some(name), _) => Some(format!("{name}-{number}")),
    };
    let names: Vec<_> = (1..=count).map(each).collect();
    for name in names.iter().flatten() {
        base.refuse_taken(name)?;
    }
    Ok(names)
}

/// A child that ends when it is dropped, unless it is kept.
struct Child {
    process: VmmProcess,
    claim: Claim,
    kept: bool,
}

impl Child {
    fn keep(mut self) {
        self.kept = true;
        self.claim.keep();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.kept {
            self.process.end();
        }
    }
}

/// Whose fault it is that a snapshot cannot be used.
pub fn refuse(error: pvmm::Error) -> Failure {
    use pvmm::ErrorKind::{HostUnsupported, InvalidConfig, SnapshotCorrupt, SnapshotIncompatible};
    let failure = Failure::fault(error.to_string());
    match error.kind() {
        InvalidConfig => Failure { code: USAGE, ..failure },
        SnapshotCorrupt | SnapshotIncompatible => Failure { code: USAGE, ..failure },
        HostUnsupported => failure.hint("'pvmm doctor' says what this host lacks"),
        _ => failure,
    }
}
