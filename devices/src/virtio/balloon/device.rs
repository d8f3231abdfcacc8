//! A balloon that no driver uses: what it offers, what the host may change, how it becomes a
//! worker.

use std::sync::mpsc::SyncSender;

use super::super::registry::{DeviceKind, DeviceState, DeviceUpdate};
use super::super::{Rings, UpdateError, Updated, VirtioDevice, Worker};
use super::config::{self, BalloonConfig};
use super::hint::Hinting;
use super::state::{BalloonError, BalloonStateV1};
use super::stats::BalloonStats;
use super::worker::BalloonWorker;

const QUEUE_SIZE: u16 = 128;
const QUEUE_SIZES: [u16; 5] = [QUEUE_SIZE; 5];

/// Feature bits of virtio 1.2 section 5.5.3.
pub(super) mod feature {
    pub const STATS: u64 = 1 << 1;
    pub const DEFLATE_ON_OOM: u64 = 1 << 2;
    pub const HINTING: u64 = 1 << 3;
    pub const REPORTING: u64 = 1 << 5;
}

/// A change or request of the host while the machine runs.
#[derive(Debug)]
pub enum BalloonUpdate {
    /// Sets how many pages the guest is to give up.
    Target(u32),
    /// Asks the guest for statistics; they are sent when they arrive.
    Stats(SyncSender<BalloonStats>),
    /// Asks the guest for its free pages; the number of released bytes is sent when the guest has
    /// finished.
    Hint(SyncSender<u64>),
    /// Lets the guest use the hinted pages again, whether it has finished or not.
    HintDone,
}

/// A virtio balloon.
#[derive(Debug)]
pub struct Balloon {
    pub(super) config: BalloonConfig,
    pub(super) actual_pages: u32,
    /// The hinting command that the guest reads, and the last one that began a run.
    pub(super) hint_command: u32,
    pub(super) hint_last: u32,
    /// Counts errors of the host, for the log.
    pub(super) host_errors: u64,
}

impl Balloon {
    pub fn new(config: BalloonConfig) -> Self {
        Self { config, actual_pages: 0, hint_command: 0, hint_last: 0, host_errors: 0 }
    }

    /// Creates the balloon of a snapshot. It offers the saved features, because the guest has
    /// negotiated them.
    pub fn restore(state: &BalloonStateV1) -> Result<Self, BalloonError> {
        state.check()?;
        let config = BalloonConfig {
            limit_pages: state.limit_pages,
            target_pages: state.target_pages,
            deflate_on_oom: state.deflate_on_oom,
            free_page_reporting: state.free_page_reporting,
            free_page_hinting: state.free_page_hinting,
        };
        Ok(Self {
            actual_pages: state.actual_pages,
            hint_command: state.hint_command,
            hint_last: state.hint_last,
            ..Self::new(config)
        })
    }

    pub(super) fn state(&self) -> BalloonStateV1 {
        BalloonStateV1 {
            limit_pages: self.config.limit_pages,
            target_pages: self.config.target_pages,
            actual_pages: self.actual_pages,
            hint_command: self.hint_command,
            hint_last: self.hint_last,
            deflate_on_oom: self.config.deflate_on_oom,
            free_page_reporting: self.config.free_page_reporting,
            free_page_hinting: self.config.free_page_hinting,
        }
    }

    pub(super) fn space(&self) -> Vec<u8> {
        config::space(self.config.target_pages, self.actual_pages, self.hint_command)
    }

    pub(super) fn set_target(&mut self, pages: u32) -> Result<Updated, UpdateError> {
        let limit = self.config.limit_pages;
        if pages > limit {
            let why = format!("a target of {pages} pages is more than the {limit} that there are");
            return Err(UpdateError::Refused(why));
        }
        self.config.target_pages = pages;
        Ok(Updated { config: Some(self.space()) })
    }

    /// Counts an error of the host and returns whether to log it: the first, second, fourth and so
    /// on.
    pub(super) fn add_host_error(&mut self) -> bool {
        self.host_errors = self.host_errors.saturating_add(1);
        self.host_errors.is_power_of_two()
    }
}

impl VirtioDevice for Balloon {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Balloon
    }

    fn features(&self) -> u64 {
        let offer = |enabled: bool, bit: u64| if enabled { bit } else { 0 };
        feature::STATS
            | offer(self.config.deflate_on_oom, feature::DEFLATE_ON_OOM)
            | offer(self.config.free_page_hinting, feature::HINTING)
            | offer(self.config.free_page_reporting, feature::REPORTING)
    }

    fn queue_sizes(&self) -> &'static [u16] {
        let optional = [self.config.free_page_hinting, self.config.free_page_reporting];
        let count = 3 + optional.iter().filter(|enabled| **enabled).count();
        QUEUE_SIZES.get(..count).unwrap_or(&QUEUE_SIZES)
    }

    /// A driver that does not accept a feature does not set up its queue either, and numbers the
    /// other queues without a gap, as Linux does.
    fn optional_queues(&self) -> usize {
        self.queue_sizes().len() - 2
    }

    fn config(&self) -> Vec<u8> {
        self.space()
    }

    fn activate(self: Box<Self>, rings: &mut Rings, features: u64) -> Box<dyn Worker> {
        Box::new(BalloonWorker::new(*self, rings, features))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Balloon(self.state())
    }

    fn rewind(&mut self, state: &DeviceState) {
        // Target and command are set by the host and stay; the given-up pages are state of the
        // guest.
        if let DeviceState::Balloon(state) = state {
            self.actual_pages = state.actual_pages;
        }
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        match update {
            DeviceUpdate::Balloon(BalloonUpdate::Target(pages)) => self.set_target(pages),
            DeviceUpdate::Balloon(BalloonUpdate::HintDone) => {
                Hinting::default().done(self);
                Ok(Updated { config: Some(self.space()) })
            }
            DeviceUpdate::Balloon(_) => {
                Err(UpdateError::Refused("no driver in the guest uses the balloon".to_owned()))
            }
            _ => Err(UpdateError::NotOfThisDevice),
        }
    }
}
