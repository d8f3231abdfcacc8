//! Makes a restored guest drop its old connections, and waits until it has.
//!
//! The event and a new connection use different queues, and a driver may read them in either order:
//! a connection opened too early would be dropped with the old ones. The driver returns its event
//! buffer after it has acted on the event, so nothing is sent before that is seen.

use std::time::{Duration, Instant};

use super::wire::EVENT_TRANSPORT_RESET;
use crate::virtio::chain;
use crate::virtio::{Chain, QueueFault, VirtQueue};

/// How long to wait for a driver that leaves the event queue empty or the event unanswered.
const PATIENCE: Duration = Duration::from_secs(1);

/// The progress of the guest in dropping its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resync {
    /// There is nothing to drop.
    Done,
    /// The event must be sent.
    Owed { until: Option<Instant> },
    /// The event was sent. The guest has acted on it once it offers `buffers` event buffers.
    Sent { buffers: usize, until: Instant },
}

impl Resync {
    pub fn owed() -> Self {
        Self::Owed { until: None }
    }

    /// Returns whether anything may be sent to the guest.
    pub fn allows_rx(&self) -> bool {
        *self == Self::Done
    }

    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Done => None,
            Self::Owed { until } => *until,
            Self::Sent { until, .. } => Some(*until),
        }
    }

    /// Moves the deadline by a time in which the guest did not run.
    pub fn postpone(&mut self, by: Duration) {
        match self {
            Self::Owed { until: Some(until) } | Self::Sent { until, .. } => *until += by,
            Self::Done | Self::Owed { until: None } => {}
        }
    }

    /// Makes as much progress as possible. It uses the queue only until the guest has acted.
    pub fn advance(&mut self, now: Instant, queue: &mut VirtQueue) -> Result<(), QueueFault> {
        if let Self::Owed { until } = *self {
            *self = match send_event(queue)? {
                Some(buffers) => Self::Sent { buffers, until: now + PATIENCE },
                None => Self::Owed { until: until.or(Some(now + PATIENCE)) },
            };
        }
        if let Self::Sent { buffers, .. } = *self
            && count_offered(queue)? >= buffers
        {
            *self = Self::Done;
        }
        if self.deadline().is_some_and(|until| until <= now) {
            // The driver does not comply; packets of old connections will be answered one by one.
            *self = Self::Done;
        }
        Ok(())
    }
}

/// Puts the event into the next buffer, if there is one. Returns the number of buffers that were
/// offered, which is offered again once the driver has acted. They are counted before the event is
/// returned, because another vCPU may act at once.
fn send_event(queue: &mut VirtQueue) -> Result<Option<usize>, QueueFault> {
    // At most the size of the queue: another vCPU may offer buffers as fast as they are returned.
    for _ in 0..=queue.size() {
        let Some(chain) = queue.pop()? else {
            if queue.enable_kicks()? {
                continue;
            }
            return Ok(None);
        };
        let fits = chain::total_len(chain.writable()) >= EVENT_TRANSPORT_RESET.len() as u64;
        if !fits {
            queue.push(chain.head(), 0)?;
            continue;
        }
        let buffers = count_offered(queue)? + 1;
        let written = chain::write_at(queue.memory(), chain.writable(), 0, &EVENT_TRANSPORT_RESET);
        queue.push(chain.head(), written as u32)?;
        return Ok(Some(buffers));
    }
    // Continue in another turn, until the deadline.
    queue.kick_again();
    Ok(None)
}

/// Returns how many buffers the driver offers, at most the size of the queue. It pops all of them,
/// so that the driver kicks for the next one.
fn count_offered(queue: &mut VirtQueue) -> Result<usize, QueueFault> {
    let mut offered: Vec<Chain> = Vec::new();
    for _ in 0..=queue.size() {
        match queue.pop()? {
            Some(chain) => offered.push(chain),
            None if queue.enable_kicks()? => {}
            None => break,
        }
    }
    let count = offered.len();
    for chain in offered.into_iter().rev() {
        queue.undo_pop(chain);
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;
    use crate::GuestMemory;
    use crate::virtio::QueueConfig;
    use crate::virtio::testing::{WRITE, memory, raw_descriptor};

    const SIZE: u16 = 64;
    const TABLE: u64 = 0x1_0000;
    const RINGS: u64 = 0x2_0000;
    const INDEX: GuestAddress = GuestAddress(RINGS + 2);

    /// Creates a full queue of buffers of `len` bytes, all at one address. Avail ring and used ring
    /// are at one address too.
    fn full_queue(memory: &GuestMemory, len: u32) -> VirtQueue {
        for index in 0..SIZE {
            let raw = raw_descriptor(0x4_0000, len, WRITE, 0);
            let at = TABLE + 16 * u64::from(index);
            memory.write_slice(&raw, GuestAddress(at)).unwrap();
        }
        memory.write_obj(SIZE, INDEX).unwrap();
        let (desc_table, avail_ring, used_ring) = (TABLE, RINGS, RINGS);
        let (size, ready, next_avail, next_used) = (SIZE, true, 0, SIZE);
        let config =
            QueueConfig { size, ready, desc_table, avail_ring, used_ring, next_avail, next_used };
        let kick = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        VirtQueue::new(&config, SIZE, true, memory.clone(), kick).unwrap()
    }

    #[test]
    fn buffers_that_another_vcpu_offers_again_and_again_take_one_turn_each_time() {
        let memory = memory();
        // Too small for the event: each is returned unused. Both rings share one index, so that
        // each is offered again.
        let mut queue = full_queue(&memory, 1);
        let (mut resync, now) = (Resync::owed(), Instant::now());
        for call in 1..=50 {
            resync.advance(now, &mut queue).unwrap();
            let used: u16 = memory.read_obj(INDEX).unwrap();
            assert!(used - SIZE <= call * (SIZE + 1), "{used} after {call} calls");
            assert!(!resync.allows_rx());
        }
        resync.advance(now + PATIENCE, &mut queue).unwrap();
        assert!(resync.allows_rx());
    }
}
