//! Serves the requests of a disk's one queue, in order, on the device thread.
//!
//! A request of the guest ends in a status byte. Only a request that leaves no place for one, or a
//! broken ring, stops the queue.

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::super::chain::{self, Chain};
use super::super::registry::DeviceState;
use super::super::{Activation, Interrupt, QueueFault, Stopped, VirtQueue, Worker};
use super::device::Block;
use super::request::{self, Outcome};
use super::wire::Status;
use crate::GuestMemory;

// What one turn serves before the other devices get theirs.
const TURN_REQUESTS: usize = 64;
const TURN_BYTES: u64 = 16 << 20;

/// What a driver can do that ends a disk's work until the next reset.
#[derive(Debug, thiserror::Error)]
enum BlockFault {
    #[error("queue failed: {0}")]
    Queue(#[from] QueueFault),
    #[error("request has no room for its status")]
    NoStatus,
}

/// A disk in use.
pub struct BlockWorker {
    block: Block,
    memory: GuestMemory,
    // Exactly one; a list because the transport saves lists.
    queues: Vec<VirtQueue>,
    interrupt: Interrupt,
    quiet: bool,
    failed: bool,
}

impl BlockWorker {
    pub(super) fn new(block: Block, activation: Activation) -> Self {
        let Activation { memory, queues, interrupt, .. } = activation;
        Self { block, memory, queues, interrupt, quiet: false, failed: false }
    }

    fn serve(&mut self) {
        if self.quiet || self.failed {
            return;
        }
        if let Err(fault) = self.turn() {
            self.fail(&fault.to_string());
        }
    }

    /// Serves what is available, up to one turn's share, and tells the driver once.
    fn turn(&mut self) -> Result<(), BlockFault> {
        let Some(queue) = self.queues.first_mut() else { return Ok(()) };
        let (mut bytes, mut more) = (0, true);
        queue.disable_kicks()?;
        for _ in 0..TURN_REQUESTS {
            match queue.pop()? {
                Some(chain) => {
                    let (len, moved) = answer(&mut self.block, &self.memory, queue, &chain)?;
                    queue.push(chain.head(), len)?;
                    bytes += moved;
                }
                None if queue.enable_kicks()? => queue.disable_kicks()?,
                None => {
                    more = false;
                    break;
                }
            }
            if bytes >= TURN_BYTES {
                break;
            }
        }
        if more {
            queue.kick_again();
        }
        if queue.wants_interrupt()? {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    fn fail(&mut self, why: &str) {
        self.failed = true;
        if self.interrupt.needs_reset() {
            log::warn!("block {:?}: {why}", self.block.facts.id);
        }
    }
}

/// Serves one chain and writes its status; returns the length for the used ring and how much was moved.
fn answer(
    block: &mut Block,
    memory: &GuestMemory,
    queue: &VirtQueue,
    chain: &Chain,
) -> Result<(u32, u64), BlockFault> {
    let writable = chain.writable();
    if writable.last().is_none_or(|last| last.len == 0) {
        return Err(BlockFault::NoStatus);
    }
    let room = chain::total_len(writable) - 1;
    let Outcome { status, written, moved } = request::serve(block, memory, chain, room);
    if status != Status::Ok {
        queue.counters().add_refused();
    }
    if chain::write_at(memory, writable, room, &[status as u8]) == 0 {
        return Err(BlockFault::NoStatus);
    }
    // What precedes the status of a failed request is undefined, so none of it counts as written.
    let len = if status == Status::Ok { written.saturating_add(1) } else { 0 };
    Ok((len, moved))
}

impl MutEventSubscriber for BlockWorker {
    fn init(&mut self, ops: &mut EventOps) {
        for queue in &self.queues {
            if let Err(error) = ops.add(Events::new(queue.kick(), EventSet::IN)) {
                self.failed = true;
                self.interrupt.needs_reset();
                log::error!("block {:?}: cannot watch its queue: {error}", self.block.facts.id);
                return;
            }
        }
        // What the driver added before it was ready, or before a snapshot, has no kick of its own.
        self.queues.iter().for_each(VirtQueue::kick_again);
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        self.queues.iter().for_each(VirtQueue::clear_kick);
        self.serve();
    }
}

impl Worker for BlockWorker {
    fn quiesce(&mut self) {
        // Nothing is ever in flight between two turns.
        self.quiet = true;
    }

    fn resume(&mut self) {
        self.quiet = false;
        self.queues.iter().for_each(VirtQueue::kick_again);
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block(self.block.state())
    }

    fn stop(self: Box<Self>) -> Stopped {
        Stopped { device: Box::new(self.block), queues: self.queues }
    }

    fn queues(&self) -> &[VirtQueue] {
        &self.queues
    }
}
