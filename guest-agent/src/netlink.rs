//! Configures network interfaces as the host requests, through the kernel's route netlink.
//!
//! It is implemented here because a refresh must not start programs, and a guest may have none to
//! start.
#![allow(unsafe_code)] // a netlink socket and one name look-up

use std::ffi::CString;
use std::io::{Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use pvmm_guest_agent::message::Interface;

use crate::sys::{self, check};

const HEADER: usize = 16;
/// Bytes of the kernel's answers that are read at once; no answer is longer.
const ANSWER: usize = 32 << 10;
/// The most old default routes that are removed from one interface, per family.
const MAX_ROUTES: usize = 16;
const ONLINK: u32 = 4;
const NO_DUPLICATE_CHECK: u8 = 2;
const LINK_SCOPE: u8 = 253;

/// An address and the length of its network prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefixed {
    pub address: IpAddr,
    pub prefix: u8,
}

impl Prefixed {
    /// Parses `ADDRESS/PREFIX`.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let prefix = prefix.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        (prefix <= most).then_some(Self { address, prefix })
    }

    fn broadcast(&self) -> Option<Ipv4Addr> {
        match self.address {
            IpAddr::V4(address) if self.prefix < 31 => {
                let hosts = u32::MAX.checked_shr(self.prefix.into()).unwrap_or(0);
                Some(Ipv4Addr::from(u32::from(address) | hosts))
            }
            _ => None,
        }
    }
}

/// Configures an interface as `wish` says: hardware address and MTU, up, exactly these addresses,
/// exactly these default routes, no cached neighbours. If addresses are to be kept, routes are too,
/// and only the link-local address is changed for a new hardware address.
pub fn configure(wish: &Interface) -> Result<()> {
    let mut netlink = Netlink::open()?;
    let index = match interface_index(&wish.name) {
        // Only the neighbours would change, and they are gone with the interface.
        Err(_) if wish.keep_addresses && wish.mac.is_none() && wish.mtu.is_none() => return Ok(()),
        index => index?,
    };
    let mac: Option<[u8; 6]> = match &wish.mac {
        Some(mac) => Some(mac.as_slice().try_into().map_err(|_| ErrorKind::InvalidInput)?),
        None => None,
    };
    if !wish.keep_addresses || mac.is_some() || wish.mtu.is_some() {
        netlink.set_link(index, mac, wish.mtu)?;
    }
    let mut wanted: Vec<Prefixed> =
        wish.addresses.iter().filter_map(|text| Prefixed::parse(text)).collect();
    netlink.replace_addresses(index, &mut wanted, mac, wish.keep_addresses)?;
    netlink.forget_neighbours(index)?;
    if wish.keep_addresses {
        return Ok(());
    }
    for family in [libc::AF_INET, libc::AF_INET6] {
        netlink.remove_default_routes(index, family)?;
    }
    for gateway in wish.gateways.iter().filter_map(|text| text.parse().ok()) {
        netlink.add_default_route(index, gateway)?;
    }
    Ok(())
}

fn interface_index(name: &str) -> Result<u32> {
    let name = CString::new(name)?;
    // SAFETY: a C string that outlives the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(Error::last_os_error()),
        index => Ok(index),
    }
}

/// A request that is being built: header, fixed part, attributes.
struct NetlinkMessage(Vec<u8>);

impl NetlinkMessage {
    fn new(kind: u16, flags: libc::c_int, fixed: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        let flags = (flags | libc::NLM_F_REQUEST) as u16;
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(fixed);
        Self(bytes)
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.0.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    fn open() -> Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: takes no pointer; the descriptor is new and owned here.
        let socket = unsafe {
            let fd = check(libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE))?;
            OwnedFd::from_raw_fd(fd)
        };
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends a request and passes every part of the answer to `each`.
    fn exchange(&mut self, request: NetlinkMessage, mut each: impl FnMut(&[u8])) -> Result<()> {
        let mut bytes = request.0;
        self.sequence += 1;
        let len = bytes.len() as u32;
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.sequence.to_ne_bytes());
        // SAFETY: `bytes` is readable for its length.
        let sent =
            unsafe { libc::send(self.socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
        if sent < 0 {
            return Err(Error::last_os_error());
        }
        loop {
            let mut answer = Vec::new();
            sys::read_onto(&self.socket, &mut answer, ANSWER)?;
            let mut rest = &answer[..];
            while let Some((message, after)) = split_message(rest) {
                rest = after;
                if number(message, 8) != Some(self.sequence) {
                    continue;
                }
                match i32::from(u16::from_ne_bytes([message[4], message[5]])) {
                    libc::NLMSG_ERROR => {
                        let errno = number(message, HEADER).map_or(libc::EPROTO, |e| -(e as i32));
                        let failed = errno != 0;
                        return if failed { Err(Error::from_raw_os_error(errno)) } else { Ok(()) };
                    }
                    libc::NLMSG_DONE => return Ok(()),
                    _ => each(&message[HEADER..]),
                }
            }
        }
    }

    fn act(&mut self, request: NetlinkMessage) -> Result<()> {
        self.exchange(request, |_| {})
    }

    fn set_link(&mut self, index: u32, mac: Option<[u8; 6]>, mtu: Option<u32>) -> Result<()> {
        let up = |up: bool| {
            let mut fixed = [0; 16];
            fixed[4..8].copy_from_slice(&index.to_ne_bytes());
            let flag = libc::IFF_UP as u32;
            fixed[8..12].copy_from_slice(&(if up { flag } else { 0 }).to_ne_bytes());
            fixed[12..].copy_from_slice(&flag.to_ne_bytes());
            NetlinkMessage::new(libc::RTM_NEWLINK, libc::NLM_F_ACK, &fixed)
        };
        let full = || {
            let mut request = up(true);
            if let Some(mac) = mac {
                request = request.attribute(libc::IFLA_ADDRESS, &mac);
            }
            if let Some(mtu) = mtu {
                request = request.attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
            }
            request
        };
        match self.act(full()) {
            // Some drivers accept a new address only while the link is down.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                self.act(up(false))?;
                self.act(full())
            }
            other => other,
        }
    }

