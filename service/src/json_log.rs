//! The server's log as JSON, one object on each line of standard error.
//!
//! A thread writes the lines, so that a reader that stalls delays no request. Lines that find no
//! room are dropped and counted.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use serde::Serialize;
use serde_json::json;

use crate::clock;

/// The most lines that wait for the reader of the log.
const QUEUE: usize = 1024;
/// The most characters of a message.
const MAX_MESSAGE: usize = 4096;

/// The way to the thread that writes.
#[derive(Clone, Debug)]
pub struct JsonLog {
    lines: SyncSender<Vec<u8>>,
    dropped: Arc<AtomicU64>,
}

#[derive(Serialize)]
struct Line<'a, T> {
    time: String,
    level: &'a str,
    target: &'a str,
    message: &'a str,
    #[serde(flatten)]
    fields: &'a T,
}

impl log::Log for JsonLog {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Info
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let message: String = record.args().to_string().chars().take(MAX_MESSAGE).collect();
            self.write(record.level().as_str(), record.target(), &message, &json!({}));
        }
    }

    fn flush(&self) {}
}

impl JsonLog {
    /// Starts the log, and makes it that of this process, which can have one.
    pub fn start() -> std::io::Result<Self> {
        let (sender, received) = sync_channel::<Vec<u8>>(QUEUE);
        std::thread::Builder::new().name("pvmm-log".into()).spawn(move || {
            for line in received {
                let _ = std::io::stderr().write_all(&line);
            }
        })?;
        let log = Self { lines: sender, dropped: Arc::default() };
        log::set_boxed_logger(Box::new(log.clone())).map_err(std::io::Error::other)?;
        log::set_max_level(log::LevelFilter::Info);
        Ok(log)
    }

    /// Writes one line. `fields` must be an object.
    pub fn write<T: Serialize>(&self, level: &str, target: &str, message: &str, fields: &T) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        let lost = format!("{dropped} lines were dropped");
        let lost = (dropped > 0).then(|| line("WARN", "log", &lost, &json!({})));
        for line in lost.into_iter().chain([line(level, target, message, fields)]) {
            if self.lines.try_send(line).is_err() {
                self.dropped.fetch_add(dropped.max(1), Ordering::Relaxed);
            }
        }
    }
}

fn line<T: Serialize>(level: &str, target: &str, message: &str, fields: &T) -> Vec<u8> {
    let time = clock::rfc3339(clock::now_ms());
    let line = Line { time, level, target, message, fields };
    let mut line = serde_json::to_vec(&line).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_one_object_whatever_is_in_the_message() {
        let bytes = line("INFO", "request", "a\n\"b\u{1b}", &json!({ "status": 200 }));
        assert_eq!(bytes.iter().filter(|byte| **byte == b'\n').count(), 1);
        let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!((&value["message"], &value["status"]), (&"a\n\"b\u{1b}".into(), &200.into()));
        assert!(value["time"].as_str().unwrap().ends_with('Z'));
    }
}
