//! Network devices and the metadata service (MMDS) that answers on them.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::{RateLimiter, or_default};

/// `PUT /network-interfaces/{iface_id}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkInterface {
    pub iface_id: String,
    pub host_dev_name: String,
    #[serde(default)]
    pub guest_mac: Option<String>,
    #[serde(default)]
    pub mtu: Option<u16>,
    #[serde(default)]
    pub rx_rate_limiter: Option<RateLimiter>,
    #[serde(default)]
    pub tx_rate_limiter: Option<RateLimiter>,
}

/// `PATCH /network-interfaces/{iface_id}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetUpdate {
    pub iface_id: String,
    #[serde(default)]
    pub rx_rate_limiter: Option<RateLimiter>,
    #[serde(default)]
    pub tx_rate_limiter: Option<RateLimiter>,
}

/// The protocol version of the metadata service; V2 answers only requests with a session token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum MmdsVersion {
    #[default]
    V1,
    V2,
}

/// `PUT /mmds/config`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MmdsConfig {
    #[serde(default, deserialize_with = "or_default")]
    pub version: MmdsVersion,
    pub network_interfaces: Vec<String>,
    #[serde(default)]
    pub ipv4_address: Option<Ipv4Addr>,
    #[serde(default, deserialize_with = "or_default")]
    pub imds_compat: bool,
}

impl MmdsConfig {
    /// Returns the IPv4 address of the metadata service.
    pub fn address(&self) -> Ipv4Addr {
        self.ipv4_address.unwrap_or(Ipv4Addr::new(169, 254, 169, 254))
    }
}
