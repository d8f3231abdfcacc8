//! What the VMM process says for its own log: one line per message, and only so many.
//!
//! A guest can provoke messages, so the log has an end.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

/// After this many bytes nothing more is written.
const CAP: usize = 1 << 20;

struct Logger {
    written: AtomicUsize,
}

static LOGGER: Logger = Logger { written: AtomicUsize::new(0) };

/// From now on messages go to standard error, which the process has directed into its log.
pub fn start() {
    // It can only be set already, and then it is this one.
    let _ = log::set_logger(&LOGGER);
    log::set_max_level(log::LevelFilter::Info);
}

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Info
    }

    fn log(&self, record: &log::Record<'_>) {
        let message = record.args().to_string();
        let line = format!("{}: {}\n", record.level(), crate::exit::one_line(&message));
        if self.written.fetch_add(line.len(), Ordering::Relaxed) < CAP {
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }

    fn flush(&self) {}
}
