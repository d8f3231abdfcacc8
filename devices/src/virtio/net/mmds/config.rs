//! What the host asks of the metadata service of a network card.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

/// How a guest gets at its metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MmdsVersion {
    /// By asking.
    #[default]
    V1,
    /// With a token, which it has to get first.
    V2,
}

/// A metadata service on a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmdsConfig {
    /// Where the guest finds it; a link-local address.
    pub ipv4: Ipv4Addr,
    pub version: MmdsVersion,
    /// Always answers as the metadata services of clouds do, whatever a request says that it accepts.
    pub imds_compat: bool,
}

impl Default for MmdsConfig {
    fn default() -> Self {
        let ipv4 = Ipv4Addr::new(169, 254, 169, 254);
        Self { ipv4, version: MmdsVersion::V1, imds_compat: false }
    }
}

impl MmdsConfig {
    /// Whether the address is one of 169.254.1.0 to 169.254.254.255 (RFC 3927 section 2.1).
    pub fn has_good_address(&self) -> bool {
        matches!(self.ipv4.octets(), [169, 254, 1..=254, _])
    }
}
