//! Flags of the commands that start VMs: jail, network policy, overrides of copies.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use pvmm_egress::policy::Policy;
use pvmm_sandbox::copies::StartOptions;
use pvmm_sandbox::jail::DEFAULT_USERS;
use pvmm_sandbox::overrides::{self, CopyFlags};
use pvmm_sandbox::vm_dir::{Egress, UidRange};

use crate::args;
use crate::exit::Failure;
use crate::output;

/// The flags of commands that start VMs.
#[derive(Clone, Debug, Args)]
pub struct StartFlags {
    /// Run the process of the VM without a jail: a fault in it can then reach all that you can
    #[arg(long)]
    pub no_jail: bool,
    /// End the VM this long after its start, whatever it does: 30s, 5m, 2h
    #[arg(long, value_name = "TIME", value_parser = args::duration)]
    pub ttl: Option<Duration>,
    /// With root: the users of which each VM gets one for its own
    #[arg(long, value_name = "FIRST-LAST", value_parser = args::uid_range, default_value = DEFAULT_USERS,
          env = "PVMM_UID_RANGE", hide_env_values = true)]
    pub uid_range: UidRange,
}

impl StartFlags {
    pub fn options(&self) -> StartOptions {
        StartOptions {
            jailed: !self.no_jail,
            users: self.uid_range.clone(),
            ttl: self.ttl,
            still: false,
        }
    }

    /// Says aloud that there is no jail, if that was asked for.
    pub fn warn(&self, quiet: bool) {
        if self.no_jail {
            output::remark(quiet, "warning: no jail around the process of this VM (--no-jail)");
        }
    }
}

/// Prints the layers that this host does not allow, in one line.
pub fn show_missing(missing: &[String], quiet: bool) {
    if !missing.is_empty() {
        output::remark(quiet, &format!("note: the jail lacks: {}", missing.join(", ")));
    }
}

/// The flags that say what a VM may reach.
#[derive(Clone, Debug, Default, Args)]
pub struct EgressFlags {
    /// Let the guest reach a network, CIDR[:PORT[/tcp|/udp]], or 'all' for every public address;
    /// a port is one of TCP unless it says otherwise; implies --net
    #[arg(long, value_name = "RULE")]
    pub allow: Vec<String>,
    /// Let the guest reach a name, NAME[:PORT[/udp]] or '*.NAME[:PORT[/udp]]'; implies --net
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// DNS server that names are looked up at, as ADDRESS:PORT [default: those of this host]
    #[arg(long, value_name = "ADDRESS")]
    pub resolver: Vec<SocketAddr>,
}

impl EgressFlags {
    pub fn is_given(&self) -> bool {
        !self.allow.is_empty() || !self.allow_host.is_empty()
    }

    /// Returns the network that the flags describe, on top of `base`. A rule that cannot be is
    /// refused by name.
    pub fn egress(&self, base: Option<&Egress>) -> Result<Egress, Failure> {
        let mut egress = base.cloned().unwrap_or_default();
        egress.policy.allow.extend(self.allow.iter().cloned());
        egress.policy.allow_host.extend(self.allow_host.iter().cloned());
        if !self.resolver.is_empty() {
            egress.resolvers.clone_from(&self.resolver);
        }
        Policy::new(&egress.policy).map_err(|error| Failure::usage(error.to_string()))?;
        Ok(egress)
    }

    /// Says aloud that the guest may reach everything, if that was asked for.
    pub fn warn(&self, quiet: bool) {
        if self.allow.iter().any(|rule| rule == "all") {
            output::remark(
                quiet,
                "warning: the guest may reach every public address (--allow all)",
            );
        }
    }
}

/// The flags of `fork` and `restore` that say what a copy gets.
#[derive(Clone, Debug, Default, Args)]
pub struct OverrideFlags {
    /// Tap and addresses for a network card; the first is for eth0:
    /// [tap=NAME|auto][,ip=ADDRESS/PREFIX[,gw=ADDRESS]][,dns=ADDRESS][,mac=MAC|random][,bps=SIZE][,pps=N]
    #[arg(long, value_name = "CARD", value_parser = overrides::net_text)]
    pub net: Vec<String>,
    /// Another image for a drive, by its name in the guest:
    /// vdc=PATH[,ro][,direct][,cache=…][,engine=…][,bps=SIZE][,iops=N]
    #[arg(long, value_name = "vdX=DRIVE", value_parser = overrides::drive_text)]
    pub drive: Vec<String>,
    /// Where the socket of its vsock device is shown; the guest connects to PATH_PORT beside it
    /// [default: in the VM's directory]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub vsock: Option<PathBuf>,
    /// Its address on its vsock device, from 3 to 4294967294 [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..i64::from(u32::MAX)))]
    pub cid: Option<u32>,
}

impl OverrideFlags {
    pub fn copy_flags(&self) -> CopyFlags {
        let Self { net, drive, vsock, cid } = self.clone();
        CopyFlags { net, drive, vsock, cid }
    }
}
