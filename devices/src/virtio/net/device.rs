//! A network card that no driver uses: the features it offers, and how it becomes a worker.
//!
//! The tap is opened here, before the machine starts, and stays open across resets.

use std::sync::Arc;

use serde_json::Value;

use super::super::registry::{BackendHandle, DeviceKind, DeviceState, DeviceUpdate};
use super::super::{Rings, UpdateError, Updated, VirtioDevice, Worker};
use super::config::{self, Mac, NetConfig, NetError};
use super::mmds::Mmds;
use super::state::NetStateV1;
use super::tap::{self, Link};
use super::wire::{ETHERNET_LEN, FRAME_MAX, HEADER_LEN};
use super::worker::NetWorker;
use crate::rate_limiter::{RateLimiter, RateLimiterConfig};

pub const QUEUE_SIZE: u16 = 256;
/// The MTU of a driver that was told none.
const MTU_DEFAULT: u16 = 1500;

/// Feature bits of virtio 1.2 section 5.1.3.
pub(super) mod feature {
    pub const CSUM: u64 = 1 << 0;
    pub const GUEST_CSUM: u64 = 1 << 1;
    pub const MTU: u64 = 1 << 3;
    pub const MAC: u64 = 1 << 5;
    pub const GUEST_TSO4: u64 = 1 << 7;
    pub const GUEST_TSO6: u64 = 1 << 8;
    pub const GUEST_ECN: u64 = 1 << 9;
    pub const HOST_TSO4: u64 = 1 << 11;
    pub const HOST_TSO6: u64 = 1 << 12;
    pub const HOST_ECN: u64 = 1 << 13;
    pub const MRG_RXBUF: u64 = 1 << 15;

    pub const GUEST: u64 = GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN;
    pub const HOST: u64 = CSUM | HOST_TSO4 | HOST_TSO6 | HOST_ECN;
    /// Work that a driver leaves to the host's kernel, which only a tap reaches.
    pub const OFFLOADS: u64 = GUEST | HOST;
}

/// A change of a card that the host may make while the machine lives.
#[derive(Clone, Debug)]
pub enum NetUpdate {
    /// The content that the metadata service serves from now on.
    Metadata(Arc<Value>),
    /// New limits for receiving and sending; a direction that is None keeps its limit.
    Limits { rx: Option<RateLimiterConfig>, tx: Option<RateLimiterConfig> },
}

/// A virtio network card.
pub struct Net {
    pub(super) mac: Mac,
    pub(super) mtu: Option<u16>,
    pub(super) link: Box<dyn Link>,
    pub(super) rx_limiter: RateLimiter,
    pub(super) tx_limiter: RateLimiter,
    pub(super) mmds: Option<Mmds>,
    pub(super) host_errors: u64,
}

impl Net {
    /// Opens or creates the tap.
    pub fn new(config: NetConfig) -> Result<Self, NetError> {
        config.validate()?;
        let mac = config.mac.map_or_else(Mac::random, Ok).map_err(NetError::Host)?;
        let link = tap::open(config.tap, config.mtu)?;
        Ok(Self {
            mac,
            mtu: config.mtu,
            link,
            rx_limiter: RateLimiter::new(&config.rx_limit),
            tx_limiter: RateLimiter::new(&config.tx_limit),
            mmds: config.mmds.map(|mmds| Mmds::new(mmds, mac.0)),
            host_errors: 0,
        })
    }

    /// Creates the card of a snapshot on a tap of this host. It keeps its address and its metadata
    /// service unless the configuration names others; the caller must notify the guest of another
    /// address.
    pub fn restore(config: NetConfig, state: &NetStateV1) -> Result<Self, NetError> {
        state.check(config.mtu)?;
        let (mac, mtu) = (config.mac.or(Some(state.mac)), state.mtu);
        let mmds = config.mmds.or(state.mmds);
        Self::new(NetConfig { mac, mtu, mmds, ..config })
    }

    pub(super) fn state(&self) -> NetStateV1 {
        let mmds = self.mmds.as_ref().map(Mmds::config);
        NetStateV1 { mac: self.mac, mtu: self.mtu, mmds }
    }

    pub(super) fn change(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        match update {
            DeviceUpdate::Net(NetUpdate::Metadata(content)) => match &mut self.mmds {
                Some(mmds) => mmds.set_content(content),
                None => {
                    let why = "the card has no metadata service";
                    return Err(UpdateError::Refused(why.to_owned()));
                }
            },
            DeviceUpdate::Net(NetUpdate::Limits { rx, tx }) => {
                rx.iter().for_each(|limit| self.rx_limiter.configure(limit));
                tx.iter().for_each(|limit| self.tx_limiter.configure(limit));
            }
            _ => return Err(UpdateError::NotOfThisDevice),
        }
        Ok(Updated::default())
    }

    /// Returns the length of the longest message with a frame that the link may deliver.
    pub(super) fn message_max(&self) -> usize {
        // Without segmentation offloads a frame is no longer than the MTU allows.
        let packet = usize::from(self.mtu.unwrap_or(MTU_DEFAULT));
        let frame = if self.link.has_offloads() { FRAME_MAX } else { ETHERNET_LEN + packet };
        HEADER_LEN + frame
    }

    /// Counts an error of the tap and returns whether to log it: the first, second, fourth and so
    /// on.
    pub(super) fn add_host_error(&mut self) -> bool {
        self.host_errors = self.host_errors.saturating_add(1);
        self.host_errors.is_power_of_two()
    }
}

impl VirtioDevice for Net {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        let mtu = if self.mtu.is_some() { feature::MTU } else { 0 };
        let offloads = if self.link.has_offloads() { feature::OFFLOADS } else { 0 };
        feature::MAC | feature::MRG_RXBUF | offloads | mtu
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn config(&self) -> Vec<u8> {
        config::space(self.mac, self.mtu)
    }

    fn backend(&self) -> BackendHandle {
        BackendHandle::Tap(self.link.name().to_owned())
    }

    fn activate(self: Box<Self>, rings: &mut Rings, features: u64) -> Box<dyn Worker> {
        Box::new(NetWorker::new(*self, rings, features))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Net(self.state())
    }

    fn rewind(&mut self, _state: &DeviceState) {
        // Address and MTU never change.
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        self.change(update)
    }
}