    fn replace_addresses(
        &mut self,
        index: u32,
        wanted: &mut Vec<Prefixed>,
        mac: Option<[u8; 6]>,
        keep: bool,
    ) -> Result<()> {
        let dump = NetlinkMessage::new(libc::RTM_GETADDR, libc::NLM_F_DUMP, &[0; 8]);
        let mut present: Vec<(Prefixed, bool)> = Vec::new();
        self.exchange(dump, |part| {
            if number(part, 4) == Some(index) && part.len() >= 8 {
                let value = attribute(part, 8, libc::IFA_LOCAL)
                    .or_else(|| attribute(part, 8, libc::IFA_ADDRESS));
                if let Some(address) = value.and_then(ip) {
                    present.push((Prefixed { address, prefix: part[1] }, part[3] == LINK_SCOPE));
                }
            }
        })?;
        for (old, local) in present {
            // The link-local address of an IPv6 interface is derived from its hardware address.
            let local = local && old.address.is_ipv6();
            if local {
                let Some(mac) = mac else { continue };
                wanted.push(Prefixed { address: link_local(mac).into(), prefix: 64 });
            } else if keep {
                continue;
            }
            // Addresses that stay are removed as well: a secondary address would be removed with
            // its primary.
            match self.act(address_request(libc::RTM_DELADDR, 0, index, &old)) {
                Err(e) if e.raw_os_error() != Some(libc::EADDRNOTAVAIL) => return Err(e),
                _ => {}
            }
        }
        for new in wanted {
            let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
            self.act(address_request(libc::RTM_NEWADDR, flags, index, new))?;
        }
        Ok(())
    }

