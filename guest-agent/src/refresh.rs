//! Refreshes a fork, step by step in a fixed order, before its workload continues.
//!
//! Every restore waits for it, so it starts no program and waits for nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use pvmm_guest_agent::limits::{
    MAX_ADDRESSES, MAX_CERTIFICATE, MAX_ENTROPY, MAX_HOSTNAME, MAX_INTERFACE_NAME, MAX_INTERFACES,
    MAX_SECRETS, MAX_TRUST_ENV, MIN_ENTROPY,
};
use pvmm_guest_agent::message::{ByteBuf, FailedStep, Interface, Refresh, RefreshStep, Refreshed};

use crate::cgroup::Cgroups;
use crate::netlink::{self, Prefixed};
use crate::{mounts, sys, trust};

/// The directory with the fork's own data; in memory, so that no disk contains it.
const PLACE: &str = "/run/pvmm";
const SECRETS: &str = "/run/pvmm/secrets";
const MACHINE_ID: &str = "/etc/machine-id";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const RESOLVER: &str = "/etc/resolv.conf";

/// The settings of the last refresh for later execs.
#[derive(Default)]
pub struct Identity {
    pub generation: u64,
    pub env: Vec<(ByteBuf, ByteBuf)>,
    /// Variables that came with an authority; a refresh without one keeps them.
    pub trust_env: Vec<(ByteBuf, ByteBuf)>,
    /// A secret was delivered at some time.
    pub had_secrets: bool,
    /// Opened at the start, so that a refresh need not look it up.
    random: Option<OwnedFd>,
}

impl Identity {
    pub fn new() -> Self {
        Self { random: sys::open(c"/dev/urandom", libc::O_RDWR, 0).ok(), ..Self::default() }
    }
}

/// Refuses a request that can never work, before the first step.
pub fn check(request: &Refresh) -> Result<(), &'static str> {
    if !(MIN_ENTROPY..=MAX_ENTROPY).contains(&request.entropy.len()) {
        return Err("entropy is not 32 to 512 bytes");
    }
    let ids = [&request.machine_id, &request.boot_id];
    if ids.into_iter().flatten().any(|id| id.len() != 16) {
        return Err("machine_id or boot_id is not 16 bytes");
    }
    if request.hostname.as_ref().is_some_and(|name| !is_hostname(name)) {
        return Err("hostname is empty, too long, or not of letters, digits, dots and dashes");
    }
    if request.interfaces.len() > MAX_INTERFACES {
        return Err("interfaces are too many");
    }
    request.interfaces.iter().try_for_each(check_interface)?;
    let dns = request.dns.as_deref().unwrap_or_default();
    if dns.len() > MAX_ADDRESSES || dns.iter().any(|it| it.parse::<std::net::IpAddr>().is_err()) {
        return Err("dns has an entry that is no address, or too many");
    }
    if request.secrets.len() > MAX_SECRETS {
        return Err("secrets are too many");
    }
    let bad_name = |name: &str| {
        name.is_empty() || name.len() > 255 || name.contains(['/', '\0']) || name.starts_with('.')
    };
    if request.secrets.iter().any(|(name, _)| bad_name(name)) {
        return Err("a secret's name is not that of a file");
    }
    if let Some(trust) = &request.trust
        && (trust.certificate.len() > MAX_CERTIFICATE || trust.env.len() > MAX_TRUST_ENV)
    {
        return Err("trust has a certificate that is too long, or too many variables");
    }
    Ok(())
}

fn is_hostname(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    (1..=MAX_HOSTNAME).contains(&name.len()) && name.chars().all(plain)
}

fn check_interface(interface: &Interface) -> Result<(), &'static str> {
    let name = &interface.name;
    if name.is_empty() || name.len() > MAX_INTERFACE_NAME || name.contains(['/', '\0']) {
        return Err("an interface's name is empty or too long");
    }
    if interface.mac.as_ref().is_some_and(|mac| mac.len() != 6 || mac[0] & 1 != 0) {
        return Err("an interface's mac is not six bytes, or is a group address");
    }
    let (addresses, gateways) = (&interface.addresses, &interface.gateways);
    if addresses.len() > MAX_ADDRESSES || gateways.len() > MAX_ADDRESSES {
        return Err("an interface's addresses are too many");
    }
    if addresses.iter().any(|text| Prefixed::parse(text).is_none()) {
        return Err("an interface's address is not ADDRESS/PREFIX");
    }
    if gateways.iter().any(|text| text.parse::<std::net::IpAddr>().is_err()) {
        return Err("a gateway is no address");
    }
    Ok(())
}

