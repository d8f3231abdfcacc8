//! The source of randomness while no driver uses it.
//!
//! It has no features, no configuration space, and no host file descriptor.

use super::super::registry::{DeviceKind, DeviceState};
use super::super::{Rings, VirtioDevice, Worker};
use super::config::RngConfig;
use super::state::RngStateV1;
use super::worker::RngWorker;
use crate::rate_limiter::{RateLimiter, RateLimiterError};

/// A virtio source of randomness.
#[derive(Debug, Default)]
pub struct Rng {
    pub(super) config: RngConfig,
    pub(super) limiter: Option<RateLimiter>,
}

impl Rng {
    /// Opens a source. A saved one has no state, so a restore does the same.
    pub fn new(config: RngConfig) -> Result<Self, RateLimiterError> {
        config.validate()?;
        let limits = &config.limits;
        Ok(Self { config, limiter: limits.is_limited().then(|| RateLimiter::new(limits)) })
    }
}

impl VirtioDevice for Rng {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rng
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[256]
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn activate(self: Box<Self>, _rings: &mut Rings, _features: u64) -> Box<dyn Worker> {
        Box::new(RngWorker(*self))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng(RngStateV1 {})
    }

    fn rewind(&mut self, _state: &DeviceState) {}
}
