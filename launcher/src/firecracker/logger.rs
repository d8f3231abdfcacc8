//! The log: lines in Firecracker's format, on standard output or in the file that a client sets.
//!
//! Messages of the process itself, such as one per request, are unlimited. Messages that a guest
//! can provoke are not: after 1 MiB of them, no more are written.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::bodies;

/// The most bytes logged by the VM and its devices.
const MACHINE_CAP: usize = 1 << 20;

struct Logger {
    settings: Mutex<Settings>,
    from_machine: AtomicUsize,
    missed: AtomicU64,
}

struct Settings {
    id: String,
    target: Option<File>,
    show_level: bool,
    show_origin: bool,
    module: Option<String>,
}

static LOGGER: Logger = Logger {
    settings: Mutex::new(Settings {
        id: String::new(),
        target: None,
        show_level: false,
        show_origin: false,
        module: None,
    }),
    from_machine: AtomicUsize::new(0),
    missed: AtomicU64::new(0),
};

/// Installs the logger, at level `Info`, with the instance id in every line.
pub fn start(id: &str) {
    LOGGER.settings().id = id.to_owned();
    // Setting it fails only if this logger is already installed.
    let _ = log::set_logger(&LOGGER);
    log::set_max_level(log::LevelFilter::Info);
}

/// Applies the settings that are present in `wish`; the level is always set.
pub fn configure(wish: &bodies::Logger) -> io::Result<()> {
    let target = wish.log_path.as_deref().map(open).transpose()?;
    let mut settings = LOGGER.settings();
    if target.is_some() {
        settings.target = target;
    }
    settings.show_level = wish.show_level.unwrap_or(settings.show_level);
    settings.show_origin = wish.show_log_origin.unwrap_or(settings.show_origin);
    if wish.module.is_some() {
        settings.module.clone_from(&wish.module);
    }
    log::set_max_level(wish.level.map_or(log::LevelFilter::Info, bodies::Level::filter));
    Ok(())
}

/// Returns the number of lines that could not be written.
pub fn missed() -> u64 {
    LOGGER.missed.load(Ordering::Relaxed)
}

/// Opens a file or named pipe for appending, without blocking for a reader now or for room later.
///
/// A new file is accessible only to its owner: logs, metrics and consoles reveal data of guests.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .custom_flags(libc::O_NONBLOCK | libc::O_APPEND)
        .create(true)
        .mode(0o600)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)
}

impl Logger {
    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl log::Log for Logger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let settings = self.settings();
        let from = record.module_path().unwrap_or_default();
        if settings.module.as_ref().is_some_and(|module| !from.starts_with(module.as_str())) {
            return;
        }
        let line = settings.line(record, &timestamp(SystemTime::now()));
        let ours = from.starts_with(module_path!().trim_end_matches("::logger"));
        if !ours && self.from_machine.fetch_add(line.len(), Ordering::Relaxed) > MACHINE_CAP {
            return;
        }
        let written = match &settings.target {
            Some(file) => (&mut &*file).write_all(line.as_bytes()),
            None => {
                let mut out = io::stdout().lock();
                out.write_all(line.as_bytes()).and_then(|()| out.flush())
            }
        };
        if written.is_err() {
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

impl Settings {
    fn line(&self, record: &log::Record<'_>, time: &str) -> String {
        let thread = std::thread::current().name().unwrap_or("-").to_owned();
        let level = if self.show_level { format!(":{}", record.level()) } else { String::new() };
        let origin = if self.show_origin {
            format!(":{}:{}", record.file().unwrap_or("?"), record.line().unwrap_or(0))
        } else {
            String::new()
        };
        let text = crate::output::one_line(&record.args().to_string());
        format!("{time} [{}:{thread}{level}{origin}] {text}\n", self.id)
    }
}

/// Formats a time in UTC with nanoseconds.
fn timestamp(now: SystemTime) -> String {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86400, since.as_secs() % 86400);
    // Converts days since 1970 to a date, by the calendar's 400-year cycles that begin on 1 March
    // 2000 - n * 400.
    let shifted = days + 719_468;
    let (cycle, of_cycle) = (shifted / 146_097, shifted % 146_097);
    let year_of = (of_cycle - of_cycle / 1460 + of_cycle / 36_524 - of_cycle / 146_096) / 365;
    let day_of_year = of_cycle - (365 * year_of + year_of / 4 - year_of / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of + cycle * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let nanoseconds = since.subsec_nanos();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanoseconds:09}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timestamp_of_known_seconds_is_their_date() {
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::new(seconds, 7));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000007");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000007");
        assert_eq!(at(1_794_732_930), "2026-11-15T08:55:30.000000007");
        assert_eq!(at(4_102_444_799), "2099-12-31T23:59:59.000000007");
    }

    #[test]
    fn line_has_firecrackers_shape_and_is_one_line() {
        let mut settings = Settings {
            id: "vm-1".to_owned(),
            target: None,
            show_level: true,
            show_origin: false,
            module: None,
        };
        let record = |settings: &Settings| {
            let args = format_args!("two\nlines");
            let record = log::Record::builder().args(args).level(log::Level::Warn).build();
            settings.line(&record, "T")
        };
        let thread = std::thread::current().name().unwrap_or("-").to_owned();
        assert_eq!(record(&settings), format!("T [vm-1:{thread}:WARN] two\\nlines\n"));
        settings.show_level = false;
        assert_eq!(record(&settings), format!("T [vm-1:{thread}] two\\nlines\n"));
    }

    #[test]
    fn target_that_is_a_pipe_without_a_reader_does_not_make_us_wait() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        let mut fifo = open(&path).unwrap();
        let full = (0..1_000_000).any(|_| fifo.write_all(&[b'x'; 512]).is_err());
        assert!(full);
        assert!(open(&dir.path().join("no/such/folder")).is_err());
    }
}