impl Identity {
    /// Carries out every requested step. When one fails, none follows it and the workload is
    /// frozen, whatever it did before.
    pub fn refresh(&mut self, request: &Refresh, cgroups: &mut Option<Cgroups>) -> Refreshed {
        let mut report = Refreshed::default();
        for step in request.steps() {
            if let Err(error) = self.take_step(step, request, cgroups) {
                if let Some(cgroups) = cgroups {
                    cgroups.hold();
                }
                let message: String = error.to_string().chars().take(200).collect();
                let errno = error.raw_os_error();
                report.failed = Some(FailedStep { step, errno, message });
                return report;
            }
            report.steps.push(step);
        }
        report
    }

    fn take_step(
        &mut self,
        step: RefreshStep,
        request: &Refresh,
        cgroups: &mut Option<Cgroups>,
    ) -> io::Result<()> {
        match step {
            RefreshStep::Entropy => {
                let random = self.random.as_ref().ok_or(ErrorKind::NotFound)?;
                sys::system::add_entropy(random, &request.entropy)
            }
            RefreshStep::Clock => {
                let passed =
                    request.counter.map_or(0, |it| it.ns_until(sys::system::time_stamp_counter()));
                sys::system::set_clock(request.unix_ns.unwrap_or(0).saturating_add(passed))
            }
            RefreshStep::Hostname => {
                sys::system::set_hostname(request.hostname.as_deref().unwrap_or_default())
            }
            RefreshStep::MachineId => {
                let id = request.machine_id.as_deref().map_or(&[][..], |id| id);
                show(MACHINE_ID, format!("{}\n", hex(id)).as_bytes())
            }
            RefreshStep::BootId => {
                let id = request.boot_id.as_deref().map_or(&[][..], |id| id);
                show(BOOT_ID, format!("{}\n", uuid(id)).as_bytes())
            }
            RefreshStep::Addresses => configure_network(request),
            RefreshStep::Generation => {
                self.generation = request.generation;
                let path = format!("{PLACE}/generation");
                let text = format!("{}\n", request.generation);
                write(&path, text.as_bytes()).or_else(|_| {
                    make_place(PLACE, 0o755)?;
                    write(&path, text.as_bytes())
                })
            }
            RefreshStep::Env => {
                self.env.clone_from(&request.env);
                self.deliver_secrets(&request.secrets)
            }
            RefreshStep::Trust => {
                let Some(trust) = &request.trust else { return Ok(()) };
                trust::add(Path::new("/"), &trust.certificate)?;
                self.trust_env = trust::env();
                self.trust_env.extend(trust.env.iter().cloned());
                Ok(())
            }
            RefreshStep::Thaw => match cgroups {
                Some(cgroups) => cgroups.thaw(),
                None => Ok(()),
            },
            RefreshStep::Other => Ok(()),
        }
    }

    fn deliver_secrets(&mut self, secrets: &[(String, ByteBuf)]) -> io::Result<()> {
        if self.had_secrets {
            match fs::remove_dir_all(SECRETS) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        if secrets.is_empty() {
            return Ok(());
        }
        self.had_secrets = true;
        make_place(SECRETS, 0o700)?;
        for (name, value) in secrets {
            let path = format!("{SECRETS}/{name}");
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
            file.write_all(value)?;
        }
        Ok(())
    }
}

fn configure_network(request: &Refresh) -> io::Result<()> {
    for interface in &request.interfaces {
        netlink::configure(interface)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", interface.name)))?;
    }
    if let Some(dns) = &request.dns {
        let lines: String = dns.iter().map(|server| format!("nameserver {server}\n")).collect();
        show(RESOLVER, lines.as_bytes())?;
    }
    Ok(())
}

/// Makes a path contain these bytes: by writing them, or where that fails, by mounting a file over
/// it. The workload may have put anything there, so the contents are read back and compared.
fn show(path: &str, bytes: &[u8]) -> io::Result<()> {
    if write(path, bytes).is_err() {
        mount_over(path, bytes)?;
    }
    let mut shown = vec![0; bytes.len() + 1];
    let count = open_plain(OpenOptions::new().read(true), path)?.read(&mut shown)?;
    if shown.get(..count) == Some(bytes) {
        Ok(())
    } else {
        Err(io::Error::other(format!("{path} does not change")))
    }
}

fn mount_over(path: &str, bytes: &[u8]) -> io::Result<()> {
    if fs::metadata(path).is_err_and(|e| e.kind() == ErrorKind::NotFound) {
        // A dangling link: nothing can be mounted there, but a file can replace it.
        fs::remove_file(path)?;
        return write(path, bytes);
    }
    make_place(PLACE, 0o755)?;
    let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
    let ours = format!("{PLACE}/{name}");
    write(&ours, bytes)?;
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o444))?;
    mounts::bind(&ours, path)
}

