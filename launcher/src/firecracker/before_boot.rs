//! The configuration of a VM that has not booted, built by requests.
//!
//! Each part is validated when it arrives, so that the client that sent it gets the error. Any
//! request that configures a VM to boot rules out loading a snapshot instead.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use pvmm::config::{
    BucketConfig, MAX_DRIVES, MAX_MEMORY_MIB, MAX_NETS, MAX_UDS_PATH, MAX_VCPUS, MIN_MEMORY_MIB,
};
use pvmm::cpu::CpuModifiers;
use pvmm::{
    CacheMode, Console, CpuBaseline, DriveSource, EngineKind, Initrd, Mac, Net, RateLimiterConfig,
    TapSource, VmConfig, open,
};

use super::bodies::{
    Balloon, BootSource, CacheType, Config, CpuTemplate, Drive, Entropy, HugePages, IoEngine,
    MachineConfig, MmdsConfig, MmdsVersion, NetworkInterface, Serial, TokenBucket, Vsock,
    limits_of,
};
use super::cpu_templates;
use super::http::Refusal;
use super::logger;

/// The beginning of the names of Firecracker's vCPU threads; clients look for them.
pub const VCPU_THREADS: &str = "fc_vcpu ";
/// The kernel command line if the client sets none; Firecracker's default.
const DEFAULT_BOOT_ARGS: &str = "reboot=k panic=1 nomodule 8250.nr_uarts=0 i8042.noaux i8042.nomux \
                                 i8042.dumbkbd swiotlb=noforce";

#[derive(Debug, Default)]
pub struct BeforeBoot {
    pub config: Config,
    pub serial: Serial,
    /// The bits of `cpu-config`, unless a later request named a CPU template.
    cpu_config: Option<CpuModifiers>,
    has_kernel: bool,
    /// A request has configured a part of a VM to boot.
    described: bool,
}

impl BeforeBoot {
    pub fn is_described(&self) -> bool {
        self.described
    }

    pub fn put_boot_source(&mut self, source: BootSource) -> Result<(), Refusal> {
        self.described = true;
        let refuse = |what: &str, path: &str, error| {
            Refusal::bad(format!("Boot source: {what} {path:?}: {error}"))
        };
        let kernel = &source.kernel_image_path;
        open::file(Path::new(kernel), open::Access::Read)
            .map_err(|e| refuse("kernel_image_path", kernel, e))?;
        if let Some(initrd) = &source.initrd_path {
            open::image(Path::new(initrd), open::Access::Read)
                .map_err(|e| refuse("initrd_path", initrd, e))?;
        }
        let args = source.boot_args.as_deref().unwrap_or_default();
        if !args.is_ascii() || args.contains('\0') || args.len() >= pvmm::config::MAX_CMDLINE {
            let what = "Boot source: boot_args must be ASCII, without NUL, at most 2047 bytes.";
            return Err(Refusal::bad(what));
        }
        self.config.boot_source = source;
        self.has_kernel = true;
        Ok(())
    }

    pub fn put_machine(&mut self, machine: MachineConfig) -> Result<(), Refusal> {
        self.described = true;
        check_machine(&machine)?;
        let balloon = self.config.balloon.as_ref().map_or(0, |balloon| balloon.amount_mib);
        if u64::from(balloon) > machine.mem_size_mib {
            let what = "Machine config: mem_size_mib is less than the balloon's amount_mib.";
            return Err(Refusal::bad(what));
        }
        // The later one of a named template and `cpu-config` is in force, and a request without a
        // template changes neither.
        let cpu_template = match machine.cpu_template {
            None => self.config.machine_config.cpu_template,
            Some(named) => {
                self.cpu_config = None;
                Some(named).filter(|named| *named != CpuTemplate::None)
            }
        };
        self.config.machine_config = MachineConfig { cpu_template, ..machine };
        Ok(())
    }

    pub fn put_cpu_config(&mut self, modifiers: CpuModifiers) {
        self.described = true;
        self.config.machine_config.cpu_template = None;
        self.cpu_config = Some(modifiers);
    }

