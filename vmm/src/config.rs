//! The description of a machine: typed by the caller, checked once, before anything is made.
//!
//! A boot starts from a `VmConfig`, a restore from a template and `Overrides`; a bad value is
//! refused here by the name of its field, so that no later step has to doubt what it was given.

mod host;
mod open;

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use crate::cpu::{CpuBaseline, PHYSICAL_BITS};
use crate::error::{Error, ErrorKind};
pub use host::{Console, HostOptions, Registers};
pub use pvmm_devices::bus::BusDevice;
use pvmm_devices::rate_limiter::RateLimiterError;
pub use pvmm_devices::rate_limiter::{BucketConfig, RateLimiterConfig};
use pvmm_devices::virtio::balloon::{BalloonConfig, pages_of_mib};
pub use pvmm_devices::virtio::block::{CacheMode, EngineKind};
pub use pvmm_devices::virtio::net::{
    Mac, MacError, MmdsConfig, MmdsVersion, NetConfig as Net, SOCKET_NAME, TapSource,
};
use pvmm_devices::virtio::registry::{DeviceConfig, DeviceKind};
use pvmm_devices::virtio::rng::RngConfig;
pub use pvmm_devices::virtio::vsock::MAX_UDS_PATH;
use pvmm_devices::virtio::vsock::VsockConfig;

/// The most vCPUs a machine may have.
pub const MAX_VCPUS: u32 = 32;
/// The least memory that a Linux guest can start in, in MiB.
pub const MIN_MEMORY_MIB: u64 = 32;
/// The most memory that a machine may have, in MiB (1 TiB).
pub const MAX_MEMORY_MIB: u64 = 1 << 20;
/// The most memory of a machine with a level of the x86-64 psABI, in MiB: one GiB of the physical
/// addresses that its guest has is a hole.
const MAX_LEVEL_MEMORY_MIB: u64 = (1 << (PHYSICAL_BITS - 20)) - 1024;
/// The longest kernel command line, devices included.
pub const MAX_CMDLINE: usize = 2048;
/// The most drives a machine may have.
pub const MAX_DRIVES: usize = 16;
/// The most network cards a machine may have.
pub const MAX_NETS: usize = 8;

/// A machine to boot.
///
/// ```no_run
/// use pvmm::{Drive, Kvm, Vm, VmConfig};
///
/// let mut config = VmConfig::new("vmlinux");
/// config.memory_mib = 512;
/// config.drives.push(Drive::read_only("rootfs.ext4"));
/// let mut vm = Vm::boot(&Kvm::open()?, config)?;
/// vm.resume()?;
/// # Ok::<(), pvmm::Error>(())
/// ```
#[derive(Debug)]
pub struct VmConfig {
    /// ELF `vmlinux` or `bzImage`.
    pub kernel: KernelSource,
    /// The initial RAM disk, which brings the agent; `None`, the default, boots without one.
    pub initrd: Option<Initrd>,
    /// The kernel command line; the devices are added to it.
    pub cmdline: String,
    /// Guest memory in MiB, [`MIN_MEMORY_MIB`] to [`MAX_MEMORY_MIB`]; 256 by default.
    pub memory_mib: u64,
    /// The number of vCPUs, 1 to [`MAX_VCPUS`]; 1 by default.
    pub vcpus: u32,
    /// Two vCPUs are threads of one core; their number is then even.
    pub smt: bool,
    /// The processor features that the guest is offered; those of this host by default.
    pub cpu: CpuBaseline,
    /// Block devices, in order: `/dev/vda`, `/dev/vdb`, …
    pub drives: Vec<Drive>,
    /// Network cards, in order: `eth0`, `eth1`, … None by default.
    pub nets: Vec<Net>,
    /// The socket device by which the host reaches the agent; `None`, the default, leaves it out.
    pub vsock: Option<Vsock>,
    /// A device by which the guest gives memory back.
    pub balloon: Option<Balloon>,
    /// A virtio entropy device.
    pub rng: bool,
    /// Listen for the agent's word that it is ready, beside the vsock's socket, for
    /// [`crate::Vm::agent`] to wait for. Without it that call only connects.
    pub awaits_agent: bool,
    /// Tell the guest of a keyboard, for [`crate::Vm::press_ctrl_alt_del`]. Looking for one takes
    /// it a moment.
    pub keyboard: bool,
    /// How the kernel is entered; [`BootProtocol::Auto`] by default.
    pub boot_protocol: BootProtocol,
    /// Registers of the caller's own, for guests that expect some; none by default. They are not
    /// part of a snapshot.
    pub registers: Vec<Registers>,
    /// The host's side of the VM.
    pub host: HostOptions,
}

