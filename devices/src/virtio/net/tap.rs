//! The host's end of a network card: a tap that has a virtio header before each frame.
//!
//! It does not depend on rings. A packet socket can take its place (`socket.rs`), because it keeps
//! frame boundaries too.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use super::config::{NetConfig, NetError, TapSource};
use super::device::feature;
use super::socket::{FrameSocket, SOCKET_NAME};
use super::sys::{self, TapFlags};
use crate::GuestMemory;
use crate::virtio::chain::Segment;

const NODE: &str = "/dev/net/tun";
/// The kernel's limit, without the NUL that ends a name.
pub const NAME_MAX: usize = 15;

/// The offloads with which the tap may deliver frames, as the kernel's `TUN_F_` bits.
const TUN_F_CSUM: u32 = 0x01;
const TUN_F_TSO4: u32 = 0x02;
const TUN_F_TSO6: u32 = 0x04;
const TUN_F_TSO_ECN: u32 = 0x08;

/// Why a tap cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    #[error("a name has 1 to {NAME_MAX} letters, digits, '-', '_' or '.', and is not a dot alone")]
    Name,
    #[error("cannot open {NODE}; it takes the tun module and access to that node")]
    Node(#[source] io::Error),
    #[error(
        "cannot be had; it is of another kind, in use, or somebody else's, or making it is not allowed"
    )]
    Attach(#[source] io::Error),
    #[error("the descriptor is not a tap with virtio headers and without packet information")]
    Kind,
    #[error("the descriptor is not a connected Unix socket of type SOCK_SEQPACKET")]
    NotPackets,
    #[error("cannot be set up")]
    SetUp(#[source] io::Error),
}

/// The source and destination of frames with their headers. No call blocks.
pub trait Link: Send {
    fn fd(&self) -> BorrowedFd<'_>;
    /// Allows frames to be delivered with these `TUN_F_` offloads from now on.
    fn set_offload(&mut self, offload: u32) -> io::Result<()>;
    /// Returns whether checksums and segmentation can be left to the link.
    fn has_offloads(&self) -> bool;
    /// Sends one frame: `first`, then guest memory.
    fn send(&self, first: &[u8], memory: &GuestMemory, rest: &[Segment]) -> io::Result<usize>;
    fn name(&self) -> &str;
}

/// Opens the link that a configuration asks for; the error names it.
pub fn open(source: TapSource, mtu: Option<u16>) -> Result<Box<dyn Link>, NetError> {
    let name = name_of(&source);
    let opened: Result<Box<dyn Link>, _> = match source {
        TapSource::Socket(socket) => FrameSocket::open(socket).map(|link| Box::new(link) as _),
        source => Tap::open(source, mtu).map(|tap| Box::new(tap) as _),
    };
    opened.map_err(|source| NetError::Tap { name, source })
}

fn name_of(source: &TapSource) -> String {
    match source {
        TapSource::Name(name) => name.clone(),
        TapSource::Auto => "(to be named by the kernel)".to_owned(),
        TapSource::File(_) => "(passed open)".to_owned(),
        TapSource::Socket(_) => SOCKET_NAME.to_owned(),
    }
}

/// An attached tap interface.
pub struct Tap {
    file: File,
    name: String,
}

impl Tap {
    fn open(source: TapSource, mtu: Option<u16>) -> Result<Self, TapError> {
        let (file, passed) = match source {
            TapSource::Name(name) => (attach(&name)?, false),
            TapSource::Auto => (attach("")?, false),
            TapSource::File(file) => {
                sys::set_nonblocking(file.as_fd()).map_err(TapError::SetUp)?;
                (file, true)
            }
            TapSource::Socket(_) => return Err(TapError::Kind),
        };
        let (name, flags) = sys::tap_facts(file.as_fd()).map_err(|_| TapError::Kind)?;
        if !flags.contains(TapFlags::OURS) {
            return Err(TapError::Kind);
        }
        sys::set_header_len(file.as_fd()).map_err(TapError::SetUp)?;
        if !passed && !flags.contains(TapFlags::PERSISTENT) {
            // The tap was just created, so it is not up yet.
            sys::bring_up(&name, mtu).map_err(TapError::SetUp)?;
        }
        Ok(Self { file, name })
    }
}

impl NetConfig {
    /// Opens or creates the tap now, so that the card can be made without access to its node.
    pub fn open_tap(&mut self) -> Result<(), NetError> {
        if matches!(self.tap, TapSource::Name(_) | TapSource::Auto) {
            let source = std::mem::replace(&mut self.tap, TapSource::Auto);
            let name = name_of(&source);
            let tap = Tap::open(source, self.mtu);
            let tap = tap.map_err(|source| NetError::Tap { name, source })?;
            self.tap = TapSource::File(tap.file);
        }
        Ok(())
    }
}

fn attach(name: &str) -> Result<File, TapError> {
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(NODE)
        .map_err(TapError::Node)?;
    sys::attach_tap(file.as_fd(), name).map_err(TapError::Attach)?;
    Ok(file)
}

/// Checks that the kernel takes a name literally: no pattern such as `tap%d`, and not a path.
pub fn check_name(name: &str) -> Result<(), TapError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let sane = (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(plain);
    if !sane || matches!(name, "." | "..") {
        return Err(TapError::Name);
    }
    Ok(())
}

impl Link for Tap {
    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn set_offload(&mut self, offload: u32) -> io::Result<()> {
        sys::set_offload(self.file.as_fd(), offload)
    }

    fn has_offloads(&self) -> bool {
        true
    }

    fn send(&self, first: &[u8], memory: &GuestMemory, rest: &[Segment]) -> io::Result<usize> {
        sys::write_frame(self.file.as_fd(), first, memory, rest)
    }

    fn name(&self) -> &str {
        &self.name
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Returns the offloads that the tap may use for a driver that accepted `features`. Without
/// checksum offload there is no segmentation: kernel and specification both refuse it.
pub fn offload_for(features: u64) -> u32 {
    if features & feature::GUEST_CSUM == 0 {
        return 0;
    }
    let bits = [
        (feature::GUEST_TSO4, TUN_F_TSO4),
        (feature::GUEST_TSO6, TUN_F_TSO6),
        (feature::GUEST_ECN, TUN_F_TSO_ECN),
    ];
    let wanted = |(feature, bit): &(u64, u32)| if features & feature != 0 { *bit } else { 0 };
    let segmentation: u32 = bits.iter().map(wanted).sum();
    // ECN without a TSO bit has no meaning.
    let segmentation = if segmentation == TUN_F_TSO_ECN { 0 } else { segmentation };
    TUN_F_CSUM | segmentation
}
