//! Tells the guest, after a restore, to drop the connections it remembers, and waits until it has.
//!
//! The event and a new connection travel in different queues, and a driver may look at them in either
//! order: a connection made too early would be dropped with the old ones. The driver puts its event
//! buffer back after it has acted on it, so nothing is sent before that is seen.

use std::time::{Duration, Instant};

use super::wire::EVENT_TRANSPORT_RESET;
use crate::GuestMemory;
use crate::virtio::chain;
use crate::virtio::{Chain, QueueFault, VirtQueue};

/// How long a driver may leave the event queue empty or unanswered before it is not waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How far the guest is in dropping its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resync {
    /// There is nothing to drop.
    Done,
    /// The guest must be told.
    Owed { until: Option<Instant> },
    /// The guest was told, and has acted once it offers so many event buffers.
    Told { buffers: usize, until: Instant },
}

impl Resync {
    pub fn owed() -> Self {
        Self::Owed { until: None }
    }

    /// Whether anything may be sent to the guest.
    pub fn allows_rx(&self) -> bool {
        *self == Self::Done
    }

    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Done => None,
            Self::Owed { until } => *until,
            Self::Told { until, .. } => Some(*until),
        }
    }

    /// Makes up for time in which the guest did not run.
    pub fn postpone(&mut self, by: Duration) {
        match self {
            Self::Owed { until: Some(until) } | Self::Told { until, .. } => *until += by,
            Self::Done | Self::Owed { until: None } => {}
        }
    }

    /// Does what can be done now; looks at the queue only while something is owed.
    pub fn advance(
        &mut self,
        now: Instant,
        queue: &mut VirtQueue,
        memory: &GuestMemory,
    ) -> Result<(), QueueFault> {
        if let Self::Owed { until } = *self {
            *self = match tell(queue, memory)? {
                Some(buffers) => Self::Told { buffers, until: now + PATIENCE },
                None => Self::Owed { until: until.or(Some(now + PATIENCE)) },
            };
        }
        if let Self::Told { buffers, .. } = *self
            && count_offered(queue)? >= buffers
        {
            *self = Self::Done;
        }
        if self.deadline().is_some_and(|until| until <= now) {
            // It broke its own side; packets of old connections will be answered one by one.
            *self = Self::Done;
        }
        Ok(())
    }
}

/// Puts the event into the next buffer, if there is one: then says how many buffers were offered, which is how many
/// will be when the driver has acted. Counted before it can act, for another vCPU may be quicker than we are.
fn tell(queue: &mut VirtQueue, memory: &GuestMemory) -> Result<Option<usize>, QueueFault> {
    // No more than the queue holds: another vCPU may offer buffers as quickly as they go back.
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
        let written = chain::write_at(memory, chain.writable(), 0, &EVENT_TRANSPORT_RESET);
        queue.push(chain.head(), written as u32)?;
        return Ok(Some(buffers));
    }
    // The rest has another turn, until the guest is no longer waited for.
    queue.kick_again();
    Ok(None)
}

/// How many buffers the driver offers, at most as many as the queue holds. Asks for a kick at the next one, which takes
/// going through all.
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
    use crate::virtio::QueueConfig;
    use crate::virtio::testing::{WRITE, memory, raw_descriptor};

    const SIZE: u16 = 64;
    const TABLE: u64 = 0x1_0000;
    const RINGS: u64 = 0x2_0000;
    const INDEX: GuestAddress = GuestAddress(RINGS + 2);

    /// A full queue of buffers, each of them `len` bytes at the same place. The available ring is the used one.
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
        // Too small for the event: each goes back unused. Both indices are one word, so that each is offered again.
        let mut queue = full_queue(&memory, 1);
        let (mut resync, now) = (Resync::owed(), Instant::now());
        for call in 1..=50 {
            resync.advance(now, &mut queue, &memory).unwrap();
            let used: u16 = memory.read_obj(INDEX).unwrap();
            assert!(used - SIZE <= call * (SIZE + 1), "{used} after {call} calls");
            assert!(!resync.allows_rx());
        }
        resync.advance(now + PATIENCE, &mut queue, &memory).unwrap();
        assert!(resync.allows_rx());
    }
}
