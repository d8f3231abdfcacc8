//! The engine that completes an operation before it returns.
//!
//! It works everywhere, and is the fastest where the image is in the host's page cache.

use std::collections::VecDeque;
use std::io;

use super::{DiskIo, Engine, Finished, Op};

/// An engine whose operations complete at once.
pub struct Plain {
    disk: Box<dyn MeasuredDisk>,
    done: VecDeque<Finished>,
}

/// Storage that knows its size.
pub trait MeasuredDisk: DiskIo {
    fn measure(&self) -> io::Result<u64>;
}

impl Plain {
    pub fn new(disk: Box<dyn MeasuredDisk>) -> Self {
        Self { disk, done: VecDeque::new() }
    }
}

impl Engine for Plain {
    fn start(&mut self, token: u16, mut op: Op) {
        let result = match &mut op {
            Op::Read { into, offset } => {
                into.slices().and_then(|buffers| self.disk.read(&buffers, *offset))
            }
            Op::Write { from, offset } => {
                from.slices().and_then(|buffers| self.disk.write(&buffers, *offset))
            }
            Op::Sync => self.disk.sync().map(|()| 0),
            Op::Clear { how, offset, len } => self.disk.clear(*how, *offset, *len).map(|()| 0),
        };
        self.done.push_back(Finished { token, op, result });
    }

    fn has_room(&self) -> bool {
        true
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn finished(&mut self) -> Option<Finished> {
        self.done.pop_front()
    }

    fn wait(&mut self) -> io::Result<()> {
        if self.done.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) }
    }

    fn measure(&self) -> io::Result<u64> {
        self.disk.measure()
    }
}
