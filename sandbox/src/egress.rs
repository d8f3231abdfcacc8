//! The network of a VM that needs nothing prepared: its card is one end of a socket, and a process
//! of its own at the other end decides what leaves the host (`pvmm-egress`).
//!
//! The supervisor starts the process, keeps its end of the socket, and starts it again if it dies;
//! meanwhile nothing passes. The policy is in the VM's directory, where `pvmm net` changes it.

use std::fs::OpenOptions;
use std::io::{self, PipeReader, PipeWriter, Read};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use pvmm::Mac;
use pvmm_egress::policy::Policy;
use pvmm_egress::secrets::Authorities;
use pvmm_jailer::confine;
use pvmm_jailer::group::Group;

use crate::failure::Failure;
use crate::jail;
use crate::net_card::{NetCard, TapWish};
use crate::secrets;
use crate::sys::process::{self, Child};
use crate::vm_dir::{Record, VmDir};

/// The guest's address, its gateway and its resolver: the same in every VM, for none can see
/// another's network.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 1);
const PREFIX: u8 = 24;
/// The descriptors of the process, after its standard ones.
const FRAMES_FD: i32 = 3;
const CONTROL_FD: i32 = 4;
const LOG_FD: i32 = 5;
const HELD_FD: i32 = 6;
const SECRETS_FD: i32 = 7;
/// How often the process may die in a minute before the VM is ended.
const DEATHS_MAX: usize = 5;
const DEATHS_WITHIN: Duration = Duration::from_secs(60);

/// The name that a VM gives in place of a tap to a card behind an egress process.
pub const LINK_NAME: &str = pvmm::config::SOCKET_NAME;

/// Returns a card behind an egress process, with a new address of its own.
pub fn card() -> Result<NetCard, Failure> {
    let mac = Mac::random().map_err(|error| Failure::fault(format!("no random bytes: {error}")))?;
    Ok(NetCard {
        tap: TapWish::Egress,
        mac: Some(mac),
        addresses: vec![(IpAddr::V4(GUEST), PREFIX)],
        gateways: vec![IpAddr::V4(GATEWAY)],
        dns: vec![IpAddr::V4(GATEWAY)],
        ..NetCard::default()
    })
}

/// The egress process of a VM, as its supervisor keeps it.
pub struct EgressProcess {
    /// The far end of the socket to the guest's card, and of the control socket.
    frames: OwnedFd,
    listener: UnixListener,
    dir: VmDir,
    record: Record,
    group: Option<Group>,
    jailed: bool,
    mac: Mac,
    child: Option<Child>,
    /// Readable when the process has ended.
    life: PipeReader,
    deaths: Vec<Instant>,
}

impl EgressProcess {
    /// Starts the process of a VM with this card address. Returns it and the card's end of the
    /// socket.
    pub fn start(
        dir: &VmDir,
        record: &Record,
        group: Option<&Group>,
        jailed: bool,
        mac: Mac,
    ) -> Result<(Self, OwnedFd), Failure> {
        let failed =
            |error: io::Error| Failure::fault(format!("cannot start pvmm-egress: {error}"));
        let (frames, card) = process::packet_pair().map_err(failed)?;
        let listener = pvmm::listen_privately(&dir.egress_socket()).map_err(failed)?;
        let (life, _) = io::pipe().map_err(failed)?;
        let mut egress = Self {
            frames,
            listener,
            dir: dir.clone(),
            record: record.clone(),
            group: group.cloned(),
            jailed,
            mac,
            child: None,
            life,
            deaths: Vec::new(),
        };
        egress.spawn()?;
        Ok((egress, card))
    }

