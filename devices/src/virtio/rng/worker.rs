//! Fills the driver's buffers with random bytes of the host.
//!
//! Each request is served on the spot from the kernel's generator, which never waits once the host is
//! up; none is ever in flight.

use std::time::Instant;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::super::chain::{self, Chain};
use super::super::registry::DeviceState;
use super::super::{Activation, Interrupt, QueueFault, Stopped, VirtQueue, VirtioDevice, Worker};
use super::device::Rng;
use crate::rate_limiter::Cost;
use crate::{GuestMemory, sys};

// What one turn serves before the other devices get theirs.
const TURN_REQUESTS: usize = 16;
const CHUNK: usize = 4 << 10;

/// A source of randomness in use.
pub struct RngWorker {
    rng: Rng,
    memory: GuestMemory,
    queues: Vec<VirtQueue>,
    interrupt: Interrupt,
    quiet: bool,
    failed: bool,
}

impl RngWorker {
    pub(super) fn new(rng: Rng, activation: Activation) -> Self {
        let Activation { memory, queues, interrupt, .. } = activation;
        Self { rng, memory, queues, interrupt, quiet: false, failed: false }
    }

    fn turn(&mut self) -> Result<(), QueueFault> {
        let Some(queue) = self.queues.first_mut() else { return Ok(()) };
        let mut more = true;
        queue.disable_kicks()?;
        for _ in 0..TURN_REQUESTS {
            match queue.pop()? {
                Some(chain) => {
                    let wanted = wanted(&chain, self.rng.config.cap());
                    let limiter = self.rng.limiter.as_mut();
                    if limiter.is_some_and(|limiter| !limiter.admit(Cost::op(wanted))) {
                        // Goes on when the limiter says so; until then the driver need not kick.
                        queue.undo_pop(chain);
                        more = false;
                        break;
                    }
                    let len = fill(&self.memory, &chain, self.rng.config.cap());
                    if len == 0 {
                        queue.counters().add_refused();
                    }
                    queue.push(chain.head(), len)?;
                }
                None if queue.enable_kicks()? => queue.disable_kicks()?,
                None => {
                    more = false;
                    break;
                }
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
}

/// How many bytes a request gets.
fn wanted(chain: &Chain, cap: u32) -> u64 {
    chain::total_len(chain.writable()).min(u64::from(cap))
}

/// Fills up to `cap` bytes of what the device may write; returns how many.
fn fill(memory: &GuestMemory, chain: &Chain, cap: u32) -> u32 {
    let wanted = wanted(chain, cap);
    let (mut done, mut chunk) = (0, [0; CHUNK]);
    while done < wanted {
        let len = (wanted - done).min(CHUNK as u64) as usize;
        let Some(part) = chunk.get_mut(..len) else { break };
        // A host without randomness gives the driver a short answer, never a predictable one.
        let Ok(got @ 1..) = sys::random(part) else { break };
        let written =
            chain::write_at(memory, chain.writable(), done, part.get(..got).unwrap_or(&[]));
        if written == 0 {
            break;
        }
        done += written as u64;
    }
    done as u32
}

impl MutEventSubscriber for RngWorker {
    fn init(&mut self, ops: &mut EventOps) {
        for queue in &self.queues {
            let events = Events::new(queue.kick(), EventSet::IN);
            if let Err(error) = ops.add(events) {
                self.failed = true;
                self.interrupt.needs_reset();
                log::error!("rng: cannot watch its queue: {error}");
                return;
            }
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        self.queues.iter().for_each(VirtQueue::clear_kick);
        if self.quiet || self.failed {
            return;
        }
        if let Err(fault) = self.turn() {
            self.failed = true;
            if self.interrupt.needs_reset() {
                log::warn!("rng: {fault}");
            }
        }
    }
}

impl Worker for RngWorker {
    fn quiesce(&mut self) {
        // Nothing is ever in flight between two turns.
        self.quiet = true;
    }

    fn resume(&mut self) {
        self.quiet = false;
        self.queues.iter().for_each(VirtQueue::kick_if_due);
    }

    fn save(&self) -> DeviceState {
        self.rng.save()
    }

    fn stop(self: Box<Self>) -> Stopped {
        Stopped { device: Box::new(self.rng), queues: self.queues }
    }

    fn queues(&self) -> &[VirtQueue] {
        &self.queues
    }

    fn take_wake(&mut self) -> Option<Instant> {
        self.rng.limiter.as_mut()?.take_wake()
    }

    fn wake(&mut self) {
        self.queues.iter().for_each(VirtQueue::kick_again);
    }
}
