//! A frame of the guest on its way to the tap: latched, checked, sent, or dropped and counted.

use std::io;
use std::time::Instant;

use super::super::chain::{self, Chain, Segment};
use super::device::{Net, feature};
use super::mmds::{self, Mmds};
use super::sys;
use super::wire::{self, ETHERNET_LEN, HEADER_LEN, Refusal, TxOffloads};
use crate::GuestMemory;

const HEADERS: usize = HEADER_LEN + ETHERNET_LEN;
// Both headers, and as much of the frame as tells whose it is.
const LATCHED: usize = HEADERS + mmds::PEEK_LEN;
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
    if let Some(mmds) = &mut net.mmds
        && is_for(mmds, &first)
    {
        return ask(mmds, memory, &first, &rest);
    }
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

/// Whether the metadata service answers a frame, by its first bytes.
fn is_for(mmds: &Mmds, first: &[u8]) -> bool {
    let Some((_, frame)) = first.split_at_checked(HEADER_LEN) else { return false };
    let Some((ethernet, payload)) = frame.split_first_chunk() else { return false };
    mmds.is_for_us(ethernet, payload)
}

/// Hands a frame to the metadata service, which may have something to say to the guest then.
fn ask(mmds: &mut Mmds, memory: &GuestMemory, first: &[u8], rest: &[Segment]) -> Sent {
    let known = &first[HEADER_LEN..];
    let len = known.len() as u64 + chain::total_len(rest);
    if len > mmds::RECEIVED_MAX as u64 {
        return Sent::Refused;
    }
    let mut frame = vec![0; len as usize];
    frame[..known.len()].copy_from_slice(known);
    chain::read_at(memory, rest, 0, &mut frame[known.len()..]);
    match mmds.receive(&frame, Instant::now()) {
        true => Sent::Done,
        false => Sent::Refused,
    }
}

/// The first bytes, copied before they are looked at, so that what was checked is what is sent; and where
/// the rest of the frame is.
fn latch(
    net: &Net,
    memory: &GuestMemory,
    chain: &Chain,
    offloads: TxOffloads,
) -> Result<(Vec<u8>, Vec<Segment>), Refusal> {
    let readable = chain.readable();
    let len = usize::try_from(frame_len(chain)).map_err(|_| Refusal::Length)?;
    let mut first = vec![0; LATCHED.min(HEADER_LEN + len)];
    if chain::read_at(memory, readable, 0, &mut first) != first.len() || first.len() < HEADERS {
        return Err(Refusal::Length);
    }
    let (header, frame) = first.split_first_chunk_mut().ok_or(Refusal::Length)?;
    let ethernet = frame.first_chunk().ok_or(Refusal::Length)?;
    wire::check_ethernet(ethernet, net.mac.0)?;
    *header = wire::check_header(header, len, offloads)?;
    let left = (HEADER_LEN + len - first.len()) as u64;
    let rest = chain::slice(readable, first.len() as u64, left).collect();
    Ok((first, rest))
}