    fn forget_neighbours(&mut self, index: u32) -> Result<()> {
        const KEPT: u16 = 0x40 | 0x80; // needs no look-up; set by hand
        let dump = NetlinkMessage::new(libc::RTM_GETNEIGH, libc::NLM_F_DUMP, &[0; 12]);
        let mut known = Vec::new();
        self.exchange(dump, |part| {
            if number(part, 4) != Some(index) || part.len() < 12 {
                return;
            }
            let state = u16::from_ne_bytes([part[8], part[9]]);
            if let Some(address) = attribute(part, 12, libc::NDA_DST).filter(|_| state & KEPT == 0)
            {
                known.push((part[..12].to_vec(), address.to_vec()));
            }
        })?;
        for (fixed, address) in known {
            let delete = NetlinkMessage::new(libc::RTM_DELNEIGH, libc::NLM_F_ACK, &fixed);
            match self.act(delete.attribute(libc::NDA_DST, &address)) {
                Err(e) if e.raw_os_error() != Some(libc::ENOENT) => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    fn remove_default_routes(&mut self, index: u32, family: libc::c_int) -> Result<()> {
        for _ in 0..MAX_ROUTES {
            let mut fixed = [0; 12];
            fixed[0] = family as u8;
            fixed[4] = libc::RT_TABLE_MAIN;
            fixed[6] = libc::RT_SCOPE_NOWHERE;
            let delete = NetlinkMessage::new(libc::RTM_DELROUTE, libc::NLM_F_ACK, &fixed)
                .attribute(libc::RTA_OIF, &index.to_ne_bytes());
            match self.act(delete) {
                Ok(()) => {}
                // No route is left, or the kernel lacks that family.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ESRCH | libc::EOPNOTSUPP)) => {
                    break;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn add_default_route(&mut self, index: u32, gateway: IpAddr) -> Result<()> {
        let mut fixed = [0; 12];
        fixed[0] = family(gateway);
        fixed[4] = libc::RT_TABLE_MAIN;
        fixed[5] = libc::RTPROT_STATIC;
        fixed[6] = libc::RT_SCOPE_UNIVERSE;
        fixed[7] = libc::RTN_UNICAST;
        // A gateway outside the prefix is allowed: the link is point-to-point.
        fixed[8..].copy_from_slice(&ONLINK.to_ne_bytes());
        let flags = libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        let route = NetlinkMessage::new(libc::RTM_NEWROUTE, flags, &fixed)
            .attribute(libc::RTA_GATEWAY, &octets(gateway))
            .attribute(libc::RTA_OIF, &index.to_ne_bytes());
        self.act(route)
    }
}

fn address_request(kind: u16, flags: libc::c_int, index: u32, it: &Prefixed) -> NetlinkMessage {
    let mut fixed = [family(it.address), it.prefix, 0, 0, 0, 0, 0, 0];
    if it.address.is_ipv6() && kind == libc::RTM_NEWADDR {
        // The host chose the address: it is unique, and it is needed at once.
        fixed[2] = NO_DUPLICATE_CHECK;
    }
    fixed[4..].copy_from_slice(&index.to_ne_bytes());
    let bytes = octets(it.address);
    let request = NetlinkMessage::new(kind, flags | libc::NLM_F_ACK, &fixed)
        .attribute(libc::IFA_LOCAL, &bytes)
        .attribute(libc::IFA_ADDRESS, &bytes);
    match it.broadcast().filter(|_| kind == libc::RTM_NEWADDR) {
        Some(broadcast) => request.attribute(libc::IFA_BROADCAST, &broadcast.octets()),
        None => request,
    }
}

/// Returns the link-local IPv6 address of a hardware address.
fn link_local(mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    let high = [0xfe, 0x80, 0, 0, 0, 0, 0, 0];
    let low = [a ^ 2, b, c, 0xff, 0xfe, d, e, f];
    let mut octets = [0; 16];
    octets[..8].copy_from_slice(&high);
    octets[8..].copy_from_slice(&low);
    octets.into()
}

fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { libc::AF_INET as u8 } else { libc::AF_INET6 as u8 }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let four: Option<[u8; 4]> = bytes.try_into().ok();
    let sixteen: Option<[u8; 16]> = bytes.try_into().ok();
    four.map(IpAddr::from).or(sixteen.map(IpAddr::from))
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_ne_bytes(four))
}

/// Splits the first message off an answer.
fn split_message(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let len = number(bytes, 0)? as usize;
    let message = bytes.get(..len).filter(|_| len >= HEADER)?;
    Some((message, bytes.get(len.next_multiple_of(4)..).unwrap_or_default()))
}

/// Returns the value of one attribute, among those that begin at `start`.
fn attribute(bytes: &[u8], start: usize, wanted: u16) -> Option<&[u8]> {
    let mut rest = bytes.get(start..)?;
    loop {
        let len = usize::from(u16::from_ne_bytes([*rest.first()?, *rest.get(1)?]));
        let kind = u16::from_ne_bytes([*rest.get(2)?, *rest.get(3)?]);
        let value = rest.get(4..len)?;
        if kind == wanted {
            return Some(value);
        }
        rest = rest.get(len.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixed_is_parsed_and_bounded() {
        let it = Prefixed::parse("10.1.2.3/24").unwrap();
        assert_eq!(it.broadcast(), Some("10.1.2.255".parse().unwrap()));
        assert_eq!(Prefixed::parse("10.0.0.1/0").unwrap().broadcast().unwrap().octets(), [255; 4]);
        assert_eq!(Prefixed::parse("10.0.0.1/31").unwrap().broadcast(), None);
        assert!(Prefixed::parse("fd00::1/64").is_some());
        for bad in ["10.0.0.1", "10.0.0.1/33", "fd00::1/129", "x/8", "10.0.0.1/-1", ""] {
            assert_eq!(Prefixed::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn answers_cut_short_end_without_a_panic() {
        let mut message = [0u8; 40];
        message[0] = 40;
        message[16] = 24;
        for end in 0..message.len() {
            let _ = split_message(&message[..end]);
            let _ = attribute(&message[..end], 16, 7);
        }
        assert_eq!(split_message(&[5, 0, 0, 0, 0]), None);
    }

    #[test]
    fn link_local_follows_the_hardware_address() {
        let address = link_local([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
        assert_eq!(address.to_string(), "fe80::5054:ff:fe12:3456");
    }
}
