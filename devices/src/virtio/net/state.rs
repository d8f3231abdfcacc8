//! What a snapshot keeps of a network card, beyond its queues.
//!
//! Frames are not here: those in a tap or on their way are lost, as networks lose frames. Neither is the
//! content of a metadata service, which is about one machine and not about its copies.

use serde::{Deserialize, Serialize};

use super::config::{self, Mac, NetError};
use super::mmds::MmdsConfig;

/// A network card as it was saved before there was a metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetStateV1 {
    pub mac: Mac,
    pub mtu: Option<u16>,
}

/// A network card at the moment of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetStateV2 {
    pub mac: Mac,
    pub mtu: Option<u16>,
    pub mmds: Option<MmdsConfig>,
}

impl From<NetStateV1> for NetStateV2 {
    fn from(NetStateV1 { mac, mtu }: NetStateV1) -> Self {
        Self { mac, mtu, mmds: None }
    }
}

impl NetStateV2 {
    /// Refuses a saved card that never was, and a wish for another MTU: the guest has read the old one.
    pub(super) fn check(&self, wished_mtu: Option<u16>) -> Result<(), NetError> {
        config::check_mac(Some(self.mac))?;
        config::check_mtu(self.mtu)?;
        config::check_mmds(self.mmds)?;
        match wished_mtu {
            Some(here) if self.mtu != Some(here) => {
                Err(NetError::SavedMtu { saved: self.mtu, here })
            }
            _ => Ok(()),
        }
    }
}
