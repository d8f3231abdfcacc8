//! The parts that all moments share: the guest's files on tmpfs, the contenders, and one snapshot
//! of each kind.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use ::pvmm::agent::{Agent, Refresh};
use ::pvmm::snapshot::{Durability, LoadOptions, WriteOptions};
use ::pvmm::{Kvm, Template, Vm, next_trim};
use serde_json::{Value, json};

use crate::board::Outcome;
use crate::guest::{self, Guest, Spec, deadline, exec_true};
use crate::peers::Peer;
use crate::peers::firecracker::{Baked, Firecracker};
use crate::peers::pvmm::{self, Pvmm};
use crate::peers::qemu::Qemu;

/// How long a guest may take to become idle before it is frozen, as in the launcher.
pub const SETTLE_MAX: Duration = Duration::from_millis(20);
const SETTLE: Duration = Duration::from_secs(1);

pub struct Stage {
    pub place: PathBuf,
    pub kvm: Kvm,
    pub guest: Guest,
    pub pvmm: Pvmm,
    pub qemu: Option<Qemu>,
    pub firecracker: Option<Firecracker>,
    /// The command `pvmm` as it is shipped, if `PVMM_BIN` names it.
    pub launcher: Option<PathBuf>,
    made: AtomicU32,
}

/// The snapshots and the template from which VMs are made.
pub struct Baking {
    pub snapshot: PathBuf,
    /// The snapshot, loaded as a template that this process holds.
    pub template: Template,
    pub firecracker: Option<Baked>,
}

impl Stage {
    pub fn new(place: &Path) -> Outcome<(Self, Value)> {
        let (guest, mut facts) = Guest::prepare(place)?;
        let pvmm = Pvmm { program: std::env::current_exe()? };
        facts["pvmm_bench_sha256"] = json!(guest::digest(&pvmm.program)?);
        let qemu = Qemu::find().map(|(qemu, version)| {
            facts["qemu"] = json!(version);
            qemu
        });
        let firecracker = match Firecracker::find(place)? {
            Some((firecracker, version)) => {
                facts["firecracker"] = json!(version);
                facts["firecracker_sha256"] = json!(guest::digest(firecracker.program())?);
                Some(firecracker)
            }
            None => None,
        };
        guest::make_taps();
        facts["network_card"] = json!(guest::tap(0).is_some());
        let launcher = match std::env::var_os("PVMM_BIN") {
            Some(path) => {
                let launcher = place.join("pvmm");
                fs::copy(path, &launcher)?;
                Some(launcher)
            }
            None => None,
        };
        let (place, made) = (place.to_owned(), AtomicU32::new(0));
        let kvm = Kvm::open()?;
        Ok((Self { place, kvm, guest, pvmm, qemu, firecracker, launcher, made }, facts))
    }

    /// Makes a directory whose path is short enough for sockets.
    pub fn dir(&self) -> Outcome<PathBuf> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let dir = self.place.join(format!("d{number}"));
        fs::create_dir(&dir)?;
        Ok(dir)
    }

    pub fn spec(&self, tap: usize) -> Outcome<Spec> {
        Ok(self.guest.spec(&self.dir()?, guest::tap(tap)))
    }

    /// Returns all contenders that can boot a guest on this host.
    pub fn peers(&self) -> Vec<&dyn Peer> {
        let mut peers: Vec<&dyn Peer> = vec![&self.pvmm];
        peers.extend(self.qemu.as_ref().map(|qemu| qemu as &dyn Peer));
        peers.extend(self.firecracker.as_ref().map(|firecracker| firecracker as &dyn Peer));
        peers
    }

    /// Boots a guest in this process. The guest is warm: it has run a command.
    pub fn parent(&self) -> Outcome<(Vm, Agent)> {
        let spec = self.spec(0)?;
        let mut vm = Vm::boot(&self.kvm, spec.config())?;
        vm.resume()?;
        let agent = vm.agent(deadline())?;
        exec_true(&agent)?;
        Ok((vm, agent))
    }

    /// Makes a template for pvmm and a snapshot for Firecracker: the agent runs, one command has
    /// run, and the workload is frozen.
    pub fn bake(&self) -> Outcome<Baking> {
        let (mut vm, agent) = self.parent()?;
        let socket = vm.vsock_path().ok_or("no vsock")?.to_owned();
        drop(agent);
        rehearse(&socket)?;
        let snapshot = self.place.join("snapshot");
        let options = WriteOptions { durability: Durability::None, ..Default::default() };
        vm.settle(SETTLE_MAX);
        let mut template = vm.freeze()?;
        drop(vm);
        self.record(&mut template)?;
        template.write(&snapshot, options)?;
        let template =
            Template::load(&self.kvm, &snapshot, LoadOptions { hold: true, ..Default::default() })?;
        let firecracker = match &self.firecracker {
            Some(peer) => Some(peer.bake(&self.spec(0)?, &self.place.join("baked"))?),
            None => None,
        };
        Ok(Baking { snapshot, template, firecracker })
    }

    /// Records the working set of a template: a VM runs its first exec, as when the launcher bakes
    /// a template.
    fn record(&self, template: &mut Template) -> Outcome<()> {
        let (socket, tap) = (self.dir()?.join("v"), guest::tap(0));
        let overrides = pvmm::overrides(socket.clone(), tap.as_deref());
        template.record_working_set(overrides, next_trim(Duration::ZERO), |vm| {
            pvmm::answer(vm, &socket).map(drop)
        })?;
        Ok(())
    }
}

/// Prepares a guest for its snapshot as the launcher does, for every contender. A refresh loads
/// into the guest what later refreshes need. Then the workload is frozen, and the kernel gets time
/// for the work that it has deferred.
pub fn rehearse(socket: &Path) -> Outcome<()> {
    let control = Agent::connect_control(socket, deadline())?;
    control.refresh(&Refresh::new(0)?.without_thaw(), deadline())?;
    control.freeze(deadline())?;
    drop(control);
    thread::sleep(SETTLE);
    Ok(())
}
