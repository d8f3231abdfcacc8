//! Shows the progress of long work: a moving line on a terminal, plain lines elsewhere.
//!
//! The libraries report events and never print; only this file decides how they look.

use std::cell::Cell;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use pvmm_images::{Event, Progress};

use crate::output;
use pvmm_sandbox::dockerfile::Log;
use pvmm_sandbox::sys::signals;

/// A step shorter than this is not shown.
const WORTH_A_LINE: Duration = Duration::from_millis(500);
/// The interval of progress lines without a terminal.
const EVERY: Duration = Duration::from_secs(3);

/// Shows the steps of a preparation on standard error.
pub struct Steps {
    quiet: bool,
    bar: Option<ProgressBar>,
    step: Option<(String, Instant)>,
}

impl Steps {
    pub fn new(quiet: bool) -> Self {
        // No ticker thread: the monitor process is forked later, and fork needs a single thread.
        let bar = (!quiet && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new_spinner();
            let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar
        });
        Self { quiet, bar, step: None }
    }

    fn finish_step(&mut self) {
        let Some((text, start)) = self.step.take() else { return };
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            if start.elapsed() >= WORTH_A_LINE {
                let done = format!("{text} ({:.1} s)", start.elapsed().as_secs_f64());
                output::remark(self.quiet, &done);
            }
        }
    }
}

impl Progress for Steps {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Step(text) => {
                self.finish_step();
                self.step = Some((text.to_owned(), Instant::now()));
                match &self.bar {
                    Some(bar) => {
                        bar.reset();
                        bar.set_message(text.to_owned());
                        bar.tick();
                    }
                    None => output::remark(self.quiet, text),
                }
            }
            Event::Detail(detail) => {
                if let (Some(bar), Some((text, _))) = (&self.bar, &self.step) {
                    bar.set_message(format!("{text}: {}", crate::output::one_line(detail)));
                    bar.tick();
                }
            }
            Event::Done => self.finish_step(),
        }
    }

    fn interrupted(&mut self) -> bool {
        signals::caught().is_some()
    }
}

impl Log for Steps {
    fn line(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::remark(self.quiet, text)),
            None => output::remark(self.quiet, text),
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The progress of a transfer of unknown size: a moving count on a terminal, lines elsewhere.
pub struct Transfer {
    quiet: bool,
    bar: Option<ProgressBar>,
    total: Cell<u64>,
    lines: Lines,
}

/// Limits the rate of progress lines.
struct Lines {
    said: Cell<Instant>,
}

impl Lines {
    fn new() -> Self {
        Self { said: Cell::new(Instant::now()) }
    }

    /// Whether a line is due now; if so, starts the next interval.
    fn due(&self) -> bool {
        let due = self.said.get().elapsed() >= EVERY;
        if due {
            self.said.set(Instant::now());
        }
        due
    }
}

impl Transfer {
    pub fn new(quiet: bool) -> Self {
        let bar = (!quiet && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new_spinner();
            let style = ProgressStyle::with_template("{spinner} {bytes} copied ({bytes_per_sec})");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar
        });
        Self { quiet, bar, total: Cell::new(0), lines: Lines::new() }
    }

    pub fn add(&self, bytes: u64) {
        self.total.set(self.total.get().saturating_add(bytes));
        match &self.bar {
            Some(bar) => bar.inc(bytes),
            None if self.lines.due() => {
                let copied = output::bytes(self.total.get());
                output::remark(self.quiet, &format!("{copied} copied"));
            }
            None => {}
        }
    }

    /// Returns the bytes copied so far.
    pub fn total(&self) -> u64 {
        self.total.get()
    }

    /// Prints a remark without disturbing the moving line.
    pub fn remark(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::remark(self.quiet, text)),
            None => output::remark(self.quiet, text),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The progress of a copy in bytes; nothing is shown for a short one.
pub struct Counter {
    quiet: bool,
    bar: Option<ProgressBar>,
    text: &'static str,
    start: Instant,
    lines: Lines,
}

impl Counter {
    pub fn new(quiet: bool, text: &'static str) -> Self {
        let bar = (!quiet && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(0);
            let style = ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message(text);
            bar
        });
        Self { quiet, bar, text, start: Instant::now(), lines: Lines::new() }
    }

    pub fn tell(&mut self, done: u64, total: u64) {
        match &self.bar {
            Some(bar) if self.start.elapsed() >= WORTH_A_LINE => {
                bar.set_length(total);
                bar.set_position(done);
            }
            None if self.lines.due() => {
                let (done, total) = (output::bytes(done), output::bytes(total));
                output::remark(self.quiet, &format!("{}: {done} of {total}", self.text));
            }
            _ => {}
        }
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            log::debug!("{} took {:?}", self.text, self.start.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_due_after_a_few_seconds_and_then_not_at_once() {
        let lines = Lines::new();
        assert!(!lines.due());
        let lines = Lines { said: Cell::new(Instant::now() - EVERY) };
        assert!(lines.due());
        assert!(!lines.due());
    }
}
