//! Runs one external command of the build: output to a log, a deadline, Ctrl-C, and progress.
//!
//! A build of minutes must neither look like a hang nor outlive its caller.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::sys;

/// The time between two checks of the child and the interrupt flag.
const LOOK: Duration = Duration::from_millis(100);
/// How long a child may take to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(5);
/// How much of the end of a log is searched for the reason of a failure.
const TAIL: u64 = 64 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error("start {program}")]
    Start {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("write {path}")]
    Log {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("wait for {program}")]
    Wait {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("{program} failed ({status}): {reason}")]
    Failed { program: String, status: ExitStatus, reason: String },
    #[error("the disk is full: the build needs about 3 GB in the cache directory")]
    DiskFull,
    #[error("{program} took longer than {} s", limit.as_secs())]
    Deadline { program: String, limit: Duration },
    #[error("interrupted")]
    Interrupted,
}

/// The progress of the build, printed on stderr; stdout is for the result only.
pub struct Progress {
    started: Instant,
    terminal: bool,
    every: Duration,
    last: Instant,
}

impl Progress {
    pub fn start() -> Self {
        let terminal = io::stderr().is_terminal();
        let now = Instant::now();
        let every = Duration::from_secs(if terminal { 1 } else { 20 });
        Self { started: now, terminal, every, last: now }
    }

    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Prints what begins now.
    pub fn phase(&mut self, what: &str) {
        eprintln!("[{:5.1}s] kernel: {what}", self.seconds());
        self.last = Instant::now();
    }

    /// Prints how far the current phase is: one line that is rewritten on a terminal, otherwise a
    /// line every few seconds.
    fn tick(&mut self, done: u64, expected: u64) {
        if done == 0 || self.last.elapsed() < self.every {
            return;
        }
        self.last = Instant::now();
        // The expected number is an estimate, so 100 % is never shown early.
        let percent = (done * 100 / expected.max(1)).min(99);
        let line = format!("[{:5.1}s] kernel: {done} files built, {percent} %", self.seconds());
        if self.terminal {
            eprint!("\r\x1b[2K{line}");
        } else {
            eprintln!("{line}");
        }
    }

    fn clear(&self) {
        if self.terminal {
            eprint!("\r\x1b[2K");
            // The build does not fail because the terminal is gone.
            let _ = io::stderr().flush();
        }
    }
}

/// The log and the limits of one command.
pub struct Step<'a> {
    pub log: &'a Path,
    pub limit: Duration,
    /// How many files `make` usually builds, or zero for a command that does not count files.
    pub expected: u64,
}

impl Step<'_> {
    /// Runs `command` to its end. Its output goes only to the log. Fails if the command fails,
    /// exceeds the limit or is interrupted.
    pub fn run(&self, mut command: Command, progress: &mut Progress) -> Result<(), StepError> {
        let program = command.get_program().to_string_lossy().into_owned();
        let log_error = |source: io::Error| match source.kind() {
            io::ErrorKind::StorageFull => StepError::DiskFull,
            _ => StepError::Log { path: self.log.into(), source },
        };
        let mut log =
            File::options().create(true).append(true).open(self.log).map_err(log_error)?;
        writeln!(log, "+ {command:?}").map_err(log_error)?;
        let mut seen = Counter::at_end_of(self.log).map_err(log_error)?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(log_error)?)
            .stderr(log)
            // The command has its own process group, so that `end` can end the compilers too.
            .process_group(0);
        let mut child = command
            .spawn()
            .map_err(|source| StepError::Start { program: program.clone(), source })?;
        let until = Instant::now() + self.limit;
        let status = loop {
            let ended = child
                .try_wait()
                .map_err(|source| StepError::Wait { program: program.clone(), source })?;
            if let Some(status) = ended {
                break status;
            }
            if sys::interrupted() || Instant::now() >= until {
                end(&mut child);
                progress.clear();
                return Err(if sys::interrupted() {
                    StepError::Interrupted
                } else {
                    StepError::Deadline { program, limit: self.limit }
                });
            }
            if self.expected > 0 {
                // If the log cannot be read, only the progress is missing.
                progress.tick(seen.advance().unwrap_or(0), self.expected);
            }
            std::thread::sleep(LOOK);
        };
        if self.expected > 0 {
            progress.clear();
        }
        if status.success() {
            return Ok(());
        }
        let tail = tail(self.log).unwrap_or_default();
        if tail.contains("No space left on device") {
            return Err(StepError::DiskFull);
        }
        Err(StepError::Failed { program, status, reason: reason(&tail) })
    }
}

