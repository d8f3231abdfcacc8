//! Serves the requests of a disk's one queue on the device thread.
//!
//! Each request of the guest ends in a status byte. Only a request without room for one, or a
//! broken ring, stops the queue. Requests in flight in the engine are kept by the head of their
//! chain.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use super::super::registry::{DeviceState, DeviceUpdate};
use super::super::worker::{Budget, Event, Fault, Served};
use super::super::{Chain, Rings, UpdateError, Updated, VirtQueue, VirtioDevice, Worker};
use super::device::Block;
use super::io::Op;
use super::request::{BlockRequest, Next};
use super::wire::Status;

const TURN: Budget = Budget { chains: 64, bytes: 16 << 20 };
const NO_STATUS: Fault = Fault::Request("request has no room for its status");

/// A disk in use.
pub struct BlockWorker {
    block: Block,
    in_flight: BTreeMap<u16, BlockRequest>,
}

impl BlockWorker {
    pub(super) fn new(block: Block) -> Self {
        Self { block, in_flight: BTreeMap::new() }
    }

    /// Advances a request by one step: to its next operation, or back to the driver.
    fn advance(
        &mut self,
        queue: &mut VirtQueue,
        mut request: BlockRequest,
        last: Option<(Op, io::Result<usize>)>,
    ) -> Result<(), Fault> {
        let head = request.chain().head();
        match request.next(&mut self.block, queue.memory(), last) {
            Next::Op(op) => {
                self.in_flight.insert(head, request);
                self.block.engine.start(head, op);
                Ok(())
            }
            Next::Done { status, written } => {
                if !request.write_status(queue.memory(), status) {
                    return Err(NO_STATUS);
                }
                if status != Status::Ok {
                    queue.counters().add_refused();
                }
                // The data of a failed request is undefined, so none of it counts as written.
                let len = if status == Status::Ok { written.saturating_add(1) } else { 0 };
                Ok(queue.push(head, len)?)
            }
        }
    }

    fn finish_ended(&mut self, queue: &mut VirtQueue) -> Result<(), Fault> {
        while let Some(finished) = self.block.finished() {
            if let Some(request) = self.in_flight.remove(&finished.token) {
                self.advance(queue, request, Some((finished.op, finished.result)))?;
            }
        }
        Ok(())
    }

    /// Drops completed requests without returning them to the driver.
    fn discard_ended(&mut self) {
        while let Some(finished) = self.block.finished() {
            self.in_flight.remove(&finished.token);
        }
    }

    fn submit(&mut self, queue: &VirtQueue) -> Result<(), Fault> {
        match self.block.engine.submit() {
            // The host is short of memory for the moment: the prepared operations are kept and
            // submitted again.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                queue.kick_again();
                Ok(())
            }
            result => Ok(result?),
        }
    }
}

impl Worker for BlockWorker {
    fn name(&self) -> String {
        format!("block {:?}", self.block.facts.id)
    }

    fn backend_fd(&self) -> Option<RawFd> {
        self.block.ended.as_ref().map(|ended| ended.as_raw_fd())
    }

    fn turn(&mut self, rings: &mut Rings, _event: Event) -> Result<(), Fault> {
        self.finish_ended(rings.queue(0)?)?;
        rings.serve_queue(0, TURN, self)?;
        let queue = rings.queue(0)?;
        self.submit(queue)?;
        self.finish_ended(queue)
    }

    fn is_ready(&mut self, _index: usize, _queue: &mut VirtQueue) -> Result<bool, Fault> {
        // The next completion starts another turn.
        Ok(self.block.engine.has_room())
    }

    fn serve_chain(
        &mut self,
        _index: usize,
        queue: &mut VirtQueue,
        chain: Chain,
    ) -> Result<Served, Fault> {
        let request =
            BlockRequest::parse(&self.block.facts, queue.memory(), chain).ok_or(NO_STATUS)?;
        if !self.block.limiter.admit(request.cost()) {
            return Ok(Served::Later(request.into_chain()));
        }
        let bytes = request.turn_bytes();
        self.advance(queue, request, None)?;
        self.finish_ended(queue)?;
        Ok(Served::Done { bytes })
    }

    fn abandon(&mut self) {
        self.discard_ended();
    }

    /// Waits for all operations in flight. This takes as long as the host's disk does.
    fn finish(&mut self, rings: &mut Rings) -> Result<(), Fault> {
        let queue = rings.queue(0)?;
        self.finish_ended(queue)?;
        while !self.in_flight.is_empty() {
            self.block.engine.wait()?;
            self.finish_ended(queue)?;
        }
        Ok(())
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block(self.block.state())
    }

    fn stop(mut self: Box<Self>) -> Box<dyn VirtioDevice> {
        // The driver is not notified of these, but no operation may outlive the reset.
        self.discard_ended();
        while !self.in_flight.is_empty() {
            if let Err(error) = self.block.engine.wait() {
                self.block.host_error(&error);
                break;
            }
            self.discard_ended();
        }
        // The next worker gets no event of this one.
        self.block.ended.iter().for_each(|ended| drop(ended.read()));
        Box::new(self.block)
    }

    fn take_wake(&mut self) -> Option<Instant> {
        self.block.limiter.take_wake()
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        self.block.change(update)
    }
}
