//! The monitor process's own log: one line per message, of bounded total size.
//!
//! The size is bounded because a guest can provoke messages.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most bytes written to the log.
const CAP: usize = 1 << 20;

struct Logger {
    written: AtomicUsize,
}

static LOGGER: Logger = Logger { written: AtomicUsize::new(0) };

/// Installs the logger, which writes to standard error, redirected to the log file.
pub fn start() {
    // Setting it fails only if this logger is already installed.
    let _ = log::set_logger(&LOGGER);
    log::set_max_level(log::LevelFilter::Info);
}

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Info
    }

    fn log(&self, record: &log::Record<'_>) {
        let message = record.args().to_string();
        let line = format!("{}: {}\n", record.level(), crate::failure::one_line(&message));
        if self.written.fetch_add(line.len(), Ordering::Relaxed) < CAP {
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }

    fn flush(&self) {}
}
