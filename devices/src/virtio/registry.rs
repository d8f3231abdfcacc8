//! The closed list of virtio devices.
//!
//! Adding one adds a variant here, and the compiler then names every place that must know of it.

use serde::{Deserialize, Serialize};

use super::balloon::{BalloonStateV1, BalloonUpdate};
use super::block::{BlockStateV1, BlockUpdate};
use super::net::{NetStateV1, NetStateV2, NetUpdate};
use super::rng::RngStateV1;
use super::vsock::{VsockStateV1, VsockStateV2};

/// A kind of device, numbered as virtio 1.2 section 5 does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum DeviceKind {
    Net = 1,
    Block = 2,
    Rng = 4,
    Balloon = 5,
    Vsock = 19,
}

impl DeviceKind {
    /// The word used in logs, metrics and errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Net => "net",
            Self::Block => "block",
            Self::Rng => "rng",
            Self::Balloon => "balloon",
            Self::Vsock => "vsock",
        }
    }
}

/// The saved state of one device, whatever its kind. Untrusted when it comes from a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    Block(BlockStateV1),
    Rng(RngStateV1),
    /// Read, no longer written.
    Vsock(VsockStateV1),
    /// Read, no longer written.
    Net(NetStateV1),
    Balloon(BalloonStateV1),
    NetV2(NetStateV2),
    VsockV2(VsockStateV2),
}

impl DeviceState {
    pub fn kind(&self) -> DeviceKind {
        match self {
            Self::Block(_) => DeviceKind::Block,
            Self::Rng(_) => DeviceKind::Rng,
            Self::Vsock(_) | Self::VsockV2(_) => DeviceKind::Vsock,
            Self::Net(_) | Self::NetV2(_) => DeviceKind::Net,
            Self::Balloon(_) => DeviceKind::Balloon,
        }
    }
}

/// What the host may change about a device while the machine lives.
#[derive(Debug)]
pub enum DeviceUpdate {
    Block(BlockUpdate),
    Balloon(BalloonUpdate),
    Net(NetUpdate),
}
