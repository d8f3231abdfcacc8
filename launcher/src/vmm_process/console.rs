//! The guest's console on its way into a file that cannot grow without end.
//!
//! The machine writes into a pipe and a thread here empties it, since a guest may print for ever and
//! the machine itself should know nothing of log files.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::log_file::LogWriter;

/// Starts the thread and returns the end for the machine.
pub fn start(log: &Path, copy: Option<&File>) -> io::Result<File> {
    let (mut reader, writer) = io::pipe()?;
    let mut log = LogWriter::create(log)?;
    let mut copy = copy.map(File::try_clone).transpose()?;
    std::thread::Builder::new().name("console-log".to_owned()).spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(count @ 1..) = reader.read(&mut buffer) {
            // A full disk costs console lines, never the machine.
            let _ = log.append(&buffer[..count]);
            if let Some(copy) = &mut copy {
                let _ = copy.write_all(&buffer[..count]);
            }
        }
    })?;
    Ok(File::from(OwnedFd::from(writer)))
}
