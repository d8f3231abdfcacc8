//! `pvmm fork` and `pvmm restore`: start VMs from the state of another.
//!
//! A running VM is frozen for a moment and passes on its memory and disks; a snapshot is read from
//! disk. The rest is common to both: one monitor process per child, all sharing the pages that none
//! has changed. A snapshot of disks alone is booted.

use std::path::Path;

use pvmm::snapshot::{Key, LoadOptions, Manifest, SnapshotKind};
use pvmm::{Kvm, Template};
use pvmm_sandbox::control::{self, HandedOver};
use pvmm_sandbox::copies::{Copies, sized};
use pvmm_sandbox::disk_snapshot::DiskSnapshot;
use pvmm_sandbox::sys::signals::{FORWARDED, Signals};
use pvmm_sandbox::vm_dir::{Base, Record, VmDirError};
use pvmm_sandbox::vmm_process::copy::CopySource;
use pvmm_sandbox::warm::{self, Warm};
use pvmm_sandbox::{egress, secrets, snapshots};

use crate::cli::start::{self, EgressFlags};
use crate::cli::{Fork, Restore};
use crate::commands::run::boot_patience;
use crate::exit::{Failure, Outcome, USAGE};
use crate::interrupt;
use crate::output;

pub fn fork(args: Fork) -> Outcome {
    let base = Base::open()?;
    let names = names(&base, args.name.as_deref(), args.count)?;
    interrupt::scratch_place(false)?;
    let (mut parent, mut secrets) = (None, None);
    let (machine, record) = match base.find(&args.source) {
        Ok(vm) => {
            parent = vm.dir.read_egress().filter(|_| vm.has_egress());
            secrets = secrets::of_vm(&vm.dir)?;
            let record =
                Record { template: format!("fork of {}", vm.label()), ..vm.record.clone() };
            (control::hand_over_at(&vm, args.at.as_deref())?, record)
        }
        // Not a VM, so it may be a warm template.
        Err(VmDirError::Unknown(name)) if args.at.is_none() => match warm::find_named(&name)? {
            Some(warm) => {
                let Warm { template, kernel, kernel_file } = warm;
                let record = Record { template: name, kernel, kernel_file, ..Record::default() };
                (HandedOver::of(&template)?, sized(record, &template))
            }
            None => return Err(VmDirError::Unknown(name).into()),
        },
        Err(error) => return Err(error.into()),
    };
    require_card(&args.egress, parent.is_some())?;
    let egress = args.egress.egress(parent.as_ref())?;
    args.jail.warn(false);
    let copies = Copies {
        machine: CopySource::Template(&machine),
        like: record,
        flags: args.copy.copy_flags(),
        volumes: Vec::new(),
        makes_taps: true,
        start: args.jail.options(),
        egress,
        secrets,
        shells: None,
    };
    start(&copies, &base, names)
}

pub fn restore(args: Restore) -> Outcome {
    let secrets = args.secrets.seal()?;
    let base = Base::open()?;
    let names = names(&base, args.name.as_deref(), args.count)?;
    let dir = snapshots::place(&args.snapshot)?;
    interrupt::scratch_place(false)?;
    let key = args.key.as_deref().map(Key::read).transpose().map_err(|e| refuse(e.into()))?;
    // A snapshot written by a holder of the key is trusted to name any file.
    let roots = match &key {
        Some(_) => None,
        None => Some(snapshots::roots(args.allow_files.clone())),
    };
    let options = LoadOptions { verify: args.verify, roots, key, ..LoadOptions::default() };
    let record = Record { template: args.snapshot.clone(), ..Record::default() };
    let kind = Manifest::read_signed(&dir, options.key.as_ref()).map_err(refuse)?.kind();
    let (machine, disks);
    let (source, like, taps) = match kind {
        SnapshotKind::Disk => {
            disks = open_disks(&dir, &options, &args, secrets.is_some())?;
            (CopySource::Disks(&disks), disks.described(record), disks.taps.clone())
        }
        SnapshotKind::Memory => {
            refuse_size(&args)?;
            let kvm = Kvm::open().map_err(refuse)?;
            let template = Template::load(&kvm, &dir, options).map_err(refuse)?;
            machine = HandedOver::of(&template)?;
            let taps = template.taps().to_vec();
            (CopySource::Template(&machine), sized(record, &template), taps)
        }
    };
    // Several VMs cannot share one tap.
    let makes_taps = names.len() > 1;
    let has_card = taps.iter().any(|tap| tap == egress::LINK_NAME);
    require_card(&args.egress, has_card)?;
    if secrets.is_some() && !has_card {
        return Err(Failure::usage("--secret: the VM has no network card with a policy")
            .hint("start the original with: pvmm run --net"));
    }
    let mut egress = args.egress.egress(None)?;
    if let Some(secrets) = &secrets {
        secrets.allow(&mut egress);
    }
    args.jail.warn(false);
    let copies = Copies {
        machine: source,
        like,
        flags: args.copy.copy_flags(),
        volumes: Vec::new(),
        makes_taps,
        start: args.jail.options(),
        egress,
        secrets,
        shells: None,
    };
    start(&copies, &base, names)
}

