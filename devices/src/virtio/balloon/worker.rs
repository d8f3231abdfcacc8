//! Runs the queues of a balloon, a bounded share of each in every turn.
//!
//! Nothing of the guest's is in flight between turns but the one buffer that statistics come in: the device
//! keeps it until somebody asks, and giving it back is the question.

use std::sync::mpsc::SyncSender;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::super::chain::{self, Chain};
use super::super::registry::{DeviceState, DeviceUpdate};
use super::super::{
    Activation, Interrupt, QueueFault, Stopped, UpdateError, Updated, VirtQueue, Worker,
};
use super::config::PAGE_SIZE;
use super::device::{Balloon, BalloonUpdate, feature};
use super::hint::Hinting;
use super::pages;
use super::stats::{self, BalloonStats};
use crate::GuestMemory;

// What one turn takes of each queue before the other devices get theirs.
const TURN_CHAINS: usize = 32;
const TURN_BYTES: u64 = 256 << 20;

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Inflate,
    Deflate,
    Stats,
    Hinting,
    Reporting,
}

/// A balloon in use.
pub struct BalloonWorker {
    balloon: Balloon,
    memory: GuestMemory,
    total_pages: u32,
    queues: Vec<VirtQueue>,
    roles: Vec<Role>,
    interrupt: Interrupt,
    hinting: Hinting,
    asked: Asked,
    quiet: bool,
    failed: bool,
}

/// Where a question for statistics stands.
#[derive(Default)]
struct Asked {
    held: Option<Chain>,
    waiter: Option<SyncSender<BalloonStats>>,
    /// The buffer has gone back to the guest, which will fill it.
    given: bool,
}

