//! A disk of copy-on-write layers: writes go to the top layer, reads use the highest layer that has
//! the block.
//!
//! With layers, a disk is frozen without a copy: the top becomes a layer that never changes again,
//! and an empty one takes its place. Forks share the frozen layers; a rollback empties the top. The
//! owner changes layers only while the device is quiesced; the lock makes that sound, and is never
//! contended.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::VolatileSlice;

use super::plain::MeasuredDisk;
use super::{Clear, DiskIo};
use crate::{open, sparse, sys};

/// The unit in which layers hold data: the usual block size of guest file systems.
pub(super) const BLOCK: u64 = 4096;
/// The number of blocks that one piece of a `BlockMap` covers.
const PIECE: u64 = 4096;
/// The number of frozen layers above which the upper ones are merged.
const MAX_FROZEN: usize = 16;

/// A layer's file, and the ranges that it has, or None if it has all.
pub type LayerParts = (File, Option<Vec<(u64, u64)>>);

/// A disk that can be frozen, forked and rolled back. Clones refer to one disk.
#[derive(Clone, Debug)]
pub struct LayeredDisk {
    layers: Arc<Mutex<Layers>>,
    size: u64,
}

#[derive(Debug)]
struct Layers {
    frozen: Vec<Arc<Layer>>,
    top: Layer,
}

#[derive(Debug)]
struct Layer {
    file: File,
    present: Present,
}

#[derive(Debug)]
enum Present {
    /// A plain image: it has every block.
    All,
    Some(BlockMap),
}

/// The set of blocks that a layer has. It uses memory only for what was written.
#[derive(Debug, Default)]
pub(super) struct BlockMap(HashMap<u64, Box<[u64; PIECE as usize / 64]>>);

impl LayeredDisk {
    /// Creates a disk on a plain image that no other disk uses.
    pub fn new(file: File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        let top = Layer { file, present: Present::All };
        Ok(Self::of(Vec::new(), top, size))
    }