/// Where the kernel's image is.
#[derive(Debug)]
pub enum KernelSource {
    /// The file at this path, opened when the machine boots.
    Path(PathBuf),
    /// A file that is already open.
    File(File),
}

impl<P: Into<PathBuf>> From<P> for KernelSource {
    fn from(path: P) -> Self {
        Self::Path(path.into())
    }
}

/// An initial RAM disk, in a file or already in memory.
#[derive(Debug)]
pub enum Initrd {
    /// The file at this path, read when the machine boots.
    Path(PathBuf),
    /// These bytes.
    Bytes(Vec<u8>),
}

/// A raw disk image.
#[derive(Debug)]
pub struct Drive {
    /// Where the drive's bytes are.
    pub source: DriveSource,
    /// The guest cannot write to the drive.
    pub read_only: bool,
    /// The drive's serial number as the guest reads it, at most 20 bytes of ASCII.
    pub id: String,
    /// Whether a flush of the guest reaches the host's disk.
    pub cache: CacheMode,
    /// How the host's file is read and written.
    pub engine: EngineKind,
    /// Past the host's page cache. The guest then sees the block size that this takes.
    pub direct: bool,
    /// The rate at which the guest may read and write.
    pub limits: RateLimiterConfig,
}

/// Where a drive's bytes are.
#[derive(Debug)]
pub enum DriveSource {
    /// The image at this path, opened when the machine is made. The guest's writes go to the file
    /// itself.
    Path(PathBuf),
    /// An image that is already open, perhaps without a name.
    File(File),
    /// The image of this path, which the caller has opened with the access that the drive needs. A
    /// snapshot refers to it by its path.
    Opened {
        /// The open image.
        file: File,
        /// The image opened a second time, to be read when the machine is frozen.
        reader: File,
        /// Its path, which is not opened again.
        path: PathBuf,
    },
    /// An image that stays as it is, below an empty file without a name that the guest's writes go
    /// to.
    Over {
        /// The image, which is only read.
        base: File,
        /// The empty file.
        top: File,
    },
    /// Opened when the machine is resumed for the first time, unless it was replaced by then. Only
    /// for machines that go on from a template; one that boots opens it at once.
    Later(PathBuf),
}

/// A socket between guest and host.
#[derive(Debug)]
pub struct Vsock {
    /// The guest's context id, 3 or more.
    pub guest_cid: u32,
    /// Host clients connect here and say `CONNECT port`; the guest's own connections arrive at
    /// `<uds_path>_<port>`.
    pub uds_path: PathBuf,
    /// The socket's file stays when the machine ends, for callers that want to remove it
    /// themselves.
    pub keep_socket: bool,
    /// The guest's own connections go to `<dial_path>_<port>` instead, for a process that sees the
    /// sockets of others at another path than its own.
    pub dial_path: Option<PathBuf>,
}

impl Vsock {
    /// A socket whose file goes with the machine.
    pub fn new(guest_cid: u32, uds_path: impl Into<PathBuf>) -> Self {
        Self { guest_cid, uds_path: uds_path.into(), keep_socket: false, dial_path: None }
    }
}

impl From<Vsock> for VsockConfig {
    fn from(Vsock { guest_cid, uds_path, keep_socket, dial_path }: Vsock) -> Self {
        Self { guest_cid: guest_cid.into(), uds_path, keep_socket, dial_path }
    }
}

/// How a guest gives memory back that it does not need. All of it is off by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balloon {
    /// How much the guest is to give up at first; `Vm::set_balloon` changes it.
    pub target_mib: u64,
    /// The guest may take pages back rather than kill a process.
    pub deflate_on_oom: bool,
    /// The guest names free blocks all the time, and the host takes them.
    pub free_page_reporting: bool,
    /// The guest can be asked for its free pages, with `Vm::hint_free_pages`.
    pub free_page_hinting: bool,
}

impl Balloon {
    /// Configures the device, in a machine with so much memory.
    fn device(self, memory_mib: u64) -> DeviceConfig {
        DeviceConfig::Balloon(BalloonConfig {
            limit_pages: pages_of_mib(memory_mib),
            target_pages: pages_of_mib(self.target_mib),
            deflate_on_oom: self.deflate_on_oom,
            free_page_reporting: self.free_page_reporting,
            free_page_hinting: self.free_page_hinting,
        })
    }
}

/// Configures an entropy device.
fn rng(limits: RateLimiterConfig) -> DeviceConfig {
    DeviceConfig::Rng(RngConfig::default().limits(limits))
}

