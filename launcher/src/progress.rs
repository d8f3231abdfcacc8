//! Long work as the person who waits for it sees it: a moving line on a terminal, plain lines elsewhere.
//!
//! The libraries tell what they do and never print; how that looks is decided here alone.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use pvmm_sandbox::{Event, Progress};

use crate::output;
use crate::sys::signals;

/// A step shorter than this is not worth a line.
const WORTH_A_LINE: Duration = Duration::from_millis(500);

/// Shows the steps of a preparation on standard error.
pub struct Steps {
    quiet: bool,
    bar: Option<ProgressBar>,
    step: Option<(String, Instant)>,
}

impl Steps {
    pub fn new(quiet: bool) -> Self {
        // No ticker thread: the VMM process is forked later, and a fork needs a single thread.
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
                    bar.set_message(format!("{text}: {}", crate::exit::one_line(detail)));
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

impl Drop for Steps {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Bytes on their way, as a moving count on a terminal.
pub struct Transfer {
    quiet: bool,
    bar: Option<ProgressBar>,
}

impl Transfer {
    pub fn new(quiet: bool) -> Self {
        let bar = (!quiet && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new_spinner();
            let style = ProgressStyle::with_template("{spinner} {bytes} copied ({bytes_per_sec})");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar
        });
        Self { quiet, bar }
    }

    pub fn add(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    /// A remark that does not tear the moving line.
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

/// How far a copy is, in bytes; nothing is shown for one that is quick.
pub struct Counter {
    bar: Option<ProgressBar>,
    text: &'static str,
    start: Instant,
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
        Self { bar, text, start: Instant::now() }
    }

    pub fn tell(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar
            && self.start.elapsed() >= WORTH_A_LINE
        {
            bar.set_length(total);
            bar.set_position(done);
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
