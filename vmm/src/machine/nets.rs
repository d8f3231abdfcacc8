//! The network cards of a machine: what may be changed about them while it lives.

use std::sync::Arc;

use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::net::{NetUpdate, mmds};
use pvmm_devices::virtio::registry::DeviceUpdate;
use pvmm_devices::virtio::{DeviceKind, MmioTransport, UpdateError};
use serde_json::Value;

use super::Machine;
use crate::config::{ConfigError, RateLimiterConfig};
use crate::error::{Error, ErrorKind};

/// Replaces the content that the metadata services of all network cards serve. Returns how many
/// there are. A snapshot does not keep it.
pub fn set_metadata(machine: &Machine, content: &Arc<Value>) -> Result<usize, Error> {
    let len = content.to_string().len();
    if len > mmds::CONTENT_MAX {
        let most = mmds::CONTENT_MAX;
        let act = format!("metadata: {len} bytes of JSON are more than {most}");
        return Err(Error::plain(ErrorKind::InvalidConfig, act));
    }
    let mut served = 0;
    for card in nets(machine) {
        match card.update(DeviceUpdate::Net(NetUpdate::Metadata(content.clone()))) {
            Ok(()) => served += 1,
            // A card without the service.
            Err(DeviceError::Update(UpdateError::Refused(_))) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(served)
}

/// Sets what the guest may receive and send per time through network card `index`; a direction
/// that is left out keeps its limit.
pub fn limit(
    machine: &Machine,
    index: usize,
    rx: Option<RateLimiterConfig>,
    tx: Option<RateLimiterConfig>,
) -> Result<(), Error> {
    for limit in rx.iter().chain(&tx) {
        limit.validate().map_err(ConfigError::Limits)?;
    }
    let Some(card) = nets(machine).nth(index) else {
        let count = machine.resources.taps.len();
        let act = format!("network card {index}: the machine has {count}, counted from 0");
        return Err(Error::plain(ErrorKind::InvalidConfig, act));
    };
    Ok(card.update(DeviceUpdate::Net(NetUpdate::Limits { rx, tx }))?)
}

fn nets(machine: &Machine) -> impl Iterator<Item = &Arc<MmioTransport>> {
    machine.transports.iter().filter(|one| one.kind() == DeviceKind::Net)
}
