//! Fills the driver's buffers with random bytes of the host.
//!
//! Each request is served at once from the kernel's generator, which never blocks once the host is
//! up; none is ever in flight.

use std::time::Instant;

use super::super::chain::{self, Chain};
use super::super::registry::DeviceState;
use super::super::worker::{Budget, Event, Fault, Served};
use super::super::{Rings, VirtQueue, VirtioDevice, Worker};
use super::device::Rng;
use crate::rate_limiter::Cost;
use crate::{GuestMemory, sys};

const TURN: Budget = Budget { chains: 16, bytes: u64::MAX };
const CHUNK: usize = 4 << 10;

/// A source of randomness in use. No request is in flight between two turns.
pub struct RngWorker(pub(super) Rng);

impl Worker for RngWorker {
    fn name(&self) -> String {
        "rng".to_owned()
    }

    fn turn(&mut self, rings: &mut Rings, _event: Event) -> Result<(), Fault> {
        rings.serve_queue(0, TURN, self).map(drop)
    }

    fn serve_chain(
        &mut self,
        _index: usize,
        queue: &mut VirtQueue,
        chain: Chain,
    ) -> Result<Served, Fault> {
        let cap = self.0.config.cap();
        let cost = Cost::op(wanted(&chain, cap));
        if self.0.limiter.as_mut().is_some_and(|limiter| !limiter.admit(cost)) {
            return Ok(Served::Later(chain));
        }
        let len = fill(queue.memory(), &chain, cap);
        if len == 0 {
            queue.counters().add_refused();
        }
        queue.push(chain.head(), len)?;
        Ok(Served::Done { bytes: 0 })
    }

    fn save(&self) -> DeviceState {
        self.0.save()
    }

    fn stop(self: Box<Self>) -> Box<dyn VirtioDevice> {
        Box::new(self.0)
    }

    fn take_wake(&mut self) -> Option<Instant> {
        self.0.limiter.as_mut()?.take_wake()
    }
}

/// Returns how many bytes a request gets.
fn wanted(chain: &Chain, cap: u32) -> u64 {
    chain::total_len(chain.writable()).min(u64::from(cap))
}

/// Fills up to `cap` bytes of the writable buffers. Returns how many were filled.
fn fill(memory: &GuestMemory, chain: &Chain, cap: u32) -> u32 {
    let wanted = wanted(chain, cap);
    let (mut done, mut chunk) = (0, [0; CHUNK]);
    while done < wanted {
        let len = (wanted - done).min(CHUNK as u64) as usize;
        let Some(part) = chunk.get_mut(..len) else { break };
        // Without randomness of the host the driver gets a short answer, never a predictable one.
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
