//! Copies a whole folder, as one tar archive that is packed at one end and unpacked at the other.
//!
//! The guest controls an archive that comes from it: names, kinds, modes, links. The library
//! unpacks only into the target folder, and drops set-id bits.

use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use pvmm::agent::AgentError;
use pvmm::agent::trees::{self, ArchiveError, Unpack};

use super::{Copy, in_guest, on_host};
use crate::exit::Failure;

/// The buffer size of writes to the connection.
const CHUNK: usize = 64 << 10;

pub fn into_guest(copy: &mut Copy, from: &Path, to: &Path) -> Result<(), Failure> {
    let writer = copy.agent.open_write_tar(to, copy.owners).map_err(in_guest("write", to))?;
    let mut stream = BufWriter::with_capacity(CHUNK, Watched { inner: writer, copy });
    let mut left_out = |path: &Path| remark(copy, path);
    trees::pack(from, &mut stream, &mut left_out).map_err(|error| refuse(copy, to, error))?;
    let writer = stream.into_inner().map_err(|error| {
        let (act, path) = ("send", from.to_owned());
        refuse(copy, to, ArchiveError { act, path, source: error.into_error() })
    })?;
    writer.inner.finish().map(drop).map_err(|error| told(copy, to, error))
}

pub fn out_of_guest(copy: &mut Copy, from: &Path, to: &Path) -> Result<(), Failure> {
    let reader = copy.agent.open_read_tar(from).map_err(in_guest("read", from))?;
    let mut stream = Watched { inner: reader, copy };
    let options = Unpack { owners: copy.owners, modes: 0o777, max_entries: copy.caps.files };
    let mut left_out = |path: &Path| remark(copy, path);
    let unpacked = trees::unpack(&mut stream, to, options, &mut left_out);
    unpacked.map_err(|error| match error.errno() {
        Some(libc::E2BIG) => copy.caps.too_many(from),
        _ => refuse(copy, from, error),
    })?;
    // Read to the end, where the guest reports success or an error.
    io::copy(&mut stream, &mut io::sink()).map(drop).map_err(|source| {
        refuse(copy, from, ArchiveError { act: "read", path: to.to_owned(), source })
    })
}

fn remark(copy: &Copy, path: &Path) {
    copy.transfer.remark(&format!("left out {}: not a file, folder or link", path.display()));
}

/// Maps an error to its cause: an interrupt, a limit, the guest, or this host.
fn refuse(copy: &Copy, in_vm: &Path, error: ArchiveError) -> Failure {
    if let Err(interrupted) = copy.stop_if_interrupted() {
        return interrupted;
    }
    if copy.transfer.total() > copy.caps.bytes {
        return copy.caps.too_large(in_vm);
    }
    let errno = error.errno();
    let ArchiveError { act, path, source } = error;
    match source.downcast::<AgentError>() {
        Ok(error) => told(copy, in_vm, error),
        Err(source) => on_host(act, &path)(errno.map_or(source, io::Error::from_raw_os_error)),
    }
}

/// Maps an error that the agent reported.
fn told(copy: &Copy, in_vm: &Path, error: AgentError) -> Failure {
    if let Err(interrupted) = copy.stop_if_interrupted() {
        return interrupted;
    }
    match &error {
        AgentError::Refused(refusal) => {
            Failure::usage(format!("the copy in the VM failed: {refusal}"))
        }
        _ => in_guest("copy", in_vm)(error),
    }
}

/// A stream that counts its bytes and can be interrupted.
struct Watched<'a, T> {
    inner: T,
    copy: &'a Copy,
}

impl<T> Watched<'_, T> {
    fn check(&self) -> io::Result<()> {
        if self.copy.signals.is_pending() {
            Err(io::Error::from_raw_os_error(libc::ECANCELED))
        } else {
            Ok(())
        }
    }
}

impl<T: Read> Read for Watched<'_, T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        let count = self.inner.read(buffer)?;
        self.copy.transfer.add(count as u64);
        if self.copy.transfer.total() > self.copy.caps.bytes {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        Ok(count)
    }
}

impl<T: Write> Write for Watched<'_, T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        let count = self.inner.write(bytes)?;
        self.copy.transfer.add(count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