/// How the kernel is entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BootProtocol {
    /// PVH where the kernel has its note, otherwise the 64-bit Linux protocol.
    #[default]
    Auto,
    /// PVH; a kernel without the note for it is refused, and so is every `bzImage`.
    Pvh,
    /// The 64-bit Linux protocol.
    Linux64,
}

/// A field that cannot be accepted, and what would be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// The number of vCPUs is odd although `smt` is set.
    #[error("vcpus: {0} is odd, and smt makes cores of two")]
    Threads(u32),
    /// The number of vCPUs is zero or too large.
    #[error("vcpus: {0} is not between 1 and {MAX_VCPUS}")]
    Vcpus(u32),
    /// The memory is too small or too large; the value is in MiB.
    #[error("memory: {0} MiB is not between {MIN_MEMORY_MIB} and {MAX_MEMORY_MIB}")]
    Memory(u64),
    /// The memory is too large for a level of the x86-64 psABI, whose guests have narrow physical
    /// addresses; the value is in MiB.
    #[error("memory: {0} MiB is more than the {MAX_LEVEL_MEMORY_MIB} MiB of a processor baseline")]
    LevelMemory(u64),
    /// The kernel command line is too long or not ASCII.
    #[error("cmdline: {0}")]
    Cmdline(&'static str),
    /// There are too many drives.
    #[error("drives: {0} is more than {MAX_DRIVES}")]
    Drives(usize),
    /// The rate limit of a drive can never work.
    #[error("drive: rate limit of {0}")]
    Limits(RateLimiterError),
    /// The rate limit of the entropy device can never work.
    #[error("rng: rate limit of {0}")]
    RngLimits(RateLimiterError),
    /// There are too many network cards.
    #[error("nets: {0} is more than {MAX_NETS}")]
    Nets(usize),
    /// A network card is configured wrongly.
    #[error("net {index}: {why}")]
    Net {
        /// Its place among the cards, from 0.
        index: usize,
        /// The reason.
        why: String,
    },
    /// The balloon would take more than all of guest memory.
    #[error("balloon: a target of {target} MiB is more than the memory, {memory} MiB")]
    Balloon {
        /// The balloon's target in MiB.
        target: u64,
        /// Guest memory in MiB.
        memory: u64,
    },
    /// The guest's context id is below 3 or all ones.
    #[error("vsock: guest cid {0} is reserved; use 3 or more")]
    Cid(u32),
    /// A path contains a NUL byte; the value names the field.
    #[error("{0}: the path contains a NUL byte")]
    Nul(&'static str),
    /// The page does not exist, or is taken twice.
    #[error("registers at {0:#x}: not a free page from 0xc0000000 to 0xd0000000")]
    Registers(u64),
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        Error::new(ErrorKind::InvalidConfig, "bad configuration", error)
    }
}

impl VmConfig {
    /// One vCPU, 256 MiB, an entropy device, nothing else.
    pub fn new(kernel: impl Into<KernelSource>) -> Self {
        Self {
            kernel: kernel.into(),
            initrd: None,
            cmdline: String::new(),
            memory_mib: 256,
            vcpus: 1,
            smt: false,
            cpu: CpuBaseline::Host,
            drives: Vec::new(),
            nets: Vec::new(),
            vsock: None,
            balloon: None,
            rng: true,
            awaits_agent: true,
            keyboard: false,
            boot_protocol: BootProtocol::default(),
            registers: Vec::new(),
            host: HostOptions::default(),
        }
    }

    /// Takes the configurations of the devices other than drives, in the order in which the guest
    /// will number them.
    pub(crate) fn take_devices(&mut self) -> Vec<DeviceConfig> {
        let nets = std::mem::take(&mut self.nets).into_iter().map(DeviceConfig::Net);
        let vsock = self.vsock.take().map(|vsock| DeviceConfig::Vsock(vsock.into()));
        let rng = self.rng.then(|| rng(self.host.rng_limits));
        let balloon = self.balloon.map(|balloon| balloon.device(self.memory_mib));
        nets.chain(vsock).chain(rng).chain(balloon).collect()
    }

