//! Long work as the person who waits for it sees it: a moving line on a terminal, plain lines elsewhere.
//!
//! Also the place where Ctrl-C reaches that work: the tools it runs are stopped, the library cleans up
//! and returns, and nothing half-made stays behind.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use pvmm_sandbox::{Event, Progress};

use crate::output;
use crate::sys::process;
use crate::sys::signals::Signals;

/// A step shorter than this is not worth a line.
const WORTH_A_LINE: Duration = Duration::from_millis(500);

/// Shows the steps of a preparation on standard error.
pub struct Steps<'a> {
    quiet: bool,
    bar: Option<ProgressBar>,
    step: Option<(String, Instant)>,
    signals: Option<&'a Signals>,
}

impl<'a> Steps<'a> {
    /// With `signals`, one that arrives stops the tools that the work has started.
    pub fn new(quiet: bool, signals: Option<&'a Signals>) -> Self {
        // No ticker thread: the VMM process is forked later, and a fork needs a single thread.
        let bar = (!quiet && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new_spinner();
            let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar
        });
        Self { quiet, bar, step: None, signals }
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

    fn stop_if_asked(&self) {
        if self.signals.is_some_and(Signals::is_pending) {
            process::stop_children();
        }
    }
}

impl Progress for Steps<'_> {
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
        self.stop_if_asked();
    }
}

impl Drop for Steps<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
