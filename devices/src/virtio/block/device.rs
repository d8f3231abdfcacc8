//! A disk that no driver uses: the features it offers, and how it becomes a worker.
//!
//! The image is opened and locked here, before the machine starts, and stays open across resets. An
//! image that replaces it later is opened by the caller of the update, so that the device thread
//! opens nothing.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::registry::{BackendHandle, DeviceKind, DeviceState, DeviceUpdate};
use super::super::{Rings, UpdateError, Updated, VirtioDevice, Worker};
use super::config::{self, BlockConfig, BlockError, CacheMode, Source};
use super::io::{
    Absent, Access, Changes, Engine, EngineKind, FileDisk, Finished, OpenError, Plain, engine,
};
use super::state::BlockStateV1;
use super::wire::SECTOR_SIZE;
use super::worker::BlockWorker;
use crate::rate_limiter::{RateLimiter, RateLimiterConfig};

pub const QUEUE_SIZE: u16 = 256;

/// The largest alignment that direct I/O may require.
const PAGE_SIZE: u32 = 4096;

const SEG_MAX: u64 = 1 << 2;
const RO: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
const FLUSH: u64 = 1 << 9;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

/// The properties of a disk that requests are checked against.
pub(super) struct Facts {
    pub capacity_sectors: u64,
    /// Positions and lengths must be multiples of this: a sector, or the alignment of direct I/O.
    pub block_size: u32,
    /// Whether buffers must be aligned to `block_size` too.
    pub direct: bool,
    pub read_only: bool,
    pub cache: CacheMode,
    pub id: String,
}

impl Facts {
    fn set_size(&mut self, size: u64) {
        let blocks = size / u64::from(self.block_size);
        self.capacity_sectors = blocks * (u64::from(self.block_size) / SECTOR_SIZE);
    }
}

/// A virtio disk.
pub struct Block {
    pub(super) facts: Facts,
    pub(super) engine: Box<dyn Engine>,
    // Written by the engine when an operation completes in the background, if the engine does that.
    pub(super) ended: Option<Arc<EventFd>>,
    pub(super) limiter: RateLimiter,
    pub(super) flush_failed: bool,
    pub(super) host_errors: u64,
    /// Records every write while the image is being copied.
    pub(super) changes: Option<Changes>,
    mode: Mode,
}

/// How the images of a disk are opened: the first one and its replacements.
#[derive(Clone, Copy, Debug)]
struct Mode {
    access: Access,
    engine: EngineKind,
}

/// A replacement image for a disk, open and locked.
pub struct Backend {
    engine: Box<dyn Engine>,
    block_size: u32,
    size: u64,
}

impl std::fmt::Debug for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backend").field("size", &self.size).finish_non_exhaustive()
    }
}

/// A change of a disk that the host may make while the machine lives.
#[derive(Debug)]
pub enum BlockUpdate {
    /// The size of the image has changed: measure it again.
    Resize,
    /// Use this image instead.
    Replace(Backend),
    /// Use these limits instead.
    Limits(RateLimiterConfig),
    /// Start to record what is written, or stop with None.
    Note(Option<Changes>),
}

/// A handle to a disk with which the owner of a machine opens other images for it.
#[derive(Clone, Debug)]
pub struct BlockHandle {
    ended: Option<Arc<EventFd>>,
    mode: Mode,
    id: String,
}

impl BlockHandle {
    /// Opens and locks another image in the way the disk's first one was opened.
    pub fn open(&self, source: Source) -> Result<BlockUpdate, BlockError> {
        let name = source.name(&self.id);
        Ok(BlockUpdate::Replace(open(source, name, self.mode, self.ended.as_ref())?))
    }
}

fn open(
    source: Source,
    name: String,
    mode: Mode,
    ended: Option<&Arc<EventFd>>,
) -> Result<Backend, BlockError> {
    let opened = || {
        let source = match source {
            Source::Layers(_) if mode.access.direct || mode.engine == EngineKind::IoUring => {
                return Err(OpenError::Layers);
            }
            Source::Layers(layers) => {
                let (block_size, size) = (SECTOR_SIZE as u32, Ok(layers.size()));
                let engine: Box<dyn Engine> = Box::new(Plain::new(Box::new(layers)));
                return Ok((engine, block_size, size));
            }
            Source::Later { size } => {
                let block_size = if mode.access.direct { PAGE_SIZE } else { SECTOR_SIZE as u32 };
                let engine: Box<dyn Engine> = Box::new(Plain::new(Box::new(Absent { size })));
                return Ok((engine, block_size, Ok(size)));
            }
            source => source,
        };
        let disk = FileDisk::open(source, mode.access)?;
        let (block_size, size) = (disk.block_size(), disk.size());
        Ok((engine(mode.engine, disk, ended)?, block_size, size))
    };
    let (engine, block_size, size) = match opened() {
        Ok(opened) => opened,
        Err(source) => return Err(BlockError::Open { name, source }),
    };
    let size = size.map_err(|source| BlockError::Descriptors { name, source })?;
    Ok(Backend { engine, block_size, size })
}