    /// Refuses what no machine can be, naming the field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.vcpus == 0 || self.vcpus > MAX_VCPUS {
            return Err(ConfigError::Vcpus(self.vcpus));
        }
        if self.smt && !self.vcpus.is_multiple_of(2) {
            return Err(ConfigError::Threads(self.vcpus));
        }
        if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&self.memory_mib) {
            return Err(ConfigError::Memory(self.memory_mib));
        }
        let is_level = matches!(self.cpu, CpuBaseline::Level(_));
        if is_level && self.memory_mib > MAX_LEVEL_MEMORY_MIB {
            return Err(ConfigError::LevelMemory(self.memory_mib));
        }
        if !self.cmdline.is_ascii() || self.cmdline.contains('\0') {
            return Err(ConfigError::Cmdline("only printable ASCII is accepted"));
        }
        if self.cmdline.len() >= MAX_CMDLINE {
            return Err(ConfigError::Cmdline("longer than 2047 bytes"));
        }
        if self.drives.len() > MAX_DRIVES {
            return Err(ConfigError::Drives(self.drives.len()));
        }
        if let KernelSource::Path(path) = &self.kernel {
            no_nul("kernel", path)?;
        }
        if let Some(Initrd::Path(path)) = &self.initrd {
            no_nul("initrd", path)?;
        }
        for drive in &self.drives {
            if let DriveSource::Path(path) | DriveSource::Later(path) = &drive.source {
                no_nul("drive", path)?;
            }
            drive.limits.validate().map_err(ConfigError::Limits)?;
        }
        if self.nets.len() > MAX_NETS {
            return Err(ConfigError::Nets(self.nets.len()));
        }
        for (index, net) in self.nets.iter().enumerate() {
            net.validate().map_err(|error| ConfigError::Net { index, why: with_causes(&error) })?;
        }
        self.host.rng_limits.validate().map_err(ConfigError::RngLimits)?;
        let (Range { start: mut from, end }, page) = (Registers::ADDRESSES, Registers::SIZE);
        let mut addresses: Vec<_> = self.registers.iter().map(|it| it.address).collect();
        addresses.sort_unstable();
        for address in addresses {
            if address < from || address >= end || !address.is_multiple_of(page) {
                return Err(ConfigError::Registers(address));
            }
            from = address + page;
        }
        if let Some(Balloon { target_mib: target, .. }) = self.balloon
            && target > self.memory_mib
        {
            return Err(ConfigError::Balloon { target, memory: self.memory_mib });
        }
        if let Some(vsock) = &self.vsock {
            // 0 to 2 are the hypervisor, loopback and the host; all ones means "any".
            if vsock.guest_cid < 3 || vsock.guest_cid == u32::MAX {
                return Err(ConfigError::Cid(vsock.guest_cid));
            }
            no_nul("vsock", &vsock.uds_path)?;
        }
        Ok(())
    }
}

impl Drive {
    /// Describes a drive that the guest only reads, backed by the image at `path`.
    pub fn read_only(path: impl Into<PathBuf>) -> Self {
        Self::new(DriveSource::Path(path.into()), true)
    }

    /// Describes a drive that the guest writes in place, in the image at `path`.
    pub fn writable(path: impl Into<PathBuf>) -> Self {
        Self::new(DriveSource::Path(path.into()), false)
    }

    /// A writable image that is already open.
    pub fn from_file(file: File) -> Self {
        Self::new(DriveSource::File(file), false)
    }

    /// A disk of the machine's own that begins as `base`, which stays as it is; writes go to the
    /// empty file `top`.
    pub fn over(base: File, top: File) -> Self {
        Self::new(DriveSource::Over { base, top }, false)
    }

    fn new(source: DriveSource, read_only: bool) -> Self {
        Self {
            source,
            read_only,
            id: String::new(),
            cache: CacheMode::default(),
            engine: EngineKind::default(),
            direct: false,
            limits: RateLimiterConfig::default(),
        }
    }
}

/// An error and its causes in one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |error| error.source())
        .fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

fn no_nul(field: &'static str, path: &std::path::Path) -> Result<(), ConfigError> {
    if path.as_os_str().as_encoded_bytes().contains(&0) {
        Err(ConfigError::Nul(field))
    } else {
        Ok(())
    }
}

/// The parts of a machine that its template cannot give it.
#[derive(Debug, Default)]
pub struct Overrides {
    /// Its own socket; without one it takes the template's, which only one machine at a time can
    /// have.
    pub vsock: Option<Vsock>,
    /// Other drives, by their place in the template.
    pub drives: Vec<(usize, Drive)>,
    /// Other taps and addresses, by their place; without one a card takes the interface of the
    /// template's name.
    pub nets: Vec<(usize, Net)>,
    /// How much of the template's working set is prefaulted; [`Prefault::InKvm`] by default.
    pub prefault: Prefault,
    /// Move the guest's clock on by the time that it did not run, instead of hiding that from it:
    /// timers that have run out meanwhile fire at once.
    pub catch_up: bool,
    /// The host's side of the VM. Of memory that comes from a file only what the guest writes can
    /// be in huge pages.
    pub host: HostOptions,
    /// The socket of a process that supplies the memory; see [`crate::Template::fork`].
    pub page_server: Option<PathBuf>,
}

