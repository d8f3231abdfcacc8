//! Serves the requests of a disk's one queue on the device thread.
//!
//! A request of the guest ends in a status byte. Only a request that leaves no place for one, or a
//! broken ring, stops the queue. Requests that are out with the engine are kept by the head of their chain.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Instant;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::super::registry::{DeviceState, DeviceUpdate};
use super::super::{
    Activation, Interrupt, QueueFault, Stopped, UpdateError, Updated, VirtQueue, Worker,
};
use super::device::Block;
use super::request::{Next, Request};
use super::wire::Status;
use crate::GuestMemory;

// What one turn serves before the other devices get theirs.
const TURN_REQUESTS: usize = 64;
const TURN_BYTES: u64 = 16 << 20;

/// What ends a disk's work until the next reset.
#[derive(Debug, thiserror::Error)]
enum BlockFault {
    #[error("queue failed: {0}")]
    Queue(#[from] QueueFault),
    #[error("request has no room for its status")]
    NoStatus,
    #[error("host refused the operations: {0}")]
    Engine(#[from] io::Error),
}

/// A disk in use.
pub struct BlockWorker {
    block: Block,
    memory: GuestMemory,
    // Exactly one; a list because the transport saves lists.
    queues: Vec<VirtQueue>,
    interrupt: Interrupt,
    under_way: BTreeMap<u16, Request>,
    quiet: bool,
    failed: bool,
}

impl BlockWorker {
    pub(super) fn new(block: Block, activation: Activation) -> Self {
        let Activation { memory, queues, interrupt, .. } = activation;
        let under_way = BTreeMap::new();
        Self { block, memory, queues, interrupt, under_way, quiet: false, failed: false }
    }

    fn serve(&mut self) {
        if self.failed {
            self.discard_ended();
        } else if !self.quiet {
            let served = self.turn();
            self.end_turn(served);
        }
    }

    fn end_turn(&mut self, served: Result<(), BlockFault>) {
        if let Err(fault) = served.and_then(|()| self.tell_driver()) {
            self.failed = true;
            if self.interrupt.needs_reset() {
                log::warn!("block {:?}: {fault}", self.block.facts.id);
            }
        }
    }

    /// Finishes what has ended and starts what is available, up to one turn's share.
    fn turn(&mut self) -> Result<(), BlockFault> {
        self.finish_ended()?;
        let (mut bytes, mut more) = (0, true);
        self.queue()?.disable_kicks()?;
        for _ in 0..TURN_REQUESTS {
            if !self.block.engine.has_room() {
                // Whatever ends next starts another turn.
                more = false;
                break;
            }
            match self.queue()?.pop()? {
                Some(chain) => {
                    let request = Request::parse(&self.block.facts, &self.memory, chain)
                        .ok_or(BlockFault::NoStatus)?;
                    if !self.block.limiter.admit(request.cost()) {
                        // The limiter says when there is another turn.
                        self.queue()?.undo_pop(request.into_chain());
                        more = false;
                        break;
                    }
                    bytes += request.turn_bytes();
                    self.advance(request, None)?;
                    self.finish_ended()?;
                }
                None if self.queue()?.enable_kicks()? => self.queue()?.disable_kicks()?,
                None => {
                    more = false;
                    break;
                }
            }
            if bytes >= TURN_BYTES {
                break;
            }
        }
        self.submit()?;
        self.finish_ended()?;
        if more {
            self.queue()?.kick_again();
        }
        Ok(())
    }

    /// Takes a request one step on: to its next operation, or back to the driver.
    fn advance(
        &mut self,
        mut request: Request,
        last: Option<(super::io::Op, io::Result<usize>)>,
    ) -> Result<(), BlockFault> {
        let head = request.chain().head();
        match request.next(&mut self.block, &self.memory, last) {
            Next::Op(op) => {
                self.under_way.insert(head, request);
                self.block.engine.start(head, op);
                Ok(())
            }
            Next::Done { status, written } => {
                if !request.write_status(&self.memory, status) {
                    return Err(BlockFault::NoStatus);
                }
                let queue = self.queue()?;
                if status != Status::Ok {
                    queue.counters().add_refused();
                }
                // What precedes the status of a failed request is undefined, so none of it counts as written.
                let len = if status == Status::Ok { written.saturating_add(1) } else { 0 };
                Ok(queue.push(head, len)?)
            }
        }
    }

    fn finish_ended(&mut self) -> Result<(), BlockFault> {
        while let Some(finished) = self.block.finished() {
            if let Some(request) = self.under_way.remove(&finished.token) {
                self.advance(request, Some((finished.op, finished.result)))?;
            }
        }
        Ok(())
    }

    /// Lets go of what has ended without telling the driver.
    fn discard_ended(&mut self) {
        while let Some(finished) = self.block.finished() {
            self.under_way.remove(&finished.token);
        }
    }

    fn submit(&mut self) -> Result<(), BlockFault> {
        match self.block.engine.submit() {
            // The host is short of memory for the moment: what was started is kept, and tried again.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                self.queue()?.kick_again();
                Ok(())
            }
            result => Ok(result?),
        }
    }

    /// Waits for everything that is out, which takes as long as the host's disk does.
    fn drain(&mut self) -> Result<(), BlockFault> {
        self.finish_ended()?;
        while !self.under_way.is_empty() {
            self.block.engine.wait()?;
            self.finish_ended()?;
        }
        Ok(())
    }

    fn tell_driver(&mut self) -> Result<(), BlockFault> {
        if self.queue()?.wants_interrupt()? {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    fn queue(&mut self) -> Result<&mut VirtQueue, BlockFault> {
        Ok(self.queues.first_mut().ok_or(QueueFault::NotReady)?)
    }
}

impl MutEventSubscriber for BlockWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let kicks = self.queues.iter().map(|queue| Events::new(queue.kick(), EventSet::IN));
        let ended = self.block.ended.iter().map(|ended| Events::new(&**ended, EventSet::IN));
        for events in kicks.chain(ended) {
            if let Err(error) = ops.add(events) {
                self.failed = true;
                self.interrupt.needs_reset();
                log::error!("block {:?}: cannot watch its events: {error}", self.block.facts.id);
                return;
            }
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        match self.block.ended.as_ref().filter(|ended| ended.as_raw_fd() == events.fd()) {
            // Empty means that it was taken before; nothing is lost.
            Some(ended) => drop(ended.read()),
            None => self.queues.iter().for_each(VirtQueue::clear_kick),
        }
        self.serve();
    }
}

impl Worker for BlockWorker {
    fn quiesce(&mut self) {
        if !self.failed {
            let drained = self.drain();
            self.end_turn(drained);
        }
        self.quiet = true;
    }

    fn resume(&mut self) {
        self.quiet = false;
        self.queues.iter().for_each(VirtQueue::kick_if_due);
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block(self.block.state())
    }

    fn stop(mut self: Box<Self>) -> Stopped {
        // Nobody is told of these any more, but no operation may outlive the reset.
        self.discard_ended();
        while !self.under_way.is_empty() {
            if let Err(error) = self.block.engine.wait() {
                self.block.host_error(&error);
                break;
            }
            self.discard_ended();
        }
        Stopped { device: Box::new(self.block), queues: self.queues }
    }

    fn queues(&self) -> &[VirtQueue] {
        &self.queues
    }

    fn take_wake(&mut self) -> Option<Instant> {
        self.block.limiter.take_wake()
    }

    fn wake(&mut self) {
        self.queues.iter().for_each(VirtQueue::kick_again);
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        if !self.failed {
            let drained = self.drain();
            self.end_turn(drained);
        }
        let updated = self.block.change(update);
        // Requests that waited for the old limits or were refused by the old size get their turn.
        self.queues.iter().for_each(VirtQueue::kick_again);
        updated
    }
}
