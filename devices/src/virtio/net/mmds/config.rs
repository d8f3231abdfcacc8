//! The host's configuration of the metadata service of a network card.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

/// The version of the metadata protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MmdsVersion {
    /// A guest needs no token.
    #[default]
    V1,
    /// A guest must first get a token.
    V2,
}

/// A metadata service on a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmdsConfig {
    /// The link-local address of the service.
    pub ipv4: Ipv4Addr,
    pub version: MmdsVersion,
    /// Always answers in the format of cloud metadata services, whatever the request accepts.
    pub imds_compat: bool,
}

impl Default for MmdsConfig {
    fn default() -> Self {
        let ipv4 = Ipv4Addr::new(169, 254, 169, 254);
        Self { ipv4, version: MmdsVersion::V1, imds_compat: false }
    }
}

impl MmdsConfig {
    /// Returns whether the address is one of 169.254.1.0 to 169.254.254.255 (RFC 3927 section 2.1).
    pub fn has_good_address(&self) -> bool {
        matches!(self.ipv4.octets(), [169, 254, 1..=254, _])
    }
}
