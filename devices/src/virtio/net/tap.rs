//! The host's end of a network card: a tap that carries a virtio header before each frame.
//!
//! It knows nothing of rings. A test puts a socket in its place, which keeps frames apart just as well.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use super::config::TapSource;
use super::device::feature;
use super::sys::{self, TapFlags};

const NODE: &str = "/dev/net/tun";
/// The kernel's limit, with the NUL that ends a name.
pub const NAME_MAX: usize = 15;

/// What the tap may hand over with unfinished checksums or unsegmented, in the kernel's bits.
const TUN_F_CSUM: u32 = 0x01;
const TUN_F_TSO4: u32 = 0x02;
const TUN_F_TSO6: u32 = 0x04;
const TUN_F_TSO_ECN: u32 = 0x08;

/// What is wrong with a tap.
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
    #[error("cannot be set up")]
    SetUp(#[source] io::Error),
}

/// Where frames come from and go to, each with its header; no call waits.
pub trait Link: Send {
    fn fd(&self) -> BorrowedFd<'_>;
    /// From now on frames may come with the `TUN_F_` work left undone.
    fn set_offload(&mut self, offload: u32) -> io::Result<()>;
    fn name(&self) -> &str;
}

/// A tap interface, attached.
pub struct Tap {
    file: File,
    name: String,
}

impl Tap {
    pub fn open(source: TapSource, mtu: Option<u16>) -> Result<Self, TapError> {
        let (file, passed) = match source {
            TapSource::Name(name) => (attach(&name)?, false),
            TapSource::Auto => (attach("")?, false),
            TapSource::File(file) => {
                sys::set_nonblocking(file.as_fd()).map_err(TapError::SetUp)?;
                (file, true)
            }
        };
        let (name, flags) = sys::tap_facts(file.as_fd()).map_err(|_| TapError::Kind)?;
        if !flags.contains(TapFlags::OURS) {
            return Err(TapError::Kind);
        }
        sys::set_header_len(file.as_fd()).map_err(TapError::SetUp)?;
        if !passed && !flags.contains(TapFlags::PERSISTENT) {
            // It exists since just now, so nobody else can have brought it up.
            sys::bring_up(&name, mtu).map_err(TapError::SetUp)?;
        }
        Ok(Self { file, name })
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

/// A name that the kernel takes as it is: no pattern such as `tap%d`, nothing that is a path.
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

    fn name(&self) -> &str {
        &self.name
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// What the tap may leave undone for a driver that agreed to `features`. Without checksums there is no
/// segmentation: the kernel would refuse it, and so does the specification.
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
    // ECN alone means nothing.
    let segmentation = if segmentation == TUN_F_TSO_ECN { 0 } else { segmentation };
    TUN_F_CSUM | segmentation
}
