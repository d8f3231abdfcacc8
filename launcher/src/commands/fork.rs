//! `pvmm fork` and `pvmm restore`: start VMs from the state of another.
//!
//! A running VM is frozen for a moment and passes on its memory and disks; a snapshot is read from
//! disk. The rest is common to both: one monitor process per child, all sharing the pages that none
//! has changed.

use std::fs::File;
use std::time::Duration;

use pvmm::snapshot::{Key, LoadOptions};
use pvmm::{Kvm, Template};
use pvmm_egress::secrets::Placeholders;

use crate::cli::{Fork, Restore};
use crate::control;
use crate::control::HandedOver;
use crate::egress::{self, EgressFlags};
use crate::exit::{Failure, Outcome, USAGE};
use crate::jail::{self, JailFlags};
use crate::output;
use crate::overrides::CopyFlags;
use crate::scratch;
use crate::secrets::{self, Sealed};
use crate::snapshots;
use crate::sys::signals::{FORWARDED, Signals};
use crate::vm_dir::{Base, Claim, Egress, Record, VmDirError, now};
use crate::vmm_process::VmmProcess;
use crate::vmm_process::copy::{self, Order};
use crate::warm;

/// How long a child may take until its agent has answered.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn fork(args: Fork) -> Outcome {
    let base = Base::open()?;
    let names = names(&base, args.name.as_deref(), args.count)?;
    scratch::place(false)?;
    let (mut parent, mut secrets) = (None, None);
    let (machine, record) = match base.find(&args.source) {
        Ok(vm) => {
            parent = vm.dir.read_egress().filter(|_| vm.has_egress());
            secrets = secrets::of_vm(&vm.dir)?;
            let record =
                Record { template: format!("fork of {}", vm.label()), ..vm.record.clone() };
            (control::hand_over(&vm)?, record)
        }
        // Not a VM, so it may be a warm template.
        Err(VmDirError::Unknown(name)) => match warm::find_named(&name)? {
            Some(warm) => {
                let record = Record { template: name, kernel: warm.kernel, ..Record::default() };
                (HandedOver::of(&warm.template)?, sized(record, &warm.template))
            }
            None => return Err(VmDirError::Unknown(name).into()),
        },
        Err(error) => return Err(error.into()),
    };
    require_card(&args.egress, parent.is_some())?;
    let egress = args.egress.egress(parent.as_ref())?;
    let (flags, jail) = (&args.copy, &args.jail);
    // The guest's memory has its placeholders already.
    let placeholders = None;
    Copies { machine, like: record, flags, makes_taps: true, jail, egress, secrets, placeholders }
        .start(&base, names)
}

pub fn restore(args: Restore) -> Outcome {
    let sealed = args.secrets.seal()?;
    let base = Base::open()?;
    let names = names(&base, args.name.as_deref(), args.count)?;
    let dir = snapshots::place(&args.snapshot)?;
    scratch::place(false)?;
    let key = args.key.as_deref().map(Key::read).transpose().map_err(|e| refuse(e.into()))?;
    // A snapshot written by a holder of the key is trusted to name any file.
    let roots = match &key {
        Some(_) => None,
        None => Some(snapshots::roots(args.allow_files)),
    };
    let options = LoadOptions { verify: args.verify, roots, key, ..LoadOptions::default() };
    let kvm = Kvm::open().map_err(refuse)?;
    let template = Template::load(&kvm, &dir, options).map_err(refuse)?;
    let record = Record { template: args.snapshot.clone(), ..Record::default() };
    let (machine, like) = (HandedOver::of(&template)?, sized(record, &template));
    // Several VMs cannot share one tap.
    let makes_taps = names.len() > 1;
    let has_card = template.taps().iter().any(|tap| tap == egress::LINK_NAME);
    require_card(&args.egress, has_card)?;
    if sealed.is_some() && !has_card {
        return Err(Failure::usage("--secret: the VM has no network card with a policy")
            .hint("start the original with: pvmm run --net"));
    }
    let mut egress = args.egress.egress(None)?;
    if let Some(sealed) = &sealed {
        sealed.allow(&mut egress);
    }
    let (secrets, placeholders) = sealed.map(Sealed::into_parts).unzip();
    let (flags, jail) = (&args.copy, &args.jail);
    Copies { machine, like, flags, makes_taps, jail, egress, secrets, placeholders }
        .start(&base, names)
}

/// Refuses a policy for VMs that have no network card which would heed it.
fn require_card(flags: &EgressFlags, has_card: bool) -> Result<(), Failure> {
    if flags.is_given() && !has_card {
        return Err(Failure::usage("--allow: the VM has no network card with a policy")
            .hint("start the original with: pvmm run --net"));
    }
    Ok(())
}

fn sized(record: Record, template: &Template) -> Record {
    Record { cpus: template.vcpus() as u32, memory_mib: template.memory_mib(), ..record }
}

/// The template, flags and record that children are made from.
struct Copies<'a> {
    machine: HandedOver,
    like: Record,
    flags: &'a CopyFlags,
    makes_taps: bool,
    jail: &'a JailFlags,
    /// The policy of a network card without a tap, if the template has one.
    egress: Egress,
    /// The values of the children's secrets, and the placeholders that their guests are told.
    secrets: Option<File>,
    placeholders: Option<Placeholders>,
}

impl Copies<'_> {
    /// Starts a child for each name, all at once, and prints their ids as their agents answer.
    fn start(&self, base: &Base, names: Vec<Option<String>>) -> Outcome {
        self.jail.warn(false);
        let signals = Signals::hold(&FORWARDED)?;
        let several = names.len() > 1;
        // Invalid flags are refused before anything is created.
        self.flags.of_copy(several.then_some(1), self.makes_taps)?;
        let mut children = Vec::with_capacity(names.len());
        for (number, name) in (1..).zip(names) {
            children.push(self.spawn(base, name, several.then_some(number))?);
        }
        for (index, mut child) in children.into_iter().enumerate() {
            let missing = child.process.wait_ready(&signals, None)?;
            jail::show_missing(&missing, index > 0);
            let id = child.claim.dir().read_record().unwrap_or_default().id;
            child.keep()?;
            output::line(&id)?;
        }
        Ok(0)
    }

    fn spawn(
        &self,
        base: &Base,
        name: Option<String>,
        number: Option<u32>,
    ) -> Result<Child, Failure> {
        let record = Record {
            name,
            created: now(),
            template: self.like.template.clone(),
            kernel: self.like.kernel.clone(),
            cpus: self.like.cpus,
            memory_mib: self.like.memory_mib,
            ..Record::default()
        };
        let mut claim = base.create(record, self.jail.users())?;
        claim.dir().write_egress(&self.egress)?;
        if let Some(values) = &self.secrets {
            secrets::install(values, claim.dir())?;
        }
        let order = Order {
            machine: &self.machine,
            record: claim.dir().read_record().unwrap_or_default(),
            flags: self.flags,
            number,
            makes_taps: self.makes_taps,
            boot_patience: PATIENCE,
            jailed: !self.jail.no_jail,
            ttl: self.jail.ttl,
            placeholders: self.placeholders.as_ref(),
        };
        let process = copy::spawn(&order, &claim)?;
        claim.hand_over_lock();
        Ok(Child { process, claim, kept: false })
    }
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

/// A child VM that is ended on drop, unless kept.
struct Child {
    process: VmmProcess,
    claim: Claim,
    kept: bool,
}

impl Child {
    fn keep(mut self) -> Result<(), Failure> {
        self.process.keep()?;
        self.kept = true;
        self.claim.keep();
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.kept {
            self.process.end();
        }
    }
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