    /// Refuses a CPU template that is for processors of another vendor than this host's.
    pub fn check_vendor(&self, here: &str) -> Result<(), Refusal> {
        let named = self.config.machine_config.cpu_template;
        match named.and_then(|named| Some((named, cpu_templates::facts(named)?.0))) {
            Some((named, vendor)) if vendor != here => Err(Refusal::bad(format!(
                "Start microvm error: cpu_template {named:?} is for processors of {vendor}, and \
                 this host's is of {here}; leave it out, or name one for {here}."
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the processor features that the guest is offered.
    fn cpu(&self) -> CpuBaseline {
        let named = self.config.machine_config.cpu_template.and_then(cpu_templates::facts);
        let modifiers = named.map(|(_, modifiers)| modifiers).or(self.cpu_config.clone());
        modifiers.unwrap_or_default().into()
    }

    pub fn put_drive(&mut self, drive: Drive) -> Result<(), Refusal> {
        self.described = true;
        let place = self.config.drives.iter().position(|d| d.drive_id == drive.drive_id);
        let root = self.config.drives.iter().position(|drive| drive.is_root_device);
        if drive.is_root_device && root.is_some() && root != place {
            return Err(Refusal::bad("Drive config: A root block device already exists!"));
        }
        if place.is_none() && self.config.drives.len() >= MAX_DRIVES {
            return Err(Refusal::bad(format!("Drive config: {MAX_DRIVES} drives are the most.")));
        }
        check_drive(&drive)?;
        let is_root = drive.is_root_device;
        // Stored with the defaults filled in, as `GET /vm/config` returns it.
        let drive = Drive {
            is_read_only: Some(drive.read_only()),
            io_engine: Some(drive.io_engine.unwrap_or_default()),
            ..drive
        };
        match place {
            Some(place) => self.config.drives[place] = drive,
            None => self.config.drives.push(drive),
        }
        // The root drive is the guest's first disk.
        if is_root {
            let place = place.unwrap_or(self.config.drives.len() - 1);
            self.config.drives[..=place].rotate_right(1);
        }
        Ok(())
    }

    pub fn put_net(&mut self, net: NetworkInterface) -> Result<(), Refusal> {
        self.described = true;
        let others =
            || self.config.network_interfaces.iter().filter(|n| n.iface_id != net.iface_id);
        if let Some(mac) = &net.guest_mac
            && others().any(|n| n.guest_mac.as_ref().is_some_and(|m| m.eq_ignore_ascii_case(mac)))
        {
            let what = format!("Network config: The MAC address is already in use: {mac}");
            return Err(Refusal::bad(what));
        }
        if others().any(|other| other.host_dev_name == net.host_dev_name) {
            let name = &net.host_dev_name;
            let what = format!("Network config: host_dev_name {name:?} is another interface's.");
            return Err(Refusal::bad(what));
        }
        net_config(&net)?;
        let nets = &mut self.config.network_interfaces;
        match nets.iter().position(|n| n.iface_id == net.iface_id) {
            Some(place) => nets[place] = net,
            None if nets.len() >= MAX_NETS => {
                return Err(Refusal::bad(format!("Network config: {MAX_NETS} are the most.")));
            }
            None => nets.push(net),
        }
        Ok(())
    }

    pub fn put_vsock(&mut self, vsock: Vsock) -> Result<(), Refusal> {
        self.described = true;
        check_vsock_path(&vsock.uds_path)?;
        if vsock.guest_cid < 3 || vsock.guest_cid == u32::MAX {
            let what = "Vsock config: guest_cid must be 3 or more, and less than 4294967295.";
            return Err(Refusal::bad(what));
        }
        self.config.vsock = Some(Vsock { vsock_id: None, ..vsock });
        Ok(())
    }

    pub fn put_balloon(&mut self, balloon: Balloon) -> Result<(), Refusal> {
        self.described = true;
        if u64::from(balloon.amount_mib) > self.config.machine_config.mem_size_mib {
            return Err(Refusal::bad("Balloon config: amount_mib is more than the memory."));
        }
        self.config.balloon = Some(balloon);
        Ok(())
    }

    pub fn put_entropy(&mut self, entropy: Entropy) -> Result<(), Refusal> {
        self.described = true;
        limits_of(entropy.rate_limiter)
            .validate()
            .map_err(|error| Refusal::bad(format!("Entropy config: rate_limiter {error}")))?;
        self.config.entropy = Some(entropy);
        Ok(())
    }

    pub fn put_serial(&mut self, serial: Serial) -> Result<(), Refusal> {
        let bytes = console_limit(&serial);
        RateLimiterConfig { bytes, ops: None }
            .validate()
            .map_err(|error| Refusal::bad(format!("Serial: rate_limiter: {error}")))?;
        self.serial = serial;
        Ok(())
    }

    pub fn put_mmds_config(&mut self, config: MmdsConfig) -> Result<(), Refusal> {
        self.described = true;
        if config.network_interfaces.is_empty() {
            return Err(Refusal::bad("MMDS config: network_interfaces is empty."));
        }
        if !is_link_local(config.address()) {
            let what = "MMDS config: ipv4_address is not in 169.254.1.0 to 169.254.254.255.";
            return Err(Refusal::bad(what));
        }
        let known = |id: &String| self.config.network_interfaces.iter().any(|n| n.iface_id == *id);
        if let Some(unknown) = config.network_interfaces.iter().find(|id| !known(id)) {
            let what = format!("MMDS config: there is no network interface {unknown:?}.");
            return Err(Refusal::bad(what));
        }
        let ipv4_address = Some(config.address());
        self.config.mmds_config = Some(MmdsConfig { ipv4_address, ..config });
        Ok(())
    }

    /// Builds the `VmConfig` of the configured VM. Fails without a kernel.
    pub fn machine(&self) -> Result<VmConfig, Refusal> {
        if !self.has_kernel {
            let what = "Start microvm error: Cannot start microvm without kernel configuration.";
            return Err(Refusal::bad(what));
        }
        let config = &self.config;
        let mut machine = VmConfig::new(&config.boot_source.kernel_image_path);
        machine.initrd = config.boot_source.initrd_path.as_ref().map(|p| Initrd::Path(p.into()));
        machine.cmdline = command_line(config);
        machine.memory_mib = config.machine_config.mem_size_mib;
        machine.vcpus = config.machine_config.vcpu_count.into();
        machine.cpu = self.cpu();
        // A single vCPU has no sibling thread, whatever the request says.
        machine.smt = config.machine_config.smt && machine.vcpus > 1;
        machine.drives = config
            .drives
            .iter()
            .map(|drive| drive_config(drive, DriveSource::Path))
            .collect::<Result<_, _>>()?;
        machine.nets = config
            .network_interfaces
            .iter()
            .map(|net| card(config, net))
            .collect::<Result<_, _>>()?;
        machine.vsock = config.vsock.as_ref().map(vsock_config);
        machine.balloon = config.balloon.as_ref().map(balloon_config);
        machine.rng = config.entropy.is_some();
        machine.host.rng_limits = limits_of(config.entropy.as_ref().and_then(|e| e.rate_limiter));
        machine.host.track_changes = config.machine_config.track_dirty_pages;
        machine.host.huge_pages = config.machine_config.huge_pages != HugePages::None;
        machine.host.vcpu_thread_prefix = VCPU_THREADS.into();
        machine.keyboard = true;
        machine.host.console = console(&self.serial)?;
        machine.host.console_limit = console_limit(&self.serial);
        // A client of this API may use another agent, on a port of its own choice.
        machine.awaits_agent = false;
        Ok(machine)
    }
}

fn check_machine(machine: &MachineConfig) -> Result<(), Refusal> {
    let vcpus = u32::from(machine.vcpu_count);
    if vcpus == 0 || vcpus > MAX_VCPUS || machine.smt && vcpus > 1 && vcpus % 2 == 1 {
        return Err(Refusal::bad(format!(
            "Machine config: vcpu_count must be 1 to {MAX_VCPUS}, and 1 or even with smt."
        )));
    }
    let whole = machine.huge_pages == HugePages::None || machine.mem_size_mib.is_multiple_of(2);
    if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&machine.mem_size_mib) || !whole {
        return Err(Refusal::bad(format!(
            "Machine config: mem_size_mib must be {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB}, and even \
             with huge_pages."
        )));
    }
    if machine.cpu_template == Some(CpuTemplate::V1N1) {
        let what = "Machine config: cpu_template V1N1 is for aarch64; leave it out.";
        return Err(Refusal::bad(what));
    }
    Ok(())
}

fn check_drive(drive: &Drive) -> Result<(), Refusal> {
    if drive.socket.is_some() {
        let what = "Drive config: socket: vhost-user is not supported; give path_on_host instead.";
        return Err(Refusal::bad(what));
    }
    let Some(path) = &drive.path_on_host else {
        return Err(Refusal::bad("Drive config: path_on_host is missing."));
    };
    check_image(path, drive.read_only())?;
    limits_of(drive.rate_limiter)
        .validate()
        .map_err(|error| Refusal::bad(format!("Drive config: rate_limiter: {error}")))
}

/// Refuses a path that cannot back a drive, while the client that names it can still be answered.
pub fn check_image(path: &str, read_only: bool) -> Result<(), Refusal> {
    let refuse = |why: String| Refusal::bad(format!("Drive config: path_on_host {path:?}: {why}"));
    let access = if read_only { open::Access::Read } else { open::Access::ReadWrite };
    open::image(Path::new(path), access).map_err(|error| refuse(error.to_string()))?;
    Ok(())
}

pub fn check_vsock_path(path: &str) -> Result<(), Refusal> {
    if path.is_empty() || path.len() > MAX_UDS_PATH || path.contains('\0') {
        return Err(Refusal::bad(format!(
            "Vsock config: uds_path must have 1 to {MAX_UDS_PATH} bytes, none of them NUL."
        )));
    }
    Ok(())
}

/// Builds the kernel command line: the client's arguments, then those that the drives require, and
/// last what the client gave for the init process.
fn command_line(config: &Config) -> String {
    let given = config.boot_source.boot_args.as_deref().unwrap_or(DEFAULT_BOOT_ARGS).trim();
    let (kernel, init) = given.split_at(given.find(" -- ").unwrap_or(given.len()));
    let mut line = kernel.to_owned();
    line.push_str(" pci=off");
    if let Some(root) = config.drives.iter().find(|drive| drive.is_root_device) {
        match &root.partuuid {
            Some(uuid) => line.push_str(&format!(" root=PARTUUID={uuid}")),
            None => line.push_str(" root=/dev/vda"),
        }
        line.push_str(if root.read_only() { " ro" } else { " rw" });
    }
    line.push_str(init);
    line.trim_start().to_owned()
}

/// Builds the device configuration of a drive. `source` decides when its image is opened.
pub fn drive_config(
    drive: &Drive,
    source: impl FnOnce(PathBuf) -> DriveSource,
) -> Result<pvmm::Drive, Refusal> {
    let path = resolved(drive.path_on_host.as_deref().unwrap_or_default());
    let mut made = pvmm::Drive::writable(path.clone());
    made.source = source(path);
    made.read_only = drive.read_only();
    // A serial number is at most 20 ASCII characters (virtio 1.2, section 5.2.6).
    made.id = drive.drive_id.chars().filter(char::is_ascii).take(20).collect();
    made.cache = match drive.cache_type {
        CacheType::Unsafe => CacheMode::Unsafe,
        CacheType::Writeback => CacheMode::Writeback,
    };
    made.engine = match drive.io_engine.unwrap_or_default() {
        IoEngine::Sync => EngineKind::Plain,
        IoEngine::Async => EngineKind::IoUring,
    };
    made.limits = limits_of(drive.rate_limiter);
    Ok(made)
}

/// Resolves symbolic links: clients of this API name images by links, such as those in /dev/mapper.
pub fn resolved(path: &str) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| Path::new(path).to_owned())
}

/// Builds the configuration of a network device, with the metadata service if it is enabled there.
fn card(config: &Config, net: &NetworkInterface) -> Result<Net, Refusal> {
    let here = |mmds: &&MmdsConfig| mmds.network_interfaces.contains(&net.iface_id);
    let mmds = config.mmds_config.as_ref().filter(here).map(|mmds| pvmm::MmdsConfig {
        ipv4: mmds.address(),
        version: match mmds.version {
            MmdsVersion::V1 => pvmm::MmdsVersion::V1,
            MmdsVersion::V2 => pvmm::MmdsVersion::V2,
        },
        imds_compat: mmds.imds_compat,
    });
    Ok(Net { mmds, ..net_config(net)? })
}

/// Builds the configuration of a network device, without a metadata service.
pub fn net_config(net: &NetworkInterface) -> Result<Net, Refusal> {
    let refuse = |why: String| Refusal::bad(format!("Network config: {}: {why}", net.iface_id));
    let mac = match &net.guest_mac {
        Some(text) => {
            let mac = text.parse::<Mac>();
            Some(mac.map_err(|error| refuse(format!("guest_mac {text:?}: {error}")))?)
        }
        None => None,
    };
    let card = Net {
        mac,
        mtu: net.mtu,
        rx_limit: limits_of(net.rx_rate_limiter),
        tx_limit: limits_of(net.tx_rate_limiter),
        ..Net::new(TapSource::Name(net.host_dev_name.clone()))
    };
    card.validate().map_err(|error| {
        let why = std::error::Error::source(&error).map(|why| format!(": {why}"));
        refuse(format!("{error}{}", why.unwrap_or_default()))
    })?;
    Ok(card)
}

pub fn vsock_config(vsock: &Vsock) -> pvmm::Vsock {
    // Firecracker leaves the socket in place, and some clients fail if there is none to remove.
    let mut socket = pvmm::Vsock::new(vsock.guest_cid, &vsock.uds_path);
    socket.keep_socket = true;
    socket
}

fn balloon_config(balloon: &Balloon) -> pvmm::Balloon {
    pvmm::Balloon {
        target_mib: balloon.amount_mib.into(),
        deflate_on_oom: balloon.deflate_on_oom,
        free_page_reporting: balloon.free_page_reporting,
        free_page_hinting: balloon.free_page_hinting,
    }
}

/// Opens the output of the guest's serial console.
pub fn console(serial: &Serial) -> Result<Console, Refusal> {
    let Some(path) = &serial.serial_out_path else { return Ok(Console::Stdout) };
    let file = logger::open(path)
        .map_err(|error| Refusal::bad(format!("Serial: serial_out_path {path:?}: {error}")))?;
    Ok(Console::File(file))
}

/// Returns the rate limit of the serial console's output.
pub fn console_limit(serial: &Serial) -> Option<BucketConfig> {
    serial.rate_limiter.and_then(TokenBucket::config)
}

fn is_link_local(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    (a, b) == (169, 254) && (1..=254).contains(&c)
}

#[cfg(test)]
#[path = "before_boot_tests.rs"]
mod tests;
