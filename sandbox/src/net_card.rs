//! The parser of `--net`: the tap of a network device, its properties, and the guest's addresses.
//!
//! Pure, like the parsers of other flags, and run before anything is created; the tap itself is
//! checked when the VM opens it. The agent sets the guest's addresses, so that no kernel support is
//! needed.

use std::net::IpAddr;

use pvmm::agent::{Interface, Refresh};
use pvmm::config::{MacError, RateLimiterConfig};
use pvmm::{Mac, Net, TapSource};

use crate::drive::per_second;

/// The value of `--net` without a tap.
pub const EGRESS: &str = "egress";

/// The value of one `--net` flag.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetCard {
    pub tap: TapWish,
    pub mac: Option<Mac>,
    pub mtu: Option<u16>,
    /// The guest's addresses, with their prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
    pub gateways: Vec<IpAddr>,
    pub dns: Vec<IpAddr>,
    /// The rate limits of each direction.
    pub limits: RateLimiterConfig,
}

/// The tap behind a network device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TapWish {
    /// Not given: a fork's device gets a new tap, or the one of its snapshot.
    #[default]
    Unsaid,
    /// A new tap, named by the kernel.
    Auto,
    Name(String),
    /// No tap: a process of its own carries what the policy allows.
    Egress,
}

/// Parses
/// `tap=NAME|auto[,mac=MAC|random][,mtu=N][,ip=ADDRESS/PREFIX[,gw=ADDRESS]][,dns=ADDRESS][,bps=SIZE][,pps=N]`.
pub fn parse(text: &str) -> Result<NetCard, String> {
    if text == EGRESS {
        return Ok(NetCard { tap: TapWish::Egress, ..NetCard::default() });
    }
    match parse_copy(text)? {
        NetCard { tap: TapWish::Unsaid, .. } => {
            Err("the tap is missing; write tap=NAME, or tap=auto".to_owned())
        }
        card => Ok(card),
    }
}

/// Parses `--net` for a fork, whose network device already exists: the tap may be left out.
pub fn parse_copy(text: &str) -> Result<NetCard, String> {
    let mut card = NetCard::default();
    for word in text.split(',') {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let bad = |why: &str| format!("{key}: {why}");
        let address = || value.parse::<IpAddr>().map_err(|_| bad(NO_ADDRESS));
        match key {
            "tap" if value.is_empty() => {
                return Err("the tap is missing; write tap=NAME, or tap=auto".to_owned());
            }
            "tap" if value == "auto" => card.tap = TapWish::Auto,
            "tap" => card.tap = TapWish::Name(value.to_owned()),
            "mac" if value == "random" => {
                card.mac = Some(Mac::random().map_err(|error| bad(&error.to_string()))?);
            }
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
    for gateway in &card.gateways {
        if !card.addresses.iter().any(|(ip, _)| ip.is_ipv4() == gateway.is_ipv4()) {
            return Err("gw without ip; write ip=ADDRESS/PREFIX,gw=ADDRESS".to_owned());
        }
    }
    card.config("unsaid").validate().map_err(|error| {
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
    /// Builds the device configuration; without a tap of its own the device is on the tap `same`.
    pub fn config(&self, same: &str) -> Net {
        let tap = match &self.tap {
            TapWish::Unsaid => TapSource::Name(same.to_owned()),
            TapWish::Auto => TapSource::Auto,
            TapWish::Name(name) => TapSource::Name(name.clone()),
            // The supervisor puts its socket in this place.
            TapWish::Egress => TapSource::Auto,
        };
        let (rx_limit, tx_limit) = (self.limits, self.limits);
        Net { mac: self.mac, mtu: self.mtu, rx_limit, tx_limit, ..Net::new(tap) }
    }

    /// Returns the flag for one of several forks: the fork's number is appended to the tap's name.
    pub fn numbered(mut self, number: u32) -> Self {
        if let TapWish::Name(name) = &mut self.tap {
            *name = format!("{name}-{number}");
        }
        self
    }

    /// Whether the guest's addresses or DNS servers must be set.
    pub fn has_addresses(&self) -> bool {
        !self.addresses.is_empty() || !self.dns.is_empty()
    }

    /// Adds the addresses of a guest that has just booted, with this as its first network device.
    pub fn tell(&self, refresh: Refresh) -> Refresh {
        if self.addresses.is_empty() {
            self.tell_dns(refresh)
        } else {
            self.tell_dns(refresh.interface(&self.interface(0)))
        }
    }

    /// Adds the settings of a fork whose device at index `place` is now on another tap: its
    /// previous neighbours are gone, and settings that are not given keep their values.
    pub fn tell_copy(&self, refresh: Refresh, place: usize) -> Refresh {
        let mac = self.mac.map(|mac| mac.0);
        let keep_addresses = self.addresses.is_empty();
        let interface = Interface { mac, keep_addresses, ..self.interface(place) };
        self.tell_dns(refresh.interface(&interface))
    }

    fn interface(&self, place: usize) -> Interface {
        Interface {
            // The guest kernel's name for the interface.
            name: format!("eth{place}"),
            addresses: self.addresses.clone(),
            gateways: self.gateways.clone(),
            ..Interface::default()
        }
    }

    fn tell_dns(&self, refresh: Refresh) -> Refresh {
        if self.dns.is_empty() { refresh } else { refresh.dns(&self.dns) }
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
        assert_eq!((&card.tap, card.mtu), (&TapWish::Name("t0".into()), Some(1400)));
        assert_eq!((card.addresses.len(), card.gateways.len(), card.dns.len()), (2, 2, 1));
        let config = card.config("unsaid");
        assert_eq!(config.rx_limit.bytes, Some(BucketConfig::per_second(1 << 20)));
        assert_eq!(config.tx_limit.ops, Some(BucketConfig::per_second(500)));
        assert!(card.has_addresses());
        assert!(!parse("tap=t0,mtu=1400").unwrap().has_addresses());
    }

    #[test]
    fn card_of_a_copy_may_leave_out_its_tap_and_each_of_several_has_its_own() {
        let card = parse_copy("mac=random").unwrap();
        assert_eq!(card.tap, TapWish::Unsaid);
        assert_ne!(card.mac, parse_copy("mac=random").unwrap().mac);
        assert!(matches!(card.config("t7").tap, TapSource::Name(name) if name == "t7"));
        assert!(matches!(parse("tap=auto").unwrap().config("t7").tap, TapSource::Auto));
        let numbered = |text: &str| parse_copy(text).unwrap().numbered(2).tap;
        assert_eq!(numbered("tap=web"), TapWish::Name("web-2".into()));
        assert_eq!((numbered("tap=auto"), numbered("mtu=1400")), (TapWish::Auto, TapWish::Unsaid));
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