impl Overrides {
    /// Returns what the host supplies for a saved device without a backend.
    pub(crate) fn device(&self, kind: DeviceKind) -> Option<DeviceConfig> {
        (kind == DeviceKind::Rng).then(|| rng(self.host.rng_limits))
    }
}

/// How much of a template's working set is prefaulted before the machine runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefault {
    /// Each page when it is touched.
    Nothing,
    /// The pages, in this process.
    Mapped,
    /// The pages, and their places in KVM's tables where it can do that.
    #[default]
    InKvm,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn refused(change: impl FnOnce(&mut VmConfig)) -> ConfigError {
        let mut config = VmConfig::new("vmlinux");
        assert_eq!(config.validate(), Ok(()));
        change(&mut config);
        config.validate().unwrap_err()
    }

    #[test]
    fn validate_of_impossible_sizes_names_the_field() {
        for vcpus in [0, 33, u32::MAX] {
            assert_eq!(refused(|c| c.vcpus = vcpus), ConfigError::Vcpus(vcpus));
        }
        assert_eq!(refused(|c| (c.vcpus, c.smt) = (3, true)), ConfigError::Threads(3));
        for memory in [0, 1, 31, MAX_MEMORY_MIB + 1, u64::MAX] {
            assert_eq!(refused(|c| c.memory_mib = memory), ConfigError::Memory(memory));
        }
    }

    #[test]
    fn j5_validate_of_bad_command_line_is_refused() {
        for cmdline in ["a\0b".to_owned(), "ä".to_owned(), "x".repeat(MAX_CMDLINE)] {
            assert!(matches!(refused(|c| c.cmdline = cmdline), ConfigError::Cmdline(_)));
        }
    }

    #[test]
    fn validate_of_path_with_nul_names_the_field() {
        assert_eq!(refused(|c| c.kernel = "a\0".into()), ConfigError::Nul("kernel"));
        let drive = Drive::read_only("a\0b");
        assert_eq!(refused(|c| c.drives.push(drive)), ConfigError::Nul("drive"));
    }

    #[test]
    fn validate_of_limit_that_lets_nothing_through_is_refused() {
        let mut drive = Drive::read_only("a");
        drive.limits.ops = Some(BucketConfig::per_second(0));
        let error = refused(|c| c.drives.push(drive));
        assert!(matches!(error, ConfigError::Limits(_)), "{error}");
    }

    #[test]
    fn d11_validate_of_bad_network_card_names_it() {
        let net = |name: &str| Net::new(TapSource::Name(name.to_owned()));
        let refused_net = refused(|c| c.nets = vec![net("tap0"), net("tap%d")]);
        assert!(refused_net.to_string().starts_with("net 1: tap \"tap%d\": "), "{refused_net}");
        let many = || (0..MAX_NETS + 1).map(|index| net(&format!("tap{index}"))).collect();
        assert_eq!(refused(|c| c.nets = many()), ConfigError::Nets(MAX_NETS + 1));
    }

    #[test]
    fn validate_of_balloon_larger_than_memory_is_refused() {
        let balloon = Balloon { target_mib: 257, ..Balloon::default() };
        let error = refused(|c| c.balloon = Some(balloon));
        assert_eq!(error, ConfigError::Balloon { target: 257, memory: 256 });
    }

    #[test]
    fn validate_of_registers_outside_their_place_or_twice_is_refused() {
        struct Nothing;
        impl BusDevice for Nothing {
            fn read(&self, _: u64, _: &mut [u8]) {}
            fn write(&self, _: u64, _: &[u8]) {}
        }
        let page = |address| Registers { address, device: Arc::new(Nothing) };
        let mut config = VmConfig::new("vmlinux");
        config.registers = vec![page(0xcfff_f000), page(0xc000_0000)];
        assert_eq!(config.validate(), Ok(()));
        for address in [0, 0xbfff_f000, 0xc000_0800, 0xd000_0000, u64::MAX] {
            let error = refused(|c| c.registers = vec![page(address)]);
            assert_eq!(error, ConfigError::Registers(address));
        }
        let twice = refused(|c| c.registers = vec![page(0xc000_1000), page(0xc000_1000)]);
        assert_eq!(twice, ConfigError::Registers(0xc000_1000));
    }

    #[test]
    fn validate_of_reserved_cid_is_refused() {
        for guest_cid in [0, 1, 2, u32::MAX] {
            let vsock = Vsock::new(guest_cid, "v.sock");
            assert_eq!(refused(|c| c.vsock = Some(vsock)), ConfigError::Cid(guest_cid));
        }
    }
}