    fn spawn(&mut self) -> Result<(), Failure> {
        let failed =
            |error: io::Error| Failure::fault(format!("cannot start pvmm-egress: {error}"));
        let egress = self.dir.read_egress().unwrap_or_default();
        let policy = Policy::new(&egress.policy)
            .map_err(|error| Failure::fault(format!("policy of the VM: {error}")))?;
        let mut options = OpenOptions::new();
        let log = options.create(true).append(true).mode(0o600).open(self.dir.egress_log());
        let log = OwnedFd::from(log.map_err(failed)?);
        // Closed in this process before the monitor process is forked from it.
        let secrets = secrets::of_vm(&self.dir)?.map(|secrets| OwnedFd::from(secrets.values));
        let (life, held) = io::pipe().map_err(failed)?;
        let resolvers = match egress.resolvers.as_slice() {
            [] => pvmm_egress::host_resolvers(),
            given => given.to_vec(),
        };
        let options = pvmm_egress::Options {
            frames_fd: FRAMES_FD,
            control_fd: Some(CONTROL_FD),
            log_fd: Some(LOG_FD),
            secrets_fd: secrets.as_ref().map(|_| SECRETS_FD),
            authorities: None,
            guest_ip: GUEST,
            guest_mac: Some(pvmm_egress::EthernetAddress(self.mac.0)),
            gateway_ip: GATEWAY,
            inherited: egress.inherited,
            resolvers,
            policy,
        };
        let group = self.group.as_ref().map(Group::open).transpose().map_err(failed)?;
        match confine::fork(group.as_ref().map(AsFd::as_fd))
            .map_err(|error| Failure::fault(format!("cannot start pvmm-egress: {error}")))?
        {
            confine::Side::Parent(pid) => {
                self.child = Some(Child::of(pid));
                self.life = life;
                Ok(())
            }
            confine::Side::Child(means) => {
                drop(group);
                self.carry_traffic(options, &log, &held, secrets.as_ref(), means)
            }
        }
    }

    /// Becomes the process. Never returns: its parent's exit path must not run twice.
    fn carry_traffic(
        &self,
        mut options: pvmm_egress::Options,
        log: &OwnedFd,
        held: &PipeWriter,
        secrets: Option<&OwnedFd>,
        means: confine::Means,
    ) -> ! {
        process::set_name(c"pvmm-egress");
        let mut places = vec![
            (self.frames.as_fd(), FRAMES_FD),
            (self.listener.as_fd(), CONTROL_FD),
            (log.as_fd(), LOG_FD),
            (held.as_fd(), HELD_FD),
        ];
        if let Some(secrets) = secrets {
            places.push((secrets.as_fd(), SECRETS_FD));
            // Read while the host's files are there.
            options.authorities = Some(Authorities::of_host());
        }
        let run = || -> Result<(), Box<dyn std::error::Error>> {
            process::keep_only(&places)?;
            if self.jailed {
                jail::around_egress(self.dir.run().path(), &self.record).enter(means)?;
            }
            Ok(pvmm_egress::run(options)?)
        };
        let code = match run() {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("pvmm-egress: {error}");
                1
            }
        };
        process::leave_now(code)
    }

    /// Starts the process again after it has ended. Fails if that happens too often.
    pub fn restart(&mut self) -> Result<(), Failure> {
        let how = self.child.take().map(|mut child| child.wait());
        log::warn!("pvmm-egress ended ({how:?}); starting it again");
        let now = Instant::now();
        self.deaths.retain(|death| now.duration_since(*death) < DEATHS_WITHIN);
        self.deaths.push(now);
        if self.deaths.len() > DEATHS_MAX {
            return Err(Failure::fault("pvmm-egress, the VM's network process, keeps ending")
                .hint("the VM's vmm.log says why"));
        }
        self.spawn()
    }

    /// Ends the process.
    pub fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill();
            let _ = child.wait();
        }
    }

    /// Returns whether the process has ended.
    pub fn has_ended(&mut self) -> bool {
        // The process writes nothing into the pipe.
        matches!(self.life.read(&mut [0]), Ok(0))
    }
}

impl AsFd for EgressProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.life.as_fd()
    }
}
