//! Reads a file into the pipe to the client, with its holes marked if asked for.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use pvmm_guest_agent::message::{Metadata, ReadFile};
use pvmm_guest_agent::sparse::{SEGMENT_HEAD, Segment};

use super::transfer::Transfer;
use super::{AtPath, CHUNK, Result, errno, metadata, path};
use crate::sys;

pub fn read(request: &ReadFile, mut pipe: File, started: impl FnOnce(Metadata)) -> Result<u64> {
    let path = path(&request.path);
    // Not blocking: opening a FIFO must not wait for a writer.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).at(path, "open")?;
    let facts = file.metadata().at(path, "stat")?;
    if facts.is_dir() {
        return Err(errno(libc::EISDIR)).at(path, "read");
    }
    if facts.file_type().is_fifo() || facts.file_type().is_socket() {
        return Err(errno(libc::EINVAL)).at(path, "read");
    }
    if request.offset > 0 {
        file.seek(SeekFrom::Start(request.offset)).at(path, "seek")?;
    }
    started(metadata(path, &facts));
    if request.sparse {
        return read_sparse(request, file, pipe, path);
    }
    let most = request.len.unwrap_or(u64::MAX);
    let mut transfer = Transfer::default();
    let mut total = 0;
    while total < most {
        match transfer.pass(&mut file, &mut pipe, most - total).at(path, "read")? {
            0 => break,
            count => total += count,
        }
    }
    Ok(total)
}

/// Sends data and holes as segments. Each chunk is a segment of its own, so that a file whose
/// length changes while it is read cannot contradict an announced length.
fn read_sparse(request: &ReadFile, mut file: File, mut pipe: File, path: &Path) -> Result<u64> {
    let end = request.len.map_or(u64::MAX, |len| request.offset.saturating_add(len));
    let mut at = request.offset;
    // A segment's head and its bytes are written together: a head alone would take a page of the
    // pipe.
    let mut buffer = vec![0; SEGMENT_HEAD + CHUNK];
    let mut data_until = at;
    while at < end {
        if at >= data_until {
            let facts = file.metadata().at(path, "stat")?;
            let size = facts.len().min(end);
            // A file with all its blocks allocated has no holes to search for.
            let has_holes = facts.blocks().saturating_mul(512) < facts.len();
            let found = |seek: io::Result<Option<u64>>| seek.ok().filter(|_| has_holes);
            let data = found(sys::next_data(&file, at)).map_or(at, |data| data.unwrap_or(size));
            let data = data.min(size);
            if data > at {
                pipe.write_all(&Segment::Hole(data - at).head()).at(path, "send")?;
                at = data;
            }
            let hole = found(sys::next_hole(&file, at)).flatten();
            data_until = hole.unwrap_or(u64::MAX).max(at + 1);
            file.seek(SeekFrom::Start(at)).at(path, "seek")?;
        }
        let most = (data_until.min(end) - at).min(CHUNK as u64) as usize;
        let (head, bytes) = buffer.split_at_mut(SEGMENT_HEAD);
        let count = match file.read(&mut bytes[..most]) {
            Ok(0) => break,
            Ok(count) => count,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e).at(path, "read"),
        };
        head.copy_from_slice(&Segment::Data(count as u64).head());
        pipe.write_all(&buffer[..SEGMENT_HEAD + count]).at(path, "send")?;
        at += count as u64;
    }
    Ok(at - request.offset)
}
