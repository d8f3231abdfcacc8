//! The network cards of a running machine, and what may be changed about them.

use pvmm_devices::virtio::DeviceKind;
use pvmm_devices::virtio::net::NetUpdate;
use pvmm_devices::virtio::registry::DeviceUpdate;

use crate::config::{ConfigError, RateLimiterConfig};
use crate::error::{Error, ErrorKind};
use crate::vm::Vm;

impl Vm {
    /// Sets what the guest may receive and send through card `index` per time; `None` leaves a direction as
    /// it is, and limits without a bucket lift them.
    pub fn limit_net(
        &self,
        index: usize,
        rx: Option<RateLimiterConfig>,
        tx: Option<RateLimiterConfig>,
    ) -> Result<(), Error> {
        for limits in [rx, tx].into_iter().flatten() {
            let why = |error| ConfigError::Net { index, why: format!("rate limit of {error}") };
            limits.validate().map_err(why)?;
        }
        let mut cards = self.transports.iter().filter(|one| one.kind() == DeviceKind::Net);
        let Some(card) = cards.nth(index) else {
            let count = self.held.taps.len();
            let act = format!("network card {index}: the machine has {count}, counted from 0");
            return Err(Error::plain(ErrorKind::InvalidConfig, act));
        };
        Ok(card.update(DeviceUpdate::Net(NetUpdate::Limits { rx, tx }))?)
    }
}
