//! A frame of the tap on its way into the guest's buffers.
//!
//! The kernel writes it straight into as many buffers as the longest frame needs, and what those cannot
//! hold into a spare one of ours. With merged buffers such a frame waits, half delivered, until the driver
//! adds more; without them it is dropped.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::super::chain::{self, Chain, Segment};
use super::super::{QueueFault, VirtQueue};
use super::device::{Net, feature};
use super::mmds;
use super::sys;
use super::wire::{ETHERNET_LEN, FRAME_MAX, HEADER_LEN, NUM_BUFFERS_OFFSET};
use crate::GuestMemory;
use crate::rate_limiter::Cost;

// The longest that a tap hands over at once.
const WHOLE: usize = HEADER_LEN + FRAME_MAX;
// Half of what one call takes, for a buffer that crosses from one region into the next becomes two.
const PIECES_MAX: usize = sys::SEGMENTS_MAX / 2;
const TURN_FRAMES: usize = 128;
const TURN_BYTES: u64 = 2 << 20;
/// What the limiter must have left before anybody knows how long the next frame is.
const UNKNOWN: Cost = Cost { bytes: 1, ops: 1 };

/// What the receiving half of a card keeps from turn to turn.
pub struct Rx {
    mergeable: bool,
    /// The tap has said that there is something, and not yet that there is no more.
    pub readable: bool,
    // Popped and not used yet; kept from frame to frame, because one may need dozens.
    chains: VecDeque<Chain>,
    capacity: u64,
    // The next buffer on offer cannot be taken before those in `chains` are used.
    blocked: bool,
    waiting: Option<Waiting>,
    /// Made for the first frame: many a machine never sees one.
    spill: Vec<u8>,
}

/// A frame whose first bytes are in `chains` and whose last ones are in `spill`.
struct Waiting {
    len: usize,
    spilled_from: usize,
}

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing to do until an event says otherwise.
    Idle,
    /// There is more, but others want their turn.
    More,
}

impl Rx {
    pub fn new(features: u64) -> Self {
        Self {
            mergeable: features & feature::MRG_RXBUF != 0,
            readable: true,
            chains: VecDeque::new(),
            capacity: 0,
            blocked: false,
            waiting: None,
            spill: Vec::new(),
        }
    }

    /// Delivers what the tap has and the guest has room for.
    pub fn turn(
        &mut self,
        net: &mut Net,
        memory: &GuestMemory,
        queue: &mut VirtQueue,
    ) -> Result<Turn, QueueFault> {
        let mut bytes = 0;
        let now = Instant::now();
        for _ in 0..TURN_FRAMES {
            let metadata = net.mmds.as_mut().is_some_and(|mmds| mmds.is_ready(now));
            if self.waiting.is_none() && !self.readable && !metadata {
                return Ok(Turn::Idle);
            }
            if !self.collect(queue)? || !self.complete(memory, queue)? {
                if queue.enable_kicks()? {
                    // Buffers came while nobody was told.
                    continue;
                }
                // A whole frame waits in the tap, a half one here, until the driver kicks.
                return Ok(Turn::Idle);
            }
            if self.chains.is_empty() {
                continue;
            }
            if metadata {
                if self.deliver_metadata(net, memory, queue)? {
                    continue;
                }
                if !self.readable {
                    if queue.enable_kicks()? {
                        continue;
                    }
                    return Ok(Turn::Idle);
                }
            }
            if !self.readable || !net.rx_limiter.admit(UNKNOWN) {
                return Ok(Turn::Idle);
            }
            bytes += self.receive(net, memory, queue)?;
            if bytes >= TURN_BYTES {
                break;
            }
        }
        Ok(Turn::More)
    }

    /// Gives every chain back, last one first, and drops a frame that waited for more.
    pub fn put_back(&mut self, queue: &mut VirtQueue) {
        if self.waiting.take().is_some() {
            queue.counters().add_refused();
        }
        for chain in self.chains.drain(..).rev() {
            queue.undo_pop(chain);
        }
        self.capacity = 0;
    }

    /// Pops buffers until the longest frame has room, or there are no more; false if there are none.
    fn collect(&mut self, queue: &mut VirtQueue) -> Result<bool, QueueFault> {
        let mut pieces: usize = self.chains.iter().map(|chain| chain.writable().len()).sum();
        self.blocked = false;
        // As many steps as the ring has entries, however fast the driver refills it.
        for _ in 0..queue.size() {
            if !self.wants_more() {
                break;
            }
            let Some(chain) = queue.pop()? else { break };
            let (room, count) = (chain::total_len(chain.writable()), chain.writable().len());
            if room >= HEADER_LEN as u64 && pieces + count <= PIECES_MAX {
                pieces += count;
                self.capacity += room;
                self.chains.push_back(chain);
            } else if self.chains.is_empty() {
                // Not even the header fits, or it comes in crumbs.
                queue.counters().add_refused();
                queue.push(chain.head(), 0)?;
            } else {
                // Only the last one popped can go back; it is looked at again when it comes first.
                queue.undo_pop(chain);
                self.blocked = true;
                break;
            }
        }
        Ok(!self.chains.is_empty())
    }

    fn wants_more(&self) -> bool {
        match self.mergeable {
            true => self.capacity < WHOLE as u64,
            false => self.chains.is_empty(),
        }
    }