impl Block {
    /// Opens the image and locks it.
    pub fn new(config: BlockConfig) -> Result<Self, BlockError> {
        config.validate()?;
        let name = config.name();
        let BlockConfig { source, read_only, cache, id, engine, direct, limits } = config;
        let failed = |source| BlockError::Descriptors { name: name.clone(), source };
        let ended = match engine {
            EngineKind::Plain => None,
            _ => Some(Arc::new(EventFd::new(EFD_NONBLOCK).map_err(failed)?)),
        };
        let limiter = RateLimiter::new(&limits);
        let mode = Mode { access: Access { read_only, direct }, engine };
        let Backend { engine, block_size, size } = open(source, name, mode, ended.as_ref())?;
        let capacity_sectors = 0;
        let mut facts = Facts { capacity_sectors, block_size, direct, read_only, cache, id };
        facts.set_size(size);
        let (flush_failed, host_errors, changes) = (false, 0, None);
        Ok(Self { facts, engine, ended, limiter, flush_failed, host_errors, changes, mode })
    }

    /// Opens the image of a saved disk, and refuses one that differs from what the guest saw.
    pub fn restore(config: BlockConfig, state: &BlockStateV1) -> Result<Self, BlockError> {
        let mut block = Self::new(BlockConfig { id: state.id.clone(), ..config })?;
        state.check(block.facts.capacity_sectors, block.facts.read_only)?;
        block.flush_failed = state.flush_failed;
        Ok(block)
    }

    /// Returns the handle that the owner of the machine keeps.
    pub fn handle(&self) -> BlockHandle {
        BlockHandle { ended: self.ended.clone(), mode: self.mode, id: self.facts.id.clone() }
    }

    /// Creates a disk on storage that a test supplies.
    #[cfg(test)]
    pub(super) fn on(disk: Box<dyn super::io::MeasuredDisk>, capacity_sectors: u64) -> Self {
        let (block_size, direct, read_only) = (SECTOR_SIZE as u32, false, false);
        let (cache, id) = (CacheMode::Writeback, "test".into());
        let facts = Facts { capacity_sectors, block_size, direct, read_only, cache, id };
        Self {
            facts,
            engine: Box::new(Plain::new(disk)),
            ended: Some(Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())),
            limiter: RateLimiter::new(&RateLimiterConfig::default()),
            flush_failed: false,
            host_errors: 0,
            changes: None,
            mode: Mode { access: Access::default(), engine: EngineKind::Plain },
        }
    }

    pub(super) fn state(&self) -> BlockStateV1 {
        BlockStateV1 {
            capacity_sectors: self.facts.capacity_sectors,
            read_only: self.facts.read_only,
            id: self.facts.id.clone(),
            flush_failed: self.flush_failed,
        }
    }

    /// Returns an operation that has completed, if any.
    pub(super) fn finished(&mut self) -> Option<Finished> {
        let finished = self.engine.finished()?;
        if let (Some(changes), Some(bytes)) = (&self.changes, finished.op.changed()) {
            changes.note(bytes);
        }
        Some(finished)
    }

    /// Counts an error of the host, and logs the first, second, fourth and so on.
    pub(super) fn host_error(&mut self, error: &io::Error) {
        self.host_errors += 1;
        if self.host_errors.is_power_of_two() {
            let (id, count) = (&self.facts.id, self.host_errors);
            log::warn!("block {id:?}: host error {count}: {error}");
        }
    }

    /// Carries out a change. No operation may be in flight in the engine.
    pub(super) fn change(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        let DeviceUpdate::Block(update) = update else { return Err(UpdateError::NotOfThisDevice) };
        match update {
            BlockUpdate::Limits(limits) => {
                self.limiter.configure(&limits);
                return Ok(Updated::default());
            }
            BlockUpdate::Note(changes) => {
                self.changes = changes;
                return Ok(Updated::default());
            }
            BlockUpdate::Resize => {
                let measured = self.engine.measure();
                let act = "measure the image";
                let size = measured.map_err(|source| UpdateError::Host { act, source })?;
                self.facts.set_size(size);
            }
            BlockUpdate::Replace(Backend { engine, block_size, size }) => {
                if block_size > self.facts.block_size {
                    let (new, old) = (block_size, self.facts.block_size);
                    let why = format!("image wants blocks of {new} bytes, the guest has {old}");
                    return Err(UpdateError::Refused(why));
                }
                self.engine = engine;
                // The recorded writes were of the previous image.
                self.changes = None;
                self.flush_failed = false;
                self.facts.set_size(size);
            }
        }
        Ok(Updated { config: Some(self.space()) })
    }

    fn space(&self) -> Vec<u8> {
        config::space(self.facts.capacity_sectors, self.facts.block_size)
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
        self.space()
    }

    fn backend(&self) -> BackendHandle {
        BackendHandle::Disk(self.handle())
    }

    fn activate(self: Box<Self>, _rings: &mut Rings, _features: u64) -> Box<dyn Worker> {
        Box::new(BlockWorker::new(*self))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block(self.state())
    }

    fn rewind(&mut self, state: &DeviceState) {
        if let DeviceState::Block(state) = state {
            self.flush_failed = state.flush_failed;
        }
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        self.change(update)
    }
}