    /// Creates a disk on an image that must not change, with `top` as the writable layer.
    pub fn over(base: File, top: File) -> io::Result<Self> {
        let size = base.metadata()?.len();
        let frozen = vec![Arc::new(Layer { file: base, present: Present::All })];
        Ok(Self::of(frozen, Layer::empty(top, size)?, size))
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// Freezes everything written so far. `new_file` creates the files that later writes go to.
    pub fn freeze(&self, new_file: impl Fn() -> io::Result<File>) -> io::Result<()> {
        let mut layers = self.lock();
        let empty = Layer::empty(new_file()?, self.size)?;
        let full = std::mem::replace(&mut layers.top, empty);
        layers.frozen.push(Arc::new(full));
        if layers.frozen.len() > MAX_FROZEN {
            let merged = merge(layers.frozen.get(1..).unwrap_or_default(), new_file()?, self.size)?;
            layers.frozen.truncate(1);
            layers.frozen.push(Arc::new(merged));
        }
        Ok(())
    }

    /// Creates a disk with the content that this one had when it was last frozen, writing to `top`.
    pub fn fork(&self, top: File) -> io::Result<Self> {
        Ok(Self::of(self.lock().frozen.clone(), Layer::empty(top, self.size)?, self.size))
    }

    /// Returns the frozen layers, lowest first: each a file and the ranges that it has, or None if
    /// it has all. The files are read-only, because other disks share them.
    pub fn frozen_layers(&self) -> io::Result<Vec<LayerParts>> {
        let frozen = self.lock().frozen.clone();
        let part = |layer: &Arc<Layer>| {
            let ranges = match &layer.present {
                Present::All => None,
                Present::Some(map) => {
                    Some(map.ranges(self.size).into_iter().map(|r| (r.start, r.end)).collect())
                }
            };
            Ok((open::read_only(&layer.file)?, ranges))
        };
        frozen.iter().map(part).collect()
    }

    /// Creates a disk over layers as `frozen_layers` returns them, writing to `top`. Fails if the
    /// lowest layer is not a whole image or a layer is shorter than its ranges.
    pub fn from_frozen(layers: Vec<LayerParts>, top: File) -> io::Result<Self> {
        let lowest = layers.first().filter(|(_, ranges)| ranges.is_none());
        let lowest =
            lowest.ok_or_else(|| io::Error::other("the lowest layer is no whole image"))?;
        let size = lowest.0.metadata()?.len();
        let mut frozen = Vec::with_capacity(layers.len());
        for (file, ranges) in layers {
            let end = ranges.iter().flatten().map(|(_, end)| *end).max().unwrap_or(size);
            if file.metadata()?.len() < end {
                return Err(io::Error::other("a layer is shorter than its ranges"));
            }
            let mut layer = Layer { file, present: Present::All };
            if let Some(ranges) = ranges {
                layer.present = Present::Some(BlockMap::default());
                for (start, end) in ranges {
                    if start >= end || end > size {
                        return Err(io::Error::other("a layer has an impossible range"));
                    }
                    layer.add(start..end);
                }
            }
            frozen.push(Arc::new(layer));
        }
        Ok(Self::of(frozen, Layer::empty(top, size)?, size))
    }

    /// Returns whether `then` is a fork of this disk, so that `rewind` can use it.
    pub fn can_rewind(&self, then: &Self) -> bool {
        let lowest = |disk: &Self| disk.lock().frozen.first().cloned();
        let same = |here: Arc<Layer>| lowest(then).is_some_and(|then| Arc::ptr_eq(&here, &then));
        then.size == self.size && lowest(self).is_some_and(same)
    }

    /// Rolls the disk back to the state at which `then`, a fork of it, began. Everything written or
    /// frozen since is discarded.
    pub fn rewind(&self, then: &Self) -> io::Result<()> {
        let frozen = then.lock().frozen.clone();
        let mut layers = self.lock();
        if frozen.is_empty() || then.size != self.size {
            return Err(io::Error::other("that is no earlier state of this disk"));
        }
        layers.frozen = frozen;
        layers.top.file.set_len(0)?;
        layers.top.file.set_len(self.size)?;
        layers.top.present = Present::Some(BlockMap::default());
        Ok(())
    }

    /// Copies the content that the disk had when it was last frozen into an empty file.
    pub fn write_frozen(&self, to: &File) -> io::Result<()> {
        let frozen = self.lock().frozen.clone();
        to.set_len(self.size)?;
        write_layers(&frozen, to, self.size)
    }

    fn of(frozen: Vec<Arc<Layer>>, top: Layer, size: u64) -> Self {
        Self { layers: Arc::new(Mutex::new(Layers { frozen, top })), size }
    }

    fn lock(&self) -> MutexGuard<'_, Layers> {
        // A panic while locked would leave every layer intact.
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Layers {
    /// Returns the layer that holds the block at `offset`, and how far that layer applies, up to
    /// `end`.
    fn find(&self, offset: u64, end: u64) -> (&Layer, u64) {
        let mut limit = end;
        for layer in std::iter::once(&self.top).chain(self.frozen.iter().rev().map(|l| &**l)) {
            match &layer.present {
                Present::All => return (layer, limit),
                Present::Some(map) => {
                    let (has, same_until) = map.run(offset, limit);
                    if has {
                        return (layer, same_until);
                    }
                    // Up to this point the layer has no block; beyond it, it may have one.
                    limit = same_until;
                }
            }
        }
        // Not reached: the lowest layer is a plain image and has every block.
        (&self.top, limit)
    }

    /// Copies a block that is about to be partly written into the top layer.
    fn fill(&mut self, block: u64, size: u64) -> io::Result<()> {
        let end = (block + BLOCK).min(size);
        let mut bytes = vec![0; (end - block) as usize];
        self.find(block, end).0.file.read_exact_at(&mut bytes, block)?;
        self.top.file.write_all_at(&bytes, block)?;
        self.top.add(block..end);
        Ok(())
    }
}

impl Layer {
    fn empty(file: File, size: u64) -> io::Result<Self> {
        file.set_len(size)?;
        Ok(Self { file, present: Present::Some(BlockMap::default()) })
    }

    fn has(&self, offset: u64) -> bool {
        match &self.present {
            Present::All => true,
            Present::Some(map) => map.has(offset / BLOCK),
        }
    }

    fn add(&mut self, range: Range<u64>) {
        if let Present::Some(map) = &mut self.present {
            map.add(range.start / BLOCK..range.end.div_ceil(BLOCK));
        }
    }

    /// Returns the ranges that this layer has, in order.
    fn ranges(&self, size: u64) -> io::Result<Vec<Range<u64>>> {
        match &self.present {
            Present::All => sparse::data(&self.file, 0..size),
            Present::Some(map) => Ok(map.ranges(size)),
        }
    }
}

impl BlockMap {
    fn has(&self, block: u64) -> bool {
        let word = |piece: &[u64; 64]| piece[(block % PIECE / 64) as usize];
        self.0.get(&(block / PIECE)).is_some_and(|piece| word(piece) >> (block % 64) & 1 != 0)
    }

    /// Adds blocks, one word of the map at a time: one request of a guest may discard millions.
    pub(super) fn add(&mut self, blocks: Range<u64>) {
        let mut next = blocks.start;
        while next < blocks.end {
            let end = blocks.end.min((next / 64 + 1) * 64);
            let ones = u64::MAX >> (64 - (end - next)) << (next % 64);
            let piece = self.0.entry(next / PIECE).or_insert_with(|| Box::new([0; 64]));
            piece[(next % PIECE / 64) as usize] |= ones;
            next = end;
        }
    }

    /// Returns whether the block at `offset` is in the map, and up to where, at most `end`, that
    /// holds.
    fn run(&self, offset: u64, end: u64) -> (bool, u64) {
        let first = offset / BLOCK;
        let has = self.has(first);
        let mut next = first + 1;
        while next * BLOCK < end && self.has(next) == has {
            next += 1;
        }
        (has, (next * BLOCK).min(end))
    }

    pub(super) fn ranges(&self, size: u64) -> Vec<Range<u64>> {
        let mut pieces: Vec<_> = self.0.keys().copied().collect();
        pieces.sort_unstable();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let words = pieces.into_iter().flat_map(|piece| {
            let words = self.0.get(&piece).into_iter().flat_map(|words| words.iter().copied());
            (piece * PIECE / 64..).zip(words)
        });
        for (index, word) in words {
            for bits in runs_of_ones(word) {
                let block = |bit: u64| (index * 64 + bit) * BLOCK;
                let (start, end) = (block(bits.start), block(bits.end).min(size));
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => ranges.push(start..end),
                }
            }
        }
        ranges
    }
}

/// Returns the runs of bits that are set, lowest first.
fn runs_of_ones(mut word: u64) -> impl Iterator<Item = Range<u64>> {
    std::iter::from_fn(move || {
        if word == 0 {
            return None;
        }
        let start = word.trailing_zeros();
        let len = (word >> start).trailing_ones();
        word &= !(u64::MAX >> (64 - len) << start);
        Some(u64::from(start)..u64::from(start + len))
    })
}

/// Merges `layers`, lowest first, into one layer.
fn merge(layers: &[Arc<Layer>], file: File, size: u64) -> io::Result<Layer> {
    let mut merged = Layer::empty(file, size)?;
    write_layers(layers, &merged.file, size)?;
    for layer in layers {
        layer.ranges(size)?.into_iter().for_each(|range| merged.add(range));
    }
    Ok(merged)
}

fn write_layers(layers: &[Arc<Layer>], to: &File, size: u64) -> io::Result<()> {
    for (index, layer) in layers.iter().enumerate() {
        if index == 0
            && matches!(layer.present, Present::All)
            && sparse::clone(&layer.file, to).is_ok()
        {
            continue;
        }
        for range in layer.ranges(size)? {
            // Zeros are not copied, and they must hide the data of a lower layer.
            if index > 0 {
                sparse::punch(to, range.clone())?;
            }
            sparse::copy(&layer.file, to, range)?;
        }
    }
    Ok(())
}

impl DiskIo for LayeredDisk {
    fn read(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize> {
        let layers = self.lock();
        let end = offset.saturating_add(total(buffers)).min(self.size);
        if offset >= end {
            return Ok(0);
        }
        let (layer, until) = layers.find(offset, end);
        sys::preadv(layer.file.as_fd(), &prefix(buffers, until - offset)?, offset)
    }

    fn write(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize> {
        let mut layers = self.lock();
        let end = offset.saturating_add(total(buffers)).min(self.size);
        if offset >= end {
            return Ok(0);
        }
        let block = offset / BLOCK * BLOCK;
        // Write as many whole blocks as there are, or a part of one block, which must be filled
        // first.
        let whole = end / BLOCK * BLOCK;
        let until = if offset == block && whole > offset {
            whole
        } else if offset == block && end == self.size {
            end
        } else {
            if !layers.top.has(block) {
                layers.fill(block, self.size)?;
            }
            end.min(block + BLOCK)
        };
        let part = prefix(buffers, until - offset)?;
        let done = sys::pwritev(layers.top.file.as_fd(), &part, offset)?;
        // A short write may end within a block, and then that block is not yet in the top layer.
        let reached = offset + done as u64;
        let there = if reached == until { reached } else { reached / BLOCK * BLOCK };
        if there > block {
            layers.top.add(block..there);
        }
        if reached > there && there >= block && !layers.top.has(there) {
            return if there > offset {
                Ok((there - offset) as usize)
            } else {
                Err(io::ErrorKind::WriteZero.into())
            };
        }
        Ok(done)
    }

    fn sync(&self) -> io::Result<()> {
        self.lock().top.file.sync_data()
    }

    fn clear(&self, how: Clear, offset: u64, len: u64) -> io::Result<()> {
        let mut layers = self.lock();
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return Ok(());
        }
        for edge in [offset, end] {
            let block = edge / BLOCK * BLOCK;
            if edge % BLOCK != 0 && edge < self.size && !layers.top.has(block) {
                layers.fill(block, self.size)?;
            }
        }
        sys::fallocate(layers.top.file.as_fd(), how, offset, end - offset)?;
        // A hole in the top layer hides the layers below, and reads as zeros.
        layers.top.add(offset / BLOCK * BLOCK..end);
        Ok(())
    }
}

impl MeasuredDisk for LayeredDisk {
    fn measure(&self) -> io::Result<u64> {
        Ok(self.size)
    }
}

fn total(buffers: &[VolatileSlice]) -> u64 {
    buffers.iter().map(|buffer| buffer.len() as u64).sum()
}

/// Returns the first `len` bytes of the buffers.
fn prefix<'a>(buffers: &[VolatileSlice<'a>], len: u64) -> io::Result<Vec<VolatileSlice<'a>>> {
    let mut left = len as usize;
    let mut parts = Vec::with_capacity(buffers.len());
    for buffer in buffers {
        if left == 0 {
            break;
        }
        let here = left.min(buffer.len());
        parts.push(buffer.subslice(0, here).map_err(io::Error::other)?);
        left -= here;
    }
    Ok(parts)
}

#[cfg(test)]
mod tests;
