//! Runs the queues of a balloon, a bounded share of each in every turn.
//!
//! Only one chain is held between turns, the buffer for statistics: the device keeps it until the
//! host asks, and returning it to the driver is the request.

use std::sync::mpsc::SyncSender;

use super::super::chain::{self, Chain};
use super::super::registry::{DeviceState, DeviceUpdate};
use super::super::worker::{Budget, Event, Fault, Served};
use super::super::{QueueFault, Rings, UpdateError, Updated, VirtQueue, VirtioDevice, Worker};
use super::config::PAGE_SIZE;
use super::device::{Balloon, BalloonUpdate, feature};
use super::hint::Hinting;
use super::pages;
use super::stats::{self, BalloonStats};

const NAME: &str = "balloon";
const TURN: Budget = Budget { chains: 32, bytes: 256 << 20 };

/// The purpose of a queue.
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
    total_pages: u32,
    roles: Vec<Role>,
    hinting: Hinting,
    asked: Asked,
}

/// The state of a request for statistics.
#[derive(Default)]
struct Asked {
    held: Option<Chain>,
    waiter: Option<SyncSender<BalloonStats>>,
    /// The buffer was returned to the guest, which will fill it.
    given: bool,
}

impl BalloonWorker {
    pub(super) fn new(balloon: Balloon, rings: &mut Rings, features: u64) -> Self {
        use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};
        let roles = roles(features);
        if rings.queues.len() < roles.len() {
            rings.fail(NAME, &"the driver agreed to more than it has set queues up for");
        }
        // A queue that the driver set up without its feature is ignored.
        rings.queues.truncate(roles.len());
        let bytes: u64 = rings.memory.iter().map(|region| region.len()).sum();
        let total_pages = u32::try_from(bytes / PAGE_SIZE).unwrap_or(u32::MAX);
        let (hinting, asked) = Default::default();
        Self { balloon, total_pages, roles, hinting, asked }
    }

    fn change(&mut self, update: BalloonUpdate) -> Result<Updated, UpdateError> {
        let missing =
            |what: &str| Err(UpdateError::Refused(format!("the guest's driver knows no {what}")));
        match update {
            BalloonUpdate::Target(pages) => self.balloon.set_target(pages),
            BalloonUpdate::Stats(_) if !self.roles.contains(&Role::Stats) => missing("statistics"),
            BalloonUpdate::Stats(waiter) => {
                // The queues are only used in a turn, which may have to wait until the machine
                // resumes.
                self.asked.waiter = Some(waiter);
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

/// Returns the purpose of each queue; queues of features that were not negotiated are left out.
fn roles(features: u64) -> Vec<Role> {
    let optional = [
        (feature::STATS, Role::Stats),
        (feature::HINTING, Role::Hinting),
        (feature::REPORTING, Role::Reporting),
    ];
    let agreed = optional.iter().filter(|(bit, _)| features & bit != 0).map(|(_, role)| *role);
    [Role::Inflate, Role::Deflate].into_iter().chain(agreed).collect()
}

/// Handles one chain. Returns how many bytes of guest memory it names.
fn take(
    role: Role,
    balloon: &mut Balloon,
    hinting: &mut Hinting,
    queue: &VirtQueue,
    chain: &Chain,
) -> u64 {
    let memory = queue.memory();
    let (bytes, bad) = match role {
        Role::Inflate | Role::Deflate => {
            let (numbers, bad) = pages::numbers(memory, chain);
            let count = numbers.len() as u32;
            if role == Role::Inflate {
                pages::release_numbers(balloon, memory, &numbers);
                balloon.actual_pages = balloon.actual_pages.saturating_add(count);
            } else {
                // The pages come back when the guest uses them.
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
    /// Returns the held buffer to the driver if there is a request. Returns false if the device
    /// holds a buffer and there is no request.
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

    /// Keeps a buffer, and sends its statistics if they were requested.
    fn answer(&mut self, balloon: &Balloon, stats: BalloonStats, chain: Chain) {
        self.held = Some(chain);
        if std::mem::take(&mut self.given)
            && let Some(waiter) = self.waiter.take()
        {
            let bytes = |pages: u32| u64::from(pages) * PAGE_SIZE;
            let target_bytes = bytes(balloon.config.target_pages);
            let actual_bytes = bytes(balloon.actual_pages);
            // The caller may have stopped waiting.
            let _ = waiter.try_send(BalloonStats { target_bytes, actual_bytes, ..stats });
        }
    }
}

impl Worker for BalloonWorker {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn turn(&mut self, rings: &mut Rings, event: Event) -> Result<(), Fault> {
        match event {
            Event::Kick(index) => rings.serve_queue(index, TURN, self).map(drop),
            _ => Ok(()),
        }
    }

    fn is_ready(&mut self, index: usize, queue: &mut VirtQueue) -> Result<bool, Fault> {
        if self.roles.get(index) == Some(&Role::Stats) {
            return Ok(self.asked.wants(queue)?);
        }
        Ok(true)
    }

    fn serve_chain(
        &mut self,
        index: usize,
        queue: &mut VirtQueue,
        chain: Chain,
    ) -> Result<Served, Fault> {
        let role = *self.roles.get(index).ok_or(QueueFault::NotReady)?;
        if role == Role::Stats {
            let stats = stats::read(queue.memory(), &chain);
            self.asked.answer(&self.balloon, stats, chain);
            return Ok(Served::Done { bytes: 0 });
        }
        let Self { balloon, hinting, .. } = self;
        let bytes = take(role, balloon, hinting, queue, &chain);
        balloon.actual_pages = balloon.actual_pages.min(self.total_pages);
        queue.push(chain.head(), 0)?;
        Ok(Served::Done { bytes })
    }

    fn abandon(&mut self) {
        self.asked = Asked::default();
    }

    fn quiesce(&mut self, rings: &mut Rings) {
        let stats = self.roles.iter().position(|role| *role == Role::Stats);
        if let Some(queue) = stats.and_then(|index| rings.queues.get_mut(index))
            && let Some(chain) = self.asked.held.take()
        {
            queue.undo_pop(chain);
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::Balloon(self.balloon.state())
    }

    fn stop(self: Box<Self>) -> Box<dyn VirtioDevice> {
        // A new driver starts with an empty balloon.
        Box::new(Balloon { actual_pages: 0, ..self.balloon })
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        match update {
            DeviceUpdate::Balloon(update) => self.change(update),
            _ => Err(UpdateError::NotOfThisDevice),
        }
    }
}
