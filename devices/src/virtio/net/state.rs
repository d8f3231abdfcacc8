//! The state that a snapshot keeps of a network card, in addition to its queues.
//!
//! Frames are not part of it: those in a tap or on their way are lost, as on any network. The
//! content of a metadata service is not part of it either, because it describes one machine and not
//! its forks.

use serde::{Deserialize, Serialize};

use super::config::{self, Mac, NetError};
use super::mmds::MmdsConfig;

/// The state of a network card at the time of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetStateV1 {
    pub mac: Mac,
    pub mtu: Option<u16>,
    pub mmds: Option<MmdsConfig>,
}

impl NetStateV1 {
    /// Refuses an invalid state, and a configuration with another MTU: the guest has read the saved
    /// one.
    pub(super) fn check(&self, requested_mtu: Option<u16>) -> Result<(), NetError> {
        config::check_mac(Some(self.mac))?;
        config::check_mtu(self.mtu)?;
        config::check_mmds(self.mmds)?;
        match requested_mtu {
            Some(here) if self.mtu != Some(here) => {
                Err(NetError::SavedMtu { saved: self.mtu, here })
            }
            _ => Ok(()),
        }
    }
}