/// Opens a snapshot of disks alone, with the size, the kernel and the network that were asked for.
fn open_disks(
    dir: &Path,
    options: &LoadOptions,
    args: &Restore,
    has_secrets: bool,
) -> Result<DiskSnapshot, Failure> {
    let mut disks = DiskSnapshot::open(dir, options, args.kernel.as_deref())?;
    disks.cpus = args.cpus.unwrap_or(disks.cpus);
    disks.memory_mib = args.memory.unwrap_or(disks.memory_mib);
    disks.boot_patience = boot_patience()?;
    if disks.taps.is_empty() && (args.egress.is_given() || has_secrets) {
        // As `run` does: what boots can have a card that its disks knew nothing of.
        disks.taps.push(egress::LINK_NAME.to_owned());
    }
    Ok(disks)
}

/// Refuses a size or a kernel for VMs that go on with those that they had.
fn refuse_size(args: &Restore) -> Result<(), Failure> {
    let given = [
        ("--memory", args.memory.is_some()),
        ("--cpus", args.cpus.is_some()),
        ("--kernel", args.kernel.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Failure::usage(format!(
            "{flag}: a snapshot with memory goes on with what its VM had"
        ))
        .hint("leave it out; 'pvmm snapshot --disk-only' writes one that boots")),
        None => Ok(()),
    }
}

/// Refuses a policy for VMs that have no network card which would heed it.
fn require_card(flags: &EgressFlags, has_card: bool) -> Result<(), Failure> {
    if flags.is_given() && !has_card {
        return Err(Failure::usage("--allow: the VM has no network card with a policy")
            .hint("start the original with: pvmm run --net"));
    }
    Ok(())
}

/// Starts a child for each name, all at once, and prints their ids as their agents answer.
fn start(copies: &Copies<'_>, base: &Base, names: Vec<Option<String>>) -> Outcome {
    let signals = Signals::hold(&FORWARDED)?;
    for (index, mut child) in copies.start(base, names)?.into_iter().enumerate() {
        let missing = child.wait_ready(Some(&signals), None)?;
        start::show_missing(&missing, index > 0);
        output::line(&child.keep()?)?;
    }
    Ok(0)
}

/// Returns a name for each child: the given one, numbered if there are several children.
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

/// Maps an error of loading a snapshot: exit code 2 where the snapshot or the request is at fault.
pub fn refuse(error: pvmm::Error) -> Failure {
    use pvmm::ErrorKind::{HostUnsupported, InvalidConfig, SnapshotCorrupt, SnapshotIncompatible};
    let failure = Failure::fault(format!("{error:#}"));
    match error.kind() {
        InvalidConfig => Failure { code: USAGE, ..failure },
        SnapshotCorrupt | SnapshotIncompatible => Failure { code: USAGE, ..failure },
        HostUnsupported => failure.hint("'pvmm doctor' says what this host lacks"),
        _ => failure,
    }
}
