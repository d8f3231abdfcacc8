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
    loop {
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
}

/// How many buffers the driver offers. Asks for a kick at the next one, which takes going through all.
fn count_offered(queue: &mut VirtQueue) -> Result<usize, QueueFault> {
    let mut offered: Vec<Chain> = Vec::new();
    loop {
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
