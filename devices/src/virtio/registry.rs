//! The closed list of virtio devices, and how a device of any kind is opened and restored.
//!
//! A new device adds a variant to the enums here, and the compiler names the places in this crate
//! that must handle it. Outside of it, a setting of the VM opens the device, and an override
//! supplies what it needs from the host at a restore.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::VirtioDevice;
use super::balloon::{Balloon, BalloonConfig, BalloonError, BalloonStateV1, BalloonUpdate};
use super::block::{Block, BlockConfig, BlockError, BlockHandle, BlockStateV1, BlockUpdate};
use super::net::{Net, NetConfig, NetError, NetStateV1, NetUpdate};
use super::rng::{Rng, RngConfig, RngStateV1};
use super::vsock::{Vsock, VsockConfig, VsockError, VsockStateV1};
use crate::rate_limiter::RateLimiterError;

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
    /// Returns the name used in logs, metrics and errors.
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

/// The host's configuration of one device of any kind.
#[derive(Debug)]
pub enum DeviceConfig {
    Net(NetConfig),
    Block(BlockConfig),
    Rng(RngConfig),
    Balloon(BalloonConfig),
    Vsock(VsockConfig),
}

impl DeviceConfig {
    /// Opens the device and the backend behind it.
    pub fn open(self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        Ok(match self {
            Self::Net(config) => Box::new(Net::new(config)?),
            Self::Block(config) => Box::new(Block::new(config)?),
            Self::Rng(config) => Box::new(Rng::new(config)?),
            Self::Balloon(config) => Box::new(Balloon::new(config)),
            Self::Vsock(config) => Box::new(Vsock::open(&config)?),
        })
    }
}

/// Why a device was not opened or not restored.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Net(#[from] NetError),
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error(transparent)]
    Limits(#[from] RateLimiterError),
    #[error(transparent)]
    Balloon(#[from] BalloonError),
    #[error(transparent)]
    Vsock(#[from] VsockError),
    #[error("saved {saved} was given no configuration, or that of another device")]
    Config { saved: &'static str },
}

/// The part of a device's backend that the owner of a machine keeps.
#[derive(Debug)]
pub enum BackendHandle {
    None,
    Disk(BlockHandle),
    /// The name of the host's interface.
    Tap(String),
    /// The path that host clients connect to.
    Socket(PathBuf),
}

/// The saved state of one device of any kind. Untrusted when it comes from a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    Block(BlockStateV1),
    Rng(RngStateV1),
    Vsock(VsockStateV1),
    Net(NetStateV1),
    Balloon(BalloonStateV1),
}

impl DeviceState {
    pub fn kind(&self) -> DeviceKind {
        match self {
            Self::Block(_) => DeviceKind::Block,
            Self::Rng(_) => DeviceKind::Rng,
            Self::Vsock(_) => DeviceKind::Vsock,
            Self::Net(_) => DeviceKind::Net,
            Self::Balloon(_) => DeviceKind::Balloon,
        }
    }

    /// Opens a device that continues from this state. `config` is what the host supplies: None for
    /// a device whose state holds its whole configuration.
    pub fn restore(
        &self,
        config: Option<DeviceConfig>,
    ) -> Result<Box<dyn VirtioDevice>, OpenError> {
        Ok(match (self, config) {
            (Self::Block(state), Some(DeviceConfig::Block(config))) => {
                Box::new(Block::restore(config, state)?)
            }
            (Self::Rng(_), Some(DeviceConfig::Rng(config))) => Box::new(Rng::new(config)?),
            (Self::Vsock(state), Some(DeviceConfig::Vsock(config))) => {
                Box::new(Vsock::open(&config)?.restore(state)?)
            }
            (Self::Net(state), Some(DeviceConfig::Net(config))) => {
                Box::new(Net::restore(config, state)?)
            }
            (Self::Balloon(state), None) => Box::new(Balloon::restore(state)?),
            // Every state by its name, so that the compiler reports one without an arm above.
            (
                Self::Block(_) | Self::Rng(_) | Self::Balloon(_) | Self::Vsock(_) | Self::Net(_),
                _,
            ) => {
                return Err(OpenError::Config { saved: self.kind().name() });
            }
        })
    }
}

/// A change of a device's settings that the host may make while the machine lives.
#[derive(Debug)]
pub enum DeviceUpdate {
    Block(BlockUpdate),
    Balloon(BalloonUpdate),
    Net(NetUpdate),
}
