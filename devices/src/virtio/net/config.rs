//! The host's configuration of a network card, and the configuration space that the guest reads.
//!
//! The configuration is checked here as far as possible without opening anything; `tap.rs` checks
//! the tap itself.

use std::fmt;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::mmds::MmdsConfig;
use super::tap::{self, TapError};
use crate::rate_limiter::{RateLimiterConfig, RateLimiterError};
use crate::sys;

/// The minimum MTU of IPv4, and the maximum that a frame can carry.
pub const MTU_MIN: u16 = 68;
pub const MTU_MAX: u16 = 65535;

/// A hardware address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mac(pub [u8; 6]);

/// The error for text that is not a hardware address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write six pairs of hexadecimal digits, such as 02:00:00:00:00:01")]
pub struct MacError;

/// Why a network card could not be created.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    #[error("mac {mac} is a group address or all zero; use one such as 02:00:00:00:00:01")]
    Mac { mac: Mac },
    #[error("mtu {mtu} is not between {MTU_MIN} and {MTU_MAX}")]
    Mtu { mtu: u16 },
    #[error("metadata service: {ipv4} is not one of 169.254.1.0 to 169.254.254.255")]
    Metadata { ipv4: Ipv4Addr },
    #[error("{direction} limit")]
    Limit {
        direction: &'static str,
        #[source]
        source: RateLimiterError,
    },
    #[error("no random hardware address, or no timer for the limits")]
    Host(#[source] io::Error),
    #[error("tap {name}")]
    Tap {
        name: String,
        #[source]
        source: TapError,
    },
    #[error("saved card has {}, this one was asked to have {here}", show_mtu(*saved))]
    SavedMtu { saved: Option<u16>, here: u16 },
}

/// The tap, or the socket in its place, that a card uses.
#[derive(Debug)]
pub enum TapSource {
    /// The tap of this name. An existing one is used if it is free; otherwise the tap is created,
    /// brought up, and removed with the machine.
    Name(String),
    /// A new tap with a name that the kernel picks.
    Auto,
    /// A tap that the caller has opened, without packet information and with virtio headers.
    File(File),
    /// A connected SOCK_SEQPACKET Unix socket whose peer handles the frames, each one message with
    /// a virtio header. The card then has no offloads.
    Socket(OwnedFd),
}

/// The host's configuration of a network card.
#[derive(Debug)]
pub struct NetConfig {
    pub tap: TapSource,
    /// Random if None.
    pub mac: Option<Mac>,
    /// Reported to the guest, and set on a tap that is created for it.
    pub mtu: Option<u16>,
    /// The limits of what the guest may receive and send.
    pub rx_limit: RateLimiterConfig,
    pub tx_limit: RateLimiterConfig,
    /// A metadata service that the guest reaches through this card.
    pub mmds: Option<MmdsConfig>,
}

impl NetConfig {
    pub fn new(tap: TapSource) -> Self {
        let (rx_limit, tx_limit) = <_>::default();
        Self { tap, mac: None, mtu: None, rx_limit, tx_limit, mmds: None }
    }

    /// Checks everything that does not require the tap.
    pub fn validate(&self) -> Result<(), NetError> {
        check_mac(self.mac)?;
        check_mtu(self.mtu)?;
        check_mmds(self.mmds)?;
        for (direction, limit) in [("receive", &self.rx_limit), ("send", &self.tx_limit)] {
            limit.validate().map_err(|source| NetError::Limit { direction, source })?;
        }
        if let TapSource::Name(name) = &self.tap {
            tap::check_name(name)
                .map_err(|source| NetError::Tap { name: format!("{name:?}"), source })?;
        }
        Ok(())
    }
}

pub(super) fn check_mac(mac: Option<Mac>) -> Result<(), NetError> {
    match mac {
        Some(mac) if mac.0[0] & 1 != 0 || mac.0 == [0; 6] => Err(NetError::Mac { mac }),
        _ => Ok(()),
    }
}

pub(super) fn check_mtu(mtu: Option<u16>) -> Result<(), NetError> {
    match mtu {
        Some(mtu) if !(MTU_MIN..=MTU_MAX).contains(&mtu) => Err(NetError::Mtu { mtu }),
        _ => Ok(()),
    }
}

pub(super) fn check_mmds(mmds: Option<MmdsConfig>) -> Result<(), NetError> {
    match mmds {
        Some(mmds) if !mmds.has_good_address() => Err(NetError::Metadata { ipv4: mmds.ipv4 }),
        _ => Ok(()),
    }
}

fn show_mtu(mtu: Option<u16>) -> String {
    mtu.map_or_else(|| "no mtu".to_owned(), |mtu| format!("mtu {mtu}"))
}

impl Mac {
    /// Creates a random, locally administered address.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 6];
        if sys::random(&mut bytes)? != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // Locally administered, not a group address.
        bytes[0] = bytes[0] & !1 | 2;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, MacError> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(MacError)?;
            // `from_str_radix` alone would also take a sign.
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(MacError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| MacError)?;
        }
        parts.next().map_or(Ok(Self(bytes)), |_| Err(MacError))
    }
}

/// Returns the configuration space of virtio 1.2 section 5.1.4, up to the MTU.
pub fn space(mac: Mac, mtu: Option<u16>) -> Vec<u8> {
    let mut space = mac.0.to_vec();
    // Status and number of queue pairs: neither feature is offered, so neither is read.
    space.extend([0; 4]);
    space.extend(mtu.unwrap_or(0).to_le_bytes());
    space
}