impl BalloonWorker {
    pub(super) fn new(balloon: Balloon, activation: Activation) -> Self {
        use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};
        let Activation { memory, mut queues, interrupt, features } = activation;
        let roles = roles(features);
        let failed = queues.len() < roles.len();
        if failed && interrupt.needs_reset() {
            log::warn!("balloon: the driver agreed to more than it has set queues up for");
        }
        // One that the driver set up but has no use for is not looked at.
        queues.truncate(roles.len());
        let bytes: u64 = memory.iter().map(|region| region.len()).sum();
        let total_pages = u32::try_from(bytes / PAGE_SIZE).unwrap_or(u32::MAX);
        let (hinting, asked) = Default::default();
        let quiet = false;
        Self {
            balloon,
            memory,
            total_pages,
            queues,
            roles,
            interrupt,
            hinting,
            asked,
            quiet,
            failed,
        }
    }

    fn serve(&mut self) {
        if self.quiet || self.failed {
            return;
        }
        if let Err(fault) = self.turn() {
            self.failed = true;
            self.asked = Asked::default();
            if self.interrupt.needs_reset() {
                log::warn!("balloon: {fault}");
            }
        }
    }

    fn turn(&mut self) -> Result<(), QueueFault> {
        let mut interrupt = false;
        for index in 0..self.roles.len() {
            if self.serve_queue(index)?
                && let Some(queue) = self.queues.get(index)
            {
                queue.kick_again();
            }
            if let Some(queue) = self.queues.get_mut(index) {
                interrupt |= queue.wants_interrupt()?;
            }
        }
        if interrupt {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    /// Takes what one queue offers; true if there is more.
    fn serve_queue(&mut self, index: usize) -> Result<bool, QueueFault> {
        let (Some(queue), Some(role)) = (self.queues.get_mut(index), self.roles.get(index)) else {
            return Ok(false);
        };
        let mut bytes = 0;
        for _ in 0..TURN_CHAINS {
            if *role == Role::Stats && !self.asked.wants(queue)? {
                return Ok(false);
            }
            let Some(chain) = queue.pop()? else {
                if queue.enable_kicks()? {
                    continue;
                }
                return Ok(false);
            };
            if *role == Role::Stats {
                let stats = stats::read(&self.memory, &chain);
                self.asked.answer(&self.balloon, stats, chain);
                continue;
            }
            bytes += take(*role, &mut self.balloon, &self.memory, &mut self.hinting, queue, &chain);
            self.balloon.actual_pages = self.balloon.actual_pages.min(self.total_pages);
            queue.push(chain.head(), 0)?;
            if bytes >= TURN_BYTES {
                break;
            }
        }
        Ok(true)
    }

    fn change(&mut self, update: BalloonUpdate) -> Result<Updated, UpdateError> {
        let missing =
            |what: &str| Err(UpdateError::Refused(format!("the guest's driver knows no {what}")));
        match update {
            BalloonUpdate::Target(pages) => self.balloon.set_target(pages),
            BalloonUpdate::Stats(_) if !self.roles.contains(&Role::Stats) => missing("statistics"),
            BalloonUpdate::Stats(waiter) => {
                self.asked.waiter = Some(waiter);
                // The queues are touched in a turn, which may have to wait until the machine resumes.
                self.wake();
                Ok(Updated::default())
            }
            BalloonUpdate::Hint(_) if !self.roles.contains(&Role::Hinting) => missing("hinting"),
            BalloonUpdate::Hint(waiter) => {
                self.hinting.begin(&mut self.balloon, waiter);
                Ok(Updated { config: Some(self.balloon.space()) })
            }
            BalloonUpdate::HintDone => {
                self.hinting.done(&mut self.balloon);
                Ok(Updated { config: Some(self.balloon.space()) })
            }
        }
    }
}

/// What each queue is for: those of features that were not agreed on are left out.
fn roles(features: u64) -> Vec<Role> {
    let optional = [
        (feature::STATS, Role::Stats),
        (feature::HINTING, Role::Hinting),
        (feature::REPORTING, Role::Reporting),
    ];
    let agreed = optional.iter().filter(|(bit, _)| features & bit != 0).map(|(_, role)| *role);
    [Role::Inflate, Role::Deflate].into_iter().chain(agreed).collect()
}

/// Does what one chain asks; returns how many bytes that was about.
fn take(
    role: Role,
    balloon: &mut Balloon,
    memory: &GuestMemory,
    hinting: &mut Hinting,
    queue: &VirtQueue,
    chain: &Chain,
) -> u64 {
    let (bytes, bad) = match role {
        Role::Inflate | Role::Deflate => {
            let (numbers, bad) = pages::numbers(memory, chain);
            let count = numbers.len() as u32;
            if role == Role::Inflate {
                pages::release_numbers(balloon, memory, &numbers);
                balloon.actual_pages = balloon.actual_pages.saturating_add(count);
            } else {
                // The pages come back by being used.
                balloon.actual_pages = balloon.actual_pages.saturating_sub(count);
            }
            (u64::from(count) * PAGE_SIZE, bad)
        }
        Role::Hinting => {
            let bytes = chain::total_len(chain.writable());
            (bytes, !hinting.take(balloon, memory, chain))
        }
        Role::Reporting => {
            let released = pages::release_buffers(balloon, memory, chain.writable());
            (chain::total_len(chain.writable()), released == 0)
        }
        Role::Stats => (0, false),
    };
    if bad {
        queue.counters().add_refused();
    }
    bytes
}

impl Asked {
    /// Gives the buffer back if somebody asks; false if the device has one and nobody does.
    fn wants(&mut self, queue: &mut VirtQueue) -> Result<bool, QueueFault> {
        if self.waiter.is_some()
            && !self.given
            && let Some(chain) = self.held.take()
        {
            queue.push(chain.head(), 0)?;
            self.given = true;
        }
        Ok(self.held.is_none())
    }

    /// Keeps a buffer, and tells what it says if it was asked for.
    fn answer(&mut self, balloon: &Balloon, stats: BalloonStats, chain: Chain) {
        self.held = Some(chain);
        if std::mem::take(&mut self.given)
            && let Some(waiter) = self.waiter.take()
        {
            let bytes = |pages: u32| u64::from(pages) * PAGE_SIZE;
            let target_bytes = bytes(balloon.config.target_pages);
            let actual_bytes = bytes(balloon.actual_pages);
            // Whoever asked may have gone.
            let _ = waiter.try_send(BalloonStats { target_bytes, actual_bytes, ..stats });
        }
    }
}

impl MutEventSubscriber for BalloonWorker {
    fn init(&mut self, ops: &mut EventOps) {
        for queue in &self.queues {
            if let Err(error) = ops.add(Events::new(queue.kick(), EventSet::IN)) {
                self.failed = true;
                self.interrupt.needs_reset();
                log::error!("balloon: cannot watch its queues: {error}");
                return;
            }
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        self.queues.iter().for_each(VirtQueue::clear_kick);
        self.serve();
    }
}

impl Worker for BalloonWorker {
    fn quiesce(&mut self) {
        self.quiet = true;
        let stats = self.roles.iter().position(|role| *role == Role::Stats);
        if let Some(queue) = stats.and_then(|index| self.queues.get_mut(index))
            && let Some(chain) = self.asked.held.take()
        {
            queue.undo_pop(chain);
        }
    }

    fn resume(&mut self) {
        self.quiet = false;
        self.wake();
    }

    fn save(&self) -> DeviceState {
        DeviceState::Balloon(self.balloon.state())
    }

    fn stop(self: Box<Self>) -> Stopped {
        // A driver that starts anew has given up nothing yet.
        let balloon = Balloon { actual_pages: 0, ..self.balloon };
        Stopped { device: Box::new(balloon), queues: self.queues }
    }

    fn queues(&self) -> &[VirtQueue] {
        &self.queues
    }

    fn wake(&mut self) {
        self.queues.iter().for_each(VirtQueue::kick_again);
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        match update {
            DeviceUpdate::Balloon(update) => self.change(update),
            _ => Err(UpdateError::NotOfThisDevice),
        }
    }
}
