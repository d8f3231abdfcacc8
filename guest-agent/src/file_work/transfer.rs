//! Moves bytes between a pipe and a file: within the kernel, or through a buffer where that is not
//! possible.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};

use super::CHUNK;
use crate::sys;

#[derive(Default)]
pub struct Transfer {
    /// Empty while the kernel moves the bytes.
    buffer: Vec<u8>,
}

impl Transfer {
    /// Moves at most `most` bytes and returns how many; 0 at the end.
    pub fn pass(&mut self, from: &mut File, to: &mut File, most: u64) -> io::Result<u64> {
        let most = most.min(CHUNK as u64) as usize;
        if self.buffer.is_empty() {
            match sys::splice(from, to, most) {
                // Devices and some filesystems cannot splice: nothing was moved.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => self.buffer = vec![0; CHUNK],
                moved => return moved.map(|count| count as u64),
            }
        }
        loop {
            match from.read(&mut self.buffer[..most]) {
                Ok(count) => {
                    to.write_all(&self.buffer[..count])?;
                    return Ok(count as u64);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}
