//! Moves frames from the tap into the guest's buffers.
//!
//! The kernel writes a frame straight into as many buffers as the longest frame needs, and the rest
//! of it into a spill buffer of the host. With mergeable buffers a partly delivered frame then
//! waits until the driver adds more; without them it is dropped.

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

// The most bytes that a tap returns at once.
const WHOLE: usize = HEADER_LEN + FRAME_MAX;
// Half of what one call accepts, because a buffer that crosses from one memory region into the next
// becomes two pieces.
const PIECES_MAX: usize = sys::SEGMENTS_MAX / 2;
const TURN_FRAMES: usize = 128;
const TURN_BYTES: u64 = 2 << 20;
/// The cost that the limiter must admit while the length of the next frame is unknown.
const UNKNOWN: Cost = Cost { bytes: 1, ops: 1 };

/// The state that the receiving half of a card keeps between turns.
pub struct Rx {
    mergeable: bool,
    /// The tap has signalled frames and not yet been read until empty.
    pub readable: bool,
    // Popped and unused chains; kept between frames, because one frame may need dozens.
    chains: VecDeque<Chain>,
    capacity: u64,
    // The next available chain cannot be used before those in `chains` are.
    blocked: bool,
    waiting: Option<Waiting>,
    /// Allocated for the first frame: many machines never receive one.
    spill: Vec<u8>,
}

/// A frame whose first bytes are in `chains` and whose last bytes are in `spill`.
struct Waiting {
    len: usize,
    spilled_from: usize,
}

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// There is nothing to do until the next event.
    Idle,
    /// There is more to do, but other devices are served first.
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

    /// Delivers the frames that the tap has and the guest has room for.
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
                    // Buffers were added while kicks were disabled.
                    continue;
                }
                // Until the driver kicks, whole frames wait in the tap and a partial one here.
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

    /// Gives every chain back in reverse order, and drops a frame that waited for more buffers.
    pub fn put_back(&mut self, queue: &mut VirtQueue) {
        if self.waiting.take().is_some() {
            queue.counters().add_refused();
        }
        for chain in self.chains.drain(..).rev() {
            queue.undo_pop(chain);
        }
        self.capacity = 0;
    }

    /// Pops buffers until the longest frame has room, or there are no more. Returns false if there
    /// are none.
    fn collect(&mut self, queue: &mut VirtQueue) -> Result<bool, QueueFault> {
        let mut pieces: usize = self.chains.iter().map(|chain| chain.writable().len()).sum();
        self.blocked = false;
        // At most as many steps as the ring has entries, however fast the driver refills it.
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
                // The header does not fit, or the chain has too many pieces.
                queue.counters().add_refused();
                queue.push(chain.head(), 0)?;
            } else {
                // Only the last popped chain can be given back; it is used when it comes first.
                queue.undo_pop(chain);
                self.blocked = true;
                break;
            }
        }
        Ok(!self.chains.is_empty())
    }

    fn wants_more(&self) -> bool {
        if self.mergeable { self.capacity < WHOLE as u64 } else { self.chains.is_empty() }
    }

    /// Delivers the waiting frame, if there is one. Returns false if it needs more buffers.
    fn complete(
        &mut self,
        memory: &GuestMemory,
        queue: &mut VirtQueue,
    ) -> Result<bool, QueueFault> {
        let Some(Waiting { len, spilled_from }) = self.waiting else { return Ok(true) };
        if (len as u64) > self.capacity {
            // A driver that has offered half a ring without room for one frame will not have it
            // later.
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

    /// Delivers a frame of the metadata service. Returns false if it has to wait for more buffers.
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
        // The frame uses no offload, so the header only has the count of buffers.
        let bytes = [&[0; HEADER_LEN][..], &frame].concat();
        if bytes.len() as u64 > self.capacity {
            // There will be no more room than this. TCP retransmits, and then gives up.
            queue.counters().add_refused();
            return Ok(true);
        }
        let segments: Vec<Segment> = self.segments().collect();
        chain::write_at(memory, &segments, 0, &bytes);
        self.deliver(bytes.len(), memory, queue)?;
        Ok(true)
    }

    /// Reads one frame from the tap and returns its length.
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
                // The tap is empty, down or gone: the next event restarts reading.
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
        if !(HEADER_LEN + ETHERNET_LEN..=net.message_max()).contains(&got) {
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

    /// Returns a frame of `len` bytes at the front of the chains to the driver.
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
            // The kernel does not set the count of buffers; it is in the header, in the first
            // buffer.
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

/// Discards the frames that the tap holds, at most as many as taps queue by default. Only the start
/// of each frame is read; the kernel discards the rest.
pub fn drain(net: &mut Net, memory: &GuestMemory) {
    const QUEUED_MAX: usize = 1000;
    let mut scratch = [0; 2 * HEADER_LEN];
    for _ in 0..QUEUED_MAX {
        if !matches!(sys::read_frame(net.link.fd(), memory, &[], &mut scratch), Ok(1..)) {
            break;
        }
    }
}