/// Ends the child and its process group: SIGTERM first, SIGKILL after [`GRACE`].
fn end(child: &mut Child) {
    sys::kill_group(child.id(), libc::SIGTERM);
    let until = Instant::now() + GRACE;
    while Instant::now() < until {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(LOOK),
            _ => break,
        }
    }
    sys::kill_group(child.id(), libc::SIGKILL);
    // The child was collected above or has been killed, so there is nothing to report.
    let _ = child.wait();
}

/// Counts the lines of a growing log that report a built file (`  CC      fs/open.o`).
struct Counter {
    log: File,
    count: u64,
    partial: Vec<u8>,
}

impl Counter {
    fn at_end_of(path: &Path) -> io::Result<Self> {
        let mut log = File::open(path)?;
        log.seek(SeekFrom::End(0))?;
        Ok(Self { log, count: 0, partial: Vec::new() })
    }

    fn advance(&mut self) -> io::Result<u64> {
        self.log.read_to_end(&mut self.partial)?;
        let Some(end) = self.partial.iter().rposition(|&b| b == b'\n') else {
            return Ok(self.count);
        };
        let built = |line: &&[u8]| {
            line.starts_with(b"  ") && line.get(2).is_some_and(u8::is_ascii_uppercase)
        };
        let whole = self.partial.drain(..=end).collect::<Vec<u8>>();
        self.count += whole.split(|&b| b == b'\n').filter(built).count() as u64;
        Ok(self.count)
    }
}

fn tail(path: &Path) -> io::Result<String> {
    let mut log = File::open(path)?;
    let start = fs::metadata(path)?.len().saturating_sub(TAIL);
    log.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    log.take(TAIL).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the line of a log's end that most likely gives the reason: the first error, else the
/// line before make's first complaint, else the last line.
fn reason(tail: &str) -> String {
    let said = |line: &&str| {
        let line = line.to_ascii_lowercase();
        line.contains("error:") || line.starts_with("e: ") || line.contains("undefined reference")
    };
    let lines: Vec<&str> = tail.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let before_make = lines.windows(2).find(|pair| pair[1].contains(": *** [")).map(|pair| pair[0]);
    let first = lines.iter().copied().find(|line| said(line));
    let line = first.or(before_make).or(lines.last().copied()).unwrap_or("no output");
    line.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Log(PathBuf);

    impl Log {
        fn new(name: &str) -> Self {
            Self(std::env::temp_dir().join(format!("pvmm-step-{name}-{}", std::process::id())))
        }

        fn shell(&self, script: &str, limit: Duration) -> Result<(), StepError> {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Step { log: &self.0, limit, expected: 0 }.run(command, &mut Progress::start())
        }
    }

    impl Drop for Log {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn run_failing_command_says_the_first_error_line() {
        let said =
            Log::new("fails").shell("echo fine; echo 'a.c:1: error: no'; echo end; exit 2", LONG);
        let said = said.unwrap_err().to_string();
        assert!(said.contains("a.c:1: error: no") && said.contains("exit status: 2"), "{said}");
    }

    #[test]
    fn reason_make_complaint_gives_the_line_before_it() {
        let tail = "  HOSTLD x\nKconfig:9: can't open file\nmake[3]: *** [a:1: b] Error 1\nmake: *** [c] Error 2\n";
        assert_eq!(reason(tail), "Kconfig:9: can't open file");
    }

    #[test]
    fn run_full_disk_is_told_apart() {
        let said =
            Log::new("full").shell("echo 'write: No space left on device' >&2; exit 1", LONG);
        assert!(matches!(said, Err(StepError::DiskFull)));
    }

    #[test]
    fn run_past_its_deadline_ends_the_whole_group() {
        let log = Log::new("late");
        let begun = Instant::now();
        let said = log.shell("sleep 60 & echo $!; wait", Duration::from_millis(300));
        assert!(matches!(said, Err(StepError::Deadline { .. })));
        assert!(begun.elapsed() < GRACE);
        let text = fs::read_to_string(&log.0).unwrap();
        let sleeper = text.lines().last().unwrap();
        // A killed process exists until it is scheduled once more.
        let state = || fs::read_to_string(format!("/proc/{sleeper}/stat")).unwrap_or_default();
        let is_gone = || state().is_empty() || state().contains(") Z ");
        while !is_gone() && begun.elapsed() < 2 * GRACE {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(is_gone(), "{}", state());
    }

    #[test]
    fn counter_growing_log_counts_only_built_files() {
        let log = Log::new("counter");
        let mut file = File::create(&log.0).unwrap();
        let mut counter = Counter::at_end_of(&log.0).unwrap();
        write!(file, "  CC      a.o\nwarning: x\n  AS    ").unwrap();
        assert_eq!(counter.advance().unwrap(), 1);
        write!(file, "  b.o\n  lower\n").unwrap();
        assert_eq!(counter.advance().unwrap(), 2);
    }
}
