//! A disk that no driver uses: what it offers, and how it becomes a worker.
//!
//! The image is opened and locked here, before the machine starts, and stays open across resets.

use super::super::registry::{DeviceKind, DeviceState};
use super::super::{Activation, VirtioDevice, Worker};
use super::config::{self, BlockConfig, BlockError, CacheMode, Source};
use super::io::{DiskIo, FileDisk};
use super::state::BlockStateV1;
use super::wire::SECTOR_SIZE;
use super::worker::BlockWorker;

pub const QUEUE_SIZE: u16 = 256;

const SEG_MAX: u64 = 1 << 2;
const RO: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
const FLUSH: u64 = 1 << 9;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

/// What stays the same for a disk's whole life.
pub(super) struct Facts {
    pub capacity_sectors: u64,
    pub read_only: bool,
    pub cache: CacheMode,
    pub id: String,
}

/// A virtio disk.
pub struct Block {
    pub(super) facts: Facts,
    pub(super) disk: Box<dyn DiskIo>,
    pub(super) flush_failed: bool,
    pub(super) host_errors: u64,
}

impl Block {
    /// Opens the image and locks it.
    pub fn new(config: BlockConfig) -> Result<Self, BlockError> {
        config.validate()?;
        let name = config.name();
        let BlockConfig { source, read_only, cache, id } = config;
        let (disk, capacity_sectors): (Box<dyn DiskIo>, u64) = match source {
            Source::Layers(layers) => {
                let sectors = layers.size() / SECTOR_SIZE;
                (Box::new(layers), sectors)
            }
            source => {
                let disk = FileDisk::open(source, read_only)
                    .map_err(|source| BlockError::Open { name, source })?;
                let sectors = disk.capacity_sectors();
                (Box::new(disk), sectors)
            }
        };
        let facts = Facts { capacity_sectors, read_only, cache, id };
        Ok(Self { facts, disk, flush_failed: false, host_errors: 0 })
    }

    /// Opens the image of a saved disk, and refuses one that the guest would not recognise.
    pub fn restore(config: BlockConfig, state: &BlockStateV1) -> Result<Self, BlockError> {
        let mut block = Self::new(BlockConfig { id: state.id.clone(), ..config })?;
        state.check(block.facts.capacity_sectors, block.facts.read_only)?;
        block.flush_failed = state.flush_failed;
        Ok(block)
    }

    /// A disk on storage that a test supplies.
    #[cfg(test)]
    pub(super) fn on(disk: Box<dyn DiskIo>, capacity_sectors: u64) -> Self {
        let (read_only, cache, id) = (false, CacheMode::Writeback, "test".into());
        let facts = Facts { capacity_sectors, read_only, cache, id };
        Self { facts, disk, flush_failed: false, host_errors: 0 }
    }

    pub(super) fn state(&self) -> BlockStateV1 {
        BlockStateV1 {
            capacity_sectors: self.facts.capacity_sectors,
            read_only: self.facts.read_only,
            id: self.facts.id.clone(),
            flush_failed: self.flush_failed,
        }
    }
}

impl VirtioDevice for Block {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn features(&self) -> u64 {
        let flush = if self.facts.cache == CacheMode::Writeback { FLUSH } else { 0 };
        let write = if self.facts.read_only { RO } else { flush | DISCARD | WRITE_ZEROES };
        SEG_MAX | BLK_SIZE | write
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE]
    }

    fn config(&self) -> Vec<u8> {
        config::space(self.facts.capacity_sectors)
    }

    fn activate(self: Box<Self>, activation: Activation) -> Box<dyn Worker> {
        Box::new(BlockWorker::new(*self, activation))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block(self.state())
    }
}
