//! Moves frames from the guest's buffers to the tap: each is copied in part, checked, and sent, or
//! dropped and counted.

use std::io;
use std::time::Instant;

use super::super::chain::{self, Chain, Segment};
use super::device::{Net, feature};
use super::mmds::{self, Mmds};
use super::wire::{self, ETHERNET_LEN, HEADER_LEN, Refusal, TxOffloads};
use crate::GuestMemory;

const HEADERS: usize = HEADER_LEN + ETHERNET_LEN;
// Both headers, and the part of the frame that identifies its destination.
const LATCHED: usize = HEADERS + mmds::PEEK_LEN;
// An interrupted write is repeated, but not without limit.
const ATTEMPTS: usize = 4;

/// The outcome of sending a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    Done,
    /// Refused because of an error of the guest.
    Refused,
    /// Dropped because the tap is down, gone or full.
    Dropped,
}

/// Returns the offloads that the driver negotiated.
pub fn offloads(features: u64) -> TxOffloads {
    let has = |bit| features & bit != 0;
    TxOffloads {
        csum: has(feature::CSUM),
        tso4: has(feature::HOST_TSO4),
        tso6: has(feature::HOST_TSO6),
        ecn: has(feature::HOST_ECN),
    }
}

/// Returns the length of the frame in a chain.
pub fn frame_len(chain: &Chain) -> u64 {
    chain::total_len(chain.readable()).saturating_sub(HEADER_LEN as u64)
}

/// Sends the frame in a chain.
pub fn send(net: &mut Net, memory: &GuestMemory, chain: &Chain, offloads: TxOffloads) -> Sent {
    let Ok((first, rest)) = latch(net, memory, chain, offloads) else { return Sent::Refused };
    if let Some(mmds) = &mut net.mmds
        && is_for(mmds, &first)
    {
        return ask(mmds, memory, &first, &rest);
    }
    for _ in 0..ATTEMPTS {
        match net.link.send(&first, memory, &rest) {
            Ok(_) => return Sent::Done,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A frame that passes the checks here and not the kernel's is still an error of the
            // guest.
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

/// Returns whether the metadata service answers a frame, by its first bytes.
fn is_for(mmds: &Mmds, first: &[u8]) -> bool {
    let Some((_, frame)) = first.split_at_checked(HEADER_LEN) else { return false };
    let Some((ethernet, payload)) = frame.split_first_chunk() else { return false };
    mmds.is_for_us(ethernet, payload)
}

/// Passes a frame to the metadata service, which may then have a response for the guest.
fn ask(mmds: &mut Mmds, memory: &GuestMemory, first: &[u8], rest: &[Segment]) -> Sent {
    let known = &first[HEADER_LEN..];
    let len = known.len() as u64 + chain::total_len(rest);
    if len > mmds::RECEIVED_MAX as u64 {
        return Sent::Refused;
    }
    let mut frame = vec![0; len as usize];
    frame[..known.len()].copy_from_slice(known);
    chain::read_at(memory, rest, 0, &mut frame[known.len()..]);
    if mmds.receive(&frame, Instant::now()) { Sent::Done } else { Sent::Refused }
}

/// Copies the first bytes before they are checked, so that the checked bytes are the sent ones.
/// Returns them and the segments of the rest of the frame.
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
