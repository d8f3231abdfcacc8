//! The language of `--net`: a tap of this host, what the card on it is, and what the guest calls itself there.
//!
//! Pure, like the other flags, and refused before anything is made; the tap itself is looked at when the
//! machine opens it. The guest's agent is told its addresses, so that any kernel will do.

use std::net::IpAddr;

use pvmm::agent::{Interface, Refresh};
use pvmm::config::{MacError, RateLimiterConfig};
use pvmm::{Mac, Net, TapSource};

use crate::drive::per_second;

/// What the guest's kernel calls its first card.
const NAME_IN_GUEST: &str = "eth0";

/// One `--net`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetCard {
    pub tap: String,
    pub mac: Option<Mac>,
    pub mtu: Option<u16>,
    /// The guest's addresses, with the lengths of their prefixes.
    pub addresses: Vec<(IpAddr, u8)>,
    pub gateways: Vec<IpAddr>,
    pub dns: Vec<IpAddr>,
    /// What may pass in each direction.
    pub limits: RateLimiterConfig,
}

/// `tap=NAME[,mac=MAC][,mtu=N][,ip=ADDRESS/PREFIX[,gw=ADDRESS]][,dns=ADDRESS][,bps=SIZE][,pps=N]`.
pub fn parse(text: &str) -> Result<NetCard, String> {
    let mut card = NetCard::default();
    for word in text.split(',') {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let bad = |why: &str| format!("{key}: {why}");
        let address = || value.parse::<IpAddr>().map_err(|_| bad(NO_ADDRESS));
        match key {
            "tap" => card.tap = value.to_owned(),
            "mac" => {
                card.mac = Some(value.parse().map_err(|e: MacError| bad(&e.to_string()))?);
            }
            "mtu" => card.mtu = Some(value.parse().map_err(|_| bad("use 68 to 65535"))?),
            "ip" => card.addresses.push(prefix(value).map_err(bad)?),
            "gw" => card.gateways.push(address()?),
            "dns" => card.dns.push(address()?),
            "bps" => card.limits.bytes = Some(per_second("bps", value)?),
            "pps" => card.limits.ops = Some(per_second("pps", value)?),
            _ => {
                return Err(format!(
                    "unknown word '{key}'; use tap, mac, mtu, ip, gw, dns, bps and pps"
                ));
            }
        }
    }
    if card.tap.is_empty() {
        return Err("the tap is missing; write tap=NAME".to_owned());
    }
    for gateway in &card.gateways {
        if !card.addresses.iter().any(|(ip, _)| ip.is_ipv4() == gateway.is_ipv4()) {
            return Err("gw without ip; write ip=ADDRESS/PREFIX,gw=ADDRESS".to_owned());
        }
    }
    card.config().validate().map_err(|error| {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        format!("{error}{}", cause.unwrap_or_default())
    })?;
    Ok(card)
}

const NO_ADDRESS: &str = "write an address, such as 10.0.0.1 or fd00::1";

fn prefix(text: &str) -> Result<(IpAddr, u8), &'static str> {
    let why = "write an address and the length of its prefix, such as 10.0.0.2/24 or fd00::2/64";
    let (address, length) = text.split_once('/').ok_or(why)?;
    let address: IpAddr = address.parse().map_err(|_| why)?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let length = length.parse().ok().filter(|length| (1..=most).contains(length)).ok_or(why)?;
    Ok((address, length))
}

impl NetCard {
    /// The card as the library wants it.
    pub fn config(&self) -> Net {
        let tap = TapSource::Name(self.tap.clone());
        let (rx_limit, tx_limit) = (self.limits, self.limits);
        Net { mac: self.mac, mtu: self.mtu, rx_limit, tx_limit, ..Net::new(tap) }
    }

    /// Whether the guest has anything to be told.
    pub fn has_addresses(&self) -> bool {
        !self.addresses.is_empty() || !self.dns.is_empty()
    }

    /// Adds what the guest is told.
    pub fn tell(&self, mut refresh: Refresh) -> Refresh {
        if !self.addresses.is_empty() {
            refresh = refresh.interface(&Interface {
                name: NAME_IN_GUEST.to_owned(),
                mac: None,
                mtu: None,
                addresses: self.addresses.clone(),
                gateways: self.gateways.clone(),
            });
        }
        if !self.dns.is_empty() {
            refresh = refresh.dns(&self.dns);
        }
        refresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvmm::config::BucketConfig;

    #[test]
    fn card_with_every_word_is_what_was_asked_for() {
        let card = parse(
            "tap=t0,ip=10.0.0.2/24,ip=fd00::2/64,gw=10.0.0.1,gw=fd00::1,dns=1.1.1.1,\
             mac=02:00:00:00:00:01,mtu=1400,bps=1M,pps=500",
        )
        .unwrap();
        assert_eq!((card.tap.as_str(), card.mtu), ("t0", Some(1400)));
        assert_eq!((card.addresses.len(), card.gateways.len(), card.dns.len()), (2, 2, 1));
        let config = card.config();
        assert_eq!(config.rx_limit.bytes, Some(BucketConfig::per_second(1 << 20)));
        assert_eq!(config.tx_limit.ops, Some(BucketConfig::per_second(500)));
        assert!(card.has_addresses());
        assert!(!parse("tap=t0,mtu=1400").unwrap().has_addresses());
    }

    #[test]
    fn d11_card_with_a_bad_word_is_refused_by_name() {
        let wrong = [
            ("", "unknown word ''"),
            ("tap=", "the tap is missing"),
            ("ip=10.0.0.2/24", "the tap is missing"),
            ("tap=t%d", "a name has"),
            ("tap=t0,mtu=67", "mtu 67"),
            ("tap=t0,mtu=x", "mtu: "),
            ("tap=t0,mac=1", "mac: "),
            ("tap=t0,mac=01:00:00:00:00:01", "group address"),
            ("tap=t0,ip=10.0.0.2", "ip: "),
            ("tap=t0,ip=10.0.0.2/0", "ip: "),
            ("tap=t0,ip=10.0.0.2/33", "ip: "),
            ("tap=t0,ip=fd00::2/129", "ip: "),
            ("tap=t0,ip=10.0.0.256/24", "ip: "),
            ("tap=t0,gw=10.0.0.1", "gw without ip"),
            ("tap=t0,ip=fd00::2/64,gw=10.0.0.1", "gw without ip"),
            ("tap=t0,ip=10.0.0.2/24,gw=host", "gw: "),
            ("tap=t0,dns=resolver", "dns: "),
            ("tap=t0,bps=0", "bps is"),
            ("tap=t0,pps=x", "pps is"),
            ("tap=t0,speed=1", "unknown word 'speed'"),
        ];
        for (text, why) in wrong {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains(why), "{text}: {refused}");
        }
    }
}
