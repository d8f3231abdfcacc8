//! A frame of the guest on its way to the tap: latched, checked, sent, or dropped and counted.

use std::io;

use super::super::chain::{self, Chain, Segment};
use super::device::{Net, feature};
use super::sys;
use super::wire::{self, ETHERNET_LEN, HEADER_LEN, Refusal, TxOffloads};
use crate::GuestMemory;

const LATCHED: usize = HEADER_LEN + ETHERNET_LEN;
// An interrupted write is tried again, but not for ever.
const ATTEMPTS: usize = 4;

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    Done,
    /// The guest's fault.
    Refused,
    /// The host's: the tap is down, gone or full.
    Dropped,
}

/// What the driver agreed to leave to the host.
pub fn offloads(features: u64) -> TxOffloads {
    let has = |bit| features & bit != 0;
    TxOffloads {
        csum: has(feature::CSUM),
        tso4: has(feature::HOST_TSO4),
        tso6: has(feature::HOST_TSO6),
        ecn: has(feature::HOST_ECN),
    }
}

/// How many bytes of frame a chain holds.
pub fn frame_len(chain: &Chain) -> u64 {
    chain::total_len(chain.readable()).saturating_sub(HEADER_LEN as u64)
}

/// Sends the frame of one chain.
pub fn send(net: &mut Net, memory: &GuestMemory, chain: &Chain, offloads: TxOffloads) -> Sent {
    let Ok((first, rest)) = latch(net, memory, chain, offloads) else { return Sent::Refused };
    for _ in 0..ATTEMPTS {
        match sys::write_frame(net.link.fd(), &first, memory, &rest) {
            Ok(_) => return Sent::Done,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // What our checks let pass and the kernel does not is still the guest's.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Sent::Refused,
            Err(error) => {
                if net.add_host_error() {
                    log::warn!("net {}: cannot send: {error}", net.link.name());
                }
                return Sent::Dropped;
            }
        }
    }
    Sent::Dropped
}

/// Both headers, copied before they are looked at, so that what was checked is what is sent; and where
/// the rest of the frame is.
fn latch(
    net: &Net,
    memory: &GuestMemory,
    chain: &Chain,
    offloads: TxOffloads,
) -> Result<([u8; LATCHED], Vec<Segment>), Refusal> {
    let mut header = [0; HEADER_LEN];
    let mut ethernet = [0; ETHERNET_LEN];
    let readable = chain.readable();
    let got = chain::read_at(memory, readable, 0, &mut header)
        + chain::read_at(memory, readable, HEADER_LEN as u64, &mut ethernet);
    let len = frame_len(chain);
    let len = usize::try_from(len).map_err(|_| Refusal::Length)?;
    let header = wire::check_header(&header, len, offloads)?;
    if got != LATCHED {
        return Err(Refusal::Length);
    }
    wire::check_ethernet(&ethernet, net.mac.0)?;
    let mut first = [0; LATCHED];
    first[..HEADER_LEN].copy_from_slice(&header);
    first[HEADER_LEN..].copy_from_slice(&ethernet);
    let rest = chain::slice(readable, LATCHED as u64, (len - ETHERNET_LEN) as u64);
    Ok((first, rest.collect()))
}
