//! Networks in CIDR notation, and the ranges that no sandbox reaches by accident.
//!
//! A public name may resolve to a private address on purpose (DNS rebinding), so these ranges are
//! checked after resolution too.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

/// A network: an address and the number of its leading bits that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    address: IpAddr,
    prefix_len: u8,
}

/// Why a text is not a network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CidrError {
    #[error("is not a network; write one such as 192.0.2.0/24")]
    Syntax,
    #[error("has bits after its prefix; write {0}")]
    HostBits(Cidr),
}

/// A range of addresses with a special meaning, such as private or link-local ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecialRange {
    pub name: &'static str,
    pub cidr: Cidr,
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix_len: u8, name: &'static str) -> SpecialRange {
    let address = IpAddr::V4(Ipv4Addr::new(a, b, c, d));
    SpecialRange { name, cidr: Cidr { address, prefix_len } }
}

/// The special ranges of IPv4, from IANA's registry, and the address under which Azure's hosts
/// serve their guests. The first range that contains an address counts.
const SPECIAL_V4: [SpecialRange; 16] = [
    v4(169, 254, 169, 254, 32, "cloud metadata"),
    v4(168, 63, 129, 16, 32, "cloud metadata"),
    v4(0, 0, 0, 0, 8, "this network"),
    v4(10, 0, 0, 0, 8, "private"),
    v4(100, 64, 0, 0, 10, "carrier-grade NAT"),
    v4(127, 0, 0, 0, 8, "loopback"),
    v4(169, 254, 0, 0, 16, "link-local"),
    v4(172, 16, 0, 0, 12, "private"),
    v4(192, 0, 0, 0, 24, "protocol assignments"),
    v4(192, 0, 2, 0, 24, "documentation"),
    v4(192, 88, 99, 0, 24, "6to4 relay"),
    v4(192, 168, 0, 0, 16, "private"),
    v4(198, 18, 0, 0, 15, "benchmarking"),
    v4(198, 51, 100, 0, 24, "documentation"),
    v4(203, 0, 113, 0, 24, "documentation"),
    v4(224, 0, 0, 0, 3, "multicast, reserved or broadcast"),
];

impl Cidr {
    /// Returns the network of one address.
    pub fn host(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self { address, prefix_len: width(address) }
    }

    pub fn prefix_len(self) -> u8 {
        self.prefix_len
    }

    pub fn is_ipv4(self) -> bool {
        self.address.is_ipv4()
    }

    /// Returns whether the network is one address.
    pub fn is_host(self) -> bool {
        self.prefix_len == width(self.address)
    }

    /// Returns whether an address is in the network. An IPv4 address that is written as an IPv6 one
    /// counts as itself.
    pub fn contains(self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_ipv4() == self.address.is_ipv4()
            && mask(address, self.prefix_len) == bits(self.address)
    }

    /// Returns whether the network lies within a special range. A larger network contains the range
    /// without naming it: a rule for 0.0.0.0/0 opens no private address.
    pub fn is_special(self) -> bool {
        SPECIAL_V4.iter().any(|range| range.cidr.covers(self))
    }

    /// Returns whether every address of `other` is in the network.
    pub fn covers(self, other: Self) -> bool {
        self.prefix_len <= other.prefix_len && self.contains(other.address)
    }
}

/// Returns the special range that an address is in.
pub fn special_range(address: IpAddr) -> Option<SpecialRange> {
    match address.to_canonical() {
        IpAddr::V4(_) => SPECIAL_V4.into_iter().find(|range| range.cidr.contains(address)),
        IpAddr::V6(v6) => {
            let name = match v6.segments() {
                // Global unicast, without documentation, 6to4 and Teredo, which embed IPv4.
                [0x2001, 0xdb8, ..] => "documentation",
                [0x2001, 0, ..] | [0x2002, ..] => "IPv4 in IPv6",
                [0x2000..=0x3fff, ..] => return None,
                [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254] => "cloud metadata",
                [0xfe80..=0xfebf, ..] => "link-local",
                [0xfc00..=0xfdff, ..] => "private",
                _ => "not global unicast",
            };
            Some(SpecialRange { name, cidr: Cidr::host(address) })
        }
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

// IPv4 addresses use the upper bits, so that one mask serves both families.
fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn mask(address: IpAddr, prefix_len: u8) -> u128 {
    let dropped = 128 - u32::from(prefix_len);
    bits(address) & u128::MAX.checked_shl(dropped).unwrap_or(0)
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_len)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let (address, prefix_len) = match text.split_once('/') {
            Some((address, len)) => (address, Some(len)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| CidrError::Syntax)?;
        let Some(prefix_len) = prefix_len else { return Ok(Self::host(address)) };
        let digits = prefix_len.len() <= 3 && prefix_len.bytes().all(|byte| byte.is_ascii_digit());
        let prefix_len = prefix_len.parse().map_err(|_| CidrError::Syntax)?;
        if !digits || prefix_len > width(address) {
            return Err(CidrError::Syntax);
        }
        let network = match (address, mask(address, prefix_len)) {
            (IpAddr::V4(_), bits) => IpAddr::V4(((bits >> 96) as u32).into()),
            (IpAddr::V6(_), bits) => IpAddr::V6(bits.into()),
        };
        let cidr = Self { address: network, prefix_len };
        if network != address { Err(CidrError::HostBits(cidr)) } else { Ok(cidr) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special(address: &str) -> Option<&'static str> {
        special_range(address.parse().unwrap()).map(|range| range.name)
    }

    #[test]
    fn cidr_contains_its_first_and_last_address_only() {
        let cidr: Cidr = "10.1.0.0/16".parse().unwrap();
        for (address, inside) in
            [("10.1.0.0", true), ("10.1.255.255", true), ("10.0.255.255", false), ("::1", false)]
        {
            assert_eq!(cidr.contains(address.parse().unwrap()), inside, "{address}");
        }
        let all: Cidr = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("255.255.255.255".parse().unwrap()));
    }

    #[test]
    fn cidr_of_bad_text_is_refused() {
        for text in ["", "10", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/+8", "::/129", "a/8", "1.2.3"]
        {
            assert_eq!(text.parse::<Cidr>(), Err(CidrError::Syntax), "{text}");
        }
        let refused = "10.0.0.1/8".parse::<Cidr>().unwrap_err();
        assert_eq!(refused.to_string(), "has bits after its prefix; write 10.0.0.0/8");
    }

    #[test]
    fn special_range_covers_what_must_never_be_reached_by_a_name() {
        for address in [
            "169.254.169.254",
            "169.254.0.1",
            "168.63.129.16",
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.255",
            "0.0.0.0",
            "0.1.2.3",
            "192.0.0.192",
            "198.18.0.1",
            "198.19.255.255",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "fd00:ec2::254",
            "fe80::1",
            "fc00::1",
            "ff02::1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
            "2001:0:1::",
            "::127.0.0.1",
        ] {
            assert!(special(address).is_some(), "{address}");
        }
    }

    #[test]
    fn special_range_leaves_public_addresses() {
        for address in [
            "1.1.1.1",
            "172.15.0.1",
            "172.32.0.1",
            "100.128.0.1",
            "223.255.255.255",
            "2606:4700::1",
        ] {
            assert_eq!(special(address), None, "{address}");
        }
    }
}
