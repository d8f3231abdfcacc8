//! Runs a host tool (apt, mke2fs, debugfs) with a deadline and captures its output.
//!
//! A missing or failing tool always becomes a one-line error that names the fix.

use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::progress::{Progress, Silent};

/// The longest line kept; longer ones are cut, to bound memory.
const LINE_CAP: u64 = 64 * 1024;
const LINES_CAP: usize = 100_000;
const INTERRUPT_POLL: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    #[error("{tool} is not installed: apt-get install {package}")]
    Missing { tool: String, package: &'static str },
    #[error("cannot start {tool}")]
    Start { tool: String, source: io::Error },
    #[error("cannot wait for {tool}")]
    Wait { tool: String, source: io::Error },
    #[error("{tool} failed: {said}")]
    Failed { tool: String, said: String, lines: Vec<String> },
    #[error("interrupted while {tool} ran")]
    Interrupted { tool: String },
    #[error("{tool} did not finish within {seconds} s and was stopped")]
    Timeout { tool: String, seconds: u64 },
}

/// The output of a tool that succeeded.
#[derive(Debug, Default)]
pub(crate) struct Said {
    pub(crate) out: Vec<String>,
    pub(crate) err: Vec<String>,
}

enum Line {
    Out(String),
    Err(String),
}

/// Runs `command` to its end; `detail` selects lines of its standard output to report as progress.
pub(crate) fn run(
    mut command: Command,
    package: &'static str,
    deadline: Duration,
    progress: &mut dyn Progress,
    detail: impl Fn(&str) -> Option<String>,
) -> Result<Said, ToolError> {
    let tool = command.get_program().to_string_lossy().into_owned();
    let end = Instant::now() + deadline;
    // mke2fs and debugfs are in sbin, which an ordinary user's PATH often lacks.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"));
    command.env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => Stopped(child),
        Err(err) if err.kind() == io::ErrorKind::NotFound => {
            return Err(ToolError::Missing { tool, package });
        }
        Err(source) => return Err(ToolError::Start { tool, source }),
    };

    let (lines, incoming) = mpsc::sync_channel(256);
    let mut readers = Vec::new();
    if let Some(out) = child.0.stdout.take() {
        readers.push(read_lines(out, lines.clone(), Line::Out));
    }
    if let Some(err) = child.0.stderr.take() {
        readers.push(read_lines(err, lines.clone(), Line::Err));
    }
    drop(lines);

    let mut said = Said::default();
    loop {
        // Checked for every line, because a tool that never stops printing must be stopped too.
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ToolError::Timeout { tool, seconds: deadline.as_secs() });
        }
        if progress.interrupted() {
            return Err(ToolError::Interrupted { tool });
        }
        match incoming.recv_timeout(left.min(INTERRUPT_POLL)) {
            Ok(Line::Out(line)) => {
                if let Some(text) = detail(&line) {
                    progress.detail(&text);
                }
                push(&mut said.out, line);
            }
            Ok(Line::Err(line)) => push(&mut said.err, line),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => (),
        }
    }
    for reader in readers {
        // Both threads ended when the channel closed, so this does not block.
        let _ = reader.join();
    }
    let status = loop {
        match child.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() >= end => {
                return Err(ToolError::Timeout { tool, seconds: deadline.as_secs() });
            }
            // The tool has closed its output and is about to exit.
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(source) => return Err(ToolError::Wait { tool, source }),
        }
    };
    if status.success() {
        return Ok(said);
    }
    let message = summary(&said).unwrap_or_else(|| status.to_string());
    Err(ToolError::Failed { tool, said: message, lines: said.err })
}

/// Runs a short command without progress; otherwise as [`run`].
pub(crate) fn run_quietly(
    command: Command,
    package: &'static str,
    deadline: Duration,
) -> Result<Said, ToolError> {
    run(command, package, deadline, &mut Silent, |_| None)
}

/// A child process that is killed and reaped on drop.
struct Stopped(Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Returns the most relevant line: apt marks errors with `E:`, other tools print them last.
fn summary(said: &Said) -> Option<String> {
    let lines = || said.err.iter().chain(&said.out).filter(|line| !line.trim().is_empty());
    let errors = lines().find_map(|line| line.strip_prefix("E: ").map(str::to_owned));
    errors
        .or_else(|| said.err.iter().rfind(|line| !line.trim().is_empty()).cloned())
        .or_else(|| lines().next_back().cloned())
        .map(|line| line.trim().to_owned())
}

fn push(lines: &mut Vec<String>, line: String) {
    if lines.len() < LINES_CAP {
        lines.push(line);
    }
}

fn read_lines(
    from: impl Read + Send + 'static,
    to: mpsc::SyncSender<Line>,
    kind: fn(String) -> Line,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            match (&mut from).take(LINE_CAP).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {
                    let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                    if to.send(kind(text)).is_err() {
                        return;
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, deadline: Duration) -> Result<Said, ToolError> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run_quietly(command, "dash", deadline)
    }

    #[test]
    fn tool_that_succeeds_gives_both_streams() {
        let said = shell("echo a; echo b >&2", Duration::from_secs(10)).unwrap();
        assert_eq!((said.out, said.err), (vec!["a".to_owned()], vec!["b".to_owned()]));
    }

    #[test]
    fn tool_that_fails_gives_its_error_line() {
        let err = shell(
            "echo 'W: x' >&2; echo 'E: bad' >&2; echo y >&2; exit 3",
            Duration::from_secs(10),
        );
        assert_eq!(err.unwrap_err().to_string(), "sh failed: bad");
    }

    #[test]
    fn tool_that_hangs_is_stopped_at_its_deadline() {
        let start = Instant::now();
        let err = shell("exec sleep 30", Duration::from_millis(100)).unwrap_err();
        assert!(matches!(err, ToolError::Timeout { .. }), "{err}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn tool_that_is_interrupted_is_stopped_at_once() {
        struct Impatient;
        impl Progress for Impatient {
            fn event(&mut self, _event: crate::Event<'_>) {}
            fn interrupted(&mut self) -> bool {
                true
            }
        }
        let mut command = Command::new("sleep");
        command.arg("30");
        let err = run(command, "coreutils", Duration::from_secs(20), &mut Impatient, |_| None);
        assert!(matches!(err, Err(ToolError::Interrupted { .. })));
    }

    #[test]
    fn tool_that_talks_without_end_is_stopped_at_its_deadline() {
        let err = shell("exec yes", Duration::from_millis(200)).unwrap_err();
        assert!(matches!(err, ToolError::Timeout { .. }), "{err}");
    }

    #[test]
    fn tool_that_is_missing_names_its_package() {
        let err = run_quietly(Command::new("pvmm-no-such-tool"), "apt", Duration::from_secs(1));
        assert_eq!(
            err.unwrap_err().to_string(),
            "pvmm-no-such-tool is not installed: apt-get install apt"
        );
    }
}
