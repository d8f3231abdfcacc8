//! The source of randomness while no driver uses it.
//!
//! It has no features, no configuration space, and no host descriptor.

use super::super::registry::{DeviceKind, DeviceState};
use super::super::{Activation, VirtioDevice, Worker};
use super::config::RngConfig;
use super::state::RngStateV1;
use super::worker::RngWorker;
use crate::rate_limiter::{RateLimiter, RateLimiterConfig};

/// A virtio source of randomness.
#[derive(Debug, Default)]
pub struct Rng {
    pub(super) config: RngConfig,
    pub(super) limiter: Option<RateLimiter>,
}

impl Rng {
    pub fn new(config: RngConfig) -> Self {
        Self { config, limiter: None }
    }

    /// One that gives only so much per time.
    pub fn limited(config: RngConfig, limits: &RateLimiterConfig) -> Self {
        Self { config, limiter: limits.is_limited().then(|| RateLimiter::new(limits)) }
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

    fn activate(self: Box<Self>, activation: Activation) -> Box<dyn Worker> {
        Box::new(RngWorker::new(*self, activation))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng(RngStateV1 {})
    }

    fn rewind(&mut self, _state: &DeviceState) {}
}
