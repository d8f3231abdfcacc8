//! Copies the guest's console output into a log file of bounded size.
//!
//! The VM writes into a pipe that a thread here empties, because a guest may print without end and
//! the VM itself should know nothing of log files.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use pvmm::SystemCallFilter;

use crate::log_file::LogWriter;

/// Starts the thread, under its filter if there is one, and returns the pipe end that the VM writes
/// to.
pub fn start(
    log: &Path,
    copy: Option<&File>,
    filter: Option<SystemCallFilter>,
) -> io::Result<File> {
    let (mut reader, writer) = io::pipe()?;
    let mut log = LogWriter::create(log)?;
    let mut copy = copy.map(File::try_clone).transpose()?;
    std::thread::Builder::new().name("console-log".to_owned()).spawn(move || {
        if let Some(Err(error)) = filter.map(|filter| filter.install()) {
            log::error!("the console is not kept: {error}");
            return;
        }
        let mut buffer = vec![0; 16 << 10];
        while let Ok(count @ 1..) = reader.read(&mut buffer) {
            // A full disk loses console output, but never stops the VM.
            let _ = log.append(&buffer[..count]);
            if let Some(copy) = &mut copy {
                let _ = copy.write_all(&buffer[..count]);
            }
        }
    })?;
    Ok(File::from(OwnedFd::from(writer)))
}