    /// Delivers the frame that waits, if there is one; false if it has to go on waiting.
    fn complete(
        &mut self,
        memory: &GuestMemory,
        queue: &mut VirtQueue,
    ) -> Result<bool, QueueFault> {
        let Some(Waiting { len, spilled_from }) = self.waiting else { return Ok(true) };
        if (len as u64) > self.capacity {
            // A driver that has offered half a ring and has no room for one frame will not have it later.
            if !self.blocked && self.chains.len() * 2 < usize::from(queue.size()) {
                return Ok(false);
            }
            self.waiting = None;
            queue.counters().add_refused();
            return Ok(true);
        }
        let segments: Vec<Segment> = self.segments().collect();
        let spilled = self.spill.get(..len - spilled_from).unwrap_or(&[]);
        chain::write_at(memory, &segments, spilled_from as u64, spilled);
        self.waiting = None;
        self.deliver(len, memory, queue)?;
        Ok(true)
    }

    /// Delivers a frame of the metadata service; false if it has to wait for more buffers.
    fn deliver_metadata(
        &mut self,
        net: &mut Net,
        memory: &GuestMemory,
        queue: &mut VirtQueue,
    ) -> Result<bool, QueueFault> {
        const ROOM: u64 = (HEADER_LEN + mmds::SENT_MAX) as u64;
        if self.capacity < ROOM && self.mergeable && !self.blocked {
            return Ok(false);
        }
        let Some(frame) = net.mmds.as_mut().and_then(mmds::Mmds::take_frame) else {
            return Ok(true);
        };
        // Nothing is left undone, so the header says nothing but the count of buffers.
        let bytes = [&[0; HEADER_LEN][..], &frame].concat();
        if bytes.len() as u64 > self.capacity {
            // There is no more room than this; TCP will try again, and then give up.
            queue.counters().add_refused();
            return Ok(true);
        }
        let segments: Vec<Segment> = self.segments().collect();
        chain::write_at(memory, &segments, 0, &bytes);
        self.deliver(bytes.len(), memory, queue)?;
        Ok(true)
    }

    /// Takes one frame from the tap; returns how long it was.
    fn receive(
        &mut self,
        net: &mut Net,
        memory: &GuestMemory,
        queue: &mut VirtQueue,
    ) -> Result<u64, QueueFault> {
        let segments: Vec<Segment> = self.segments().collect();
        self.spill.resize(WHOLE, 0);
        let got = match sys::read_frame(net.link.fd(), memory, &segments, &mut self.spill) {
            Ok(got) if got > 0 => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                net.rx_limiter.refund(UNKNOWN);
                return Ok(0);
            }
            other => {
                // Nothing there, or the tap is down or gone: the next event says when to look again.
                self.readable = false;
                net.rx_limiter.refund(UNKNOWN);
                match other {
                    Err(error)
                        if error.kind() != io::ErrorKind::WouldBlock && net.add_host_error() =>
                    {
                        log::warn!("net {}: cannot receive: {error}", net.link.name());
                    }
                    _ => {}
                }
                return Ok(0);
            }
        };
        let frame = got.saturating_sub(HEADER_LEN) as u64;
        net.rx_limiter.charge(Cost { bytes: frame.saturating_sub(UNKNOWN.bytes), ops: 0 });
        if got < HEADER_LEN + ETHERNET_LEN {
            net.add_host_error();
        } else if (got as u64) <= self.capacity {
            self.deliver(got, memory, queue)?;
        } else if self.mergeable {
            self.waiting = Some(Waiting { len: got, spilled_from: self.capacity as usize });
        } else {
            queue.counters().add_refused();
        }
        Ok(got as u64)
    }

    /// Tells the driver of a frame of `len` bytes at the front of the chains.
    fn deliver(
        &mut self,
        len: usize,
        memory: &GuestMemory,
        queue: &mut VirtQueue,
    ) -> Result<(), QueueFault> {
        let mut left = len as u64;
        let mut used = Vec::with_capacity(1);
        while left > 0 {
            let Some(chain) = self.chains.pop_front() else { break };
            let room = chain::total_len(chain.writable());
            self.capacity -= room;
            let here = left.min(room);
            left -= here;
            used.push((chain, here as u32));
        }
        if let Some((first, _)) = used.first() {
            // The kernel leaves the count to us; it stands in the first buffer.
            let count = (used.len() as u16).to_le_bytes();
            chain::write_at(memory, first.writable(), NUM_BUFFERS_OFFSET, &count);
        }
        for (chain, here) in used {
            queue.push(chain.head(), here)?;
        }
        Ok(())
    }

    fn segments(&self) -> impl Iterator<Item = Segment> {
        let segments = self.chains.iter().flat_map(Chain::writable);
        segments.copied().filter(|segment| segment.len > 0)
    }
}

/// Throws away what the tap holds; at most so much as taps queue by default. Of each frame only the start is
/// read: the rest goes with it.
pub fn drain(net: &mut Net, memory: &GuestMemory) {
    const QUEUED_MAX: usize = 1000;
    let mut scratch = [0; 2 * HEADER_LEN];
    for _ in 0..QUEUED_MAX {
        if !matches!(sys::read_frame(net.link.fd(), memory, &[], &mut scratch), Ok(1..)) {
            break;
        }
    }
}