/// Writes a file in place: one of equal length keeps its page of memory.
fn write(path: &str, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = open_plain(options.write(true).create(true).truncate(false), path)?;
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)
}

/// Opens a regular file, without ever blocking.
fn open_plain(options: &mut OpenOptions, path: &str) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(ErrorKind::InvalidInput.into()) }
}

fn make_place(path: &str, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes a random UUID of sixteen random bytes.
fn uuid(bytes: &[u8]) -> String {
    let mut bytes = bytes.to_vec();
    if let [.., version, _, variant, _, _, _, _, _, _, _] = &mut bytes[..] {
        *version = *version & 0x0f | 0x40;
        *variant = *variant & 0x3f | 0x80;
    }
    let text = hex(&bytes);
    let parts = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)];
    parts.map(|(from, to)| text.get(from..to).unwrap_or_default()).join("-")
}

#[cfg(test)]
mod tests {
    use pvmm_guest_agent::message::{Counter, Trust};

    use super::*;

    #[test]
    fn uuid_of_random_bytes_says_that_it_is_random() {
        assert_eq!(uuid(&[0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(uuid(&[0; 16]), "00000000-0000-4000-8000-000000000000");
    }

    #[test]
    fn time_since_a_count_is_that_of_its_rate_and_none_where_that_cannot_be() {
        let counter = Counter { at: 1_000, khz: 2_000_000 };
        assert_eq!(counter.ns_until(1_000 + 5_000_000), 2_500_000);
        let wrong = [(counter, 999), (counter, u64::MAX), (Counter { at: 0, khz: 0 }, 7)];
        assert!(wrong.iter().all(|(counter, now)| counter.ns_until(*now) == 0));
    }

    #[test]
    fn refresh_that_can_never_work_is_refused() {
        let good = || Refresh { entropy: ByteBuf::from([1; 256]), ..Refresh::default() };
        assert_eq!(check(&good()), Ok(()));
        let interface = |name: &str| Interface { name: name.into(), ..Interface::default() };
        let with = |interface| Refresh { interfaces: vec![interface], ..good() };
        assert_eq!(check(&with(interface("eth0"))), Ok(()));
        for bad in [
            Refresh::default(),
            Refresh { machine_id: Some(ByteBuf::from([0; 15])), ..good() },
            Refresh { boot_id: Some(ByteBuf::from([0; 17])), ..good() },
            Refresh { hostname: Some("a b".into()), ..good() },
            Refresh { hostname: Some(String::new()), ..good() },
            Refresh { dns: Some(vec!["example.org".into()]), ..good() },
            Refresh { secrets: vec![("../x".into(), ByteBuf::new())], ..good() },
            Refresh { secrets: vec![("..".into(), ByteBuf::new())], ..good() },
            Refresh {
                trust: Some(Trust { certificate: ByteBuf::from([0; 16385]), env: Vec::new() }),
                ..good()
            },
            with(interface("")),
            with(interface("a-name-too-long-x")),
            with(Interface { mac: Some(ByteBuf::from([1; 6])), ..interface("eth0") }),
            with(Interface { addresses: vec!["10.0.0.1".into()], ..interface("eth0") }),
            with(Interface { gateways: vec!["10.0.0.1/8".into()], ..interface("eth0") }),
        ] {
            assert!(check(&bad).is_err(), "{bad:?}");
        }
    }
}
