//! What a snapshot keeps of a network card, beyond its queues.
//!
//! Frames are not here: those in a tap or on their way are lost, as networks lose frames.

use serde::{Deserialize, Serialize};

use super::config::{self, Mac, NetError};

/// A network card at the moment of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetStateV1 {
    pub mac: Mac,
    pub mtu: Option<u16>,
}

impl NetStateV1 {
    /// Refuses a saved card that never was, and a wish for another MTU: the guest has read the old one.
    pub(super) fn check(&self, wished_mtu: Option<u16>) -> Result<(), NetError> {
        config::check_mac(Some(self.mac))?;
        config::check_mtu(self.mtu)?;
        match wished_mtu {
            Some(here) if self.mtu != Some(here) => {
                Err(NetError::SavedMtu { saved: self.mtu, here })
            }
            _ => Ok(()),
        }
    }
}
