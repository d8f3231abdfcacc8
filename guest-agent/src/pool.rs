//! Threads for file work, made when there is some and gone when it is done.
//! A disk, a FIFO or a network filesystem may block; the loop and every exec must not wait for it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use pvmm_guest_agent::limits::MAX_FILE_WORKERS;
use pvmm_guest_agent::message::{Code, Failure, Metadata, Outcome};

use crate::sys;

/// Enough for a path walk and a buffer on the heap.
const STACK_BYTES: usize = 128 << 10;

/// What a worker tells the loop.
pub enum Report {
    /// ReadFile: the file is open and this is what it is.
    Started(u64, Metadata),
    /// Watch: what happens from now on is told.
    Begun(u64),
    Done(u64, Outcome),
}

/// A worker's way to the loop.
#[derive(Clone)]
pub struct Reporter {
    sender: Sender<Report>,
    wake: Arc<OwnedFd>,
}

impl Reporter {
    pub fn send(&self, report: Report) {
        // The receiver lives as long as the loop; without it nobody needs to know.
        let _ = self.sender.send(report);
        let _ = sys::write_once(&self.wake, &1u64.to_ne_bytes());
    }
}

type Task = Box<dyn FnOnce(&Reporter) + Send>;

pub struct Pool {
    reporter: Reporter,
    reports: Receiver<Report>,
    waiting: VecDeque<(u64, Task)>,
    working: usize,
}

impl Pool {
    pub fn new() -> io::Result<Self> {
        let (sender, reports) = channel();
        let wake = Arc::new(sys::event_counter()?);
        Ok(Self {
            reporter: Reporter { sender, wake },
            reports,
            waiting: VecDeque::new(),
            working: 0,
        })
    }

    /// Readable when there are reports.
    pub fn wake(&self) -> &OwnedFd {
        &self.reporter.wake
    }

    pub fn clear_wake(&self) {
        let _ = sys::read_onto(&self.reporter.wake, &mut Vec::new(), 8);
    }

    /// Does the task, which must report `Done` for this job once, now or when a thread is free.
    pub fn submit(&mut self, job: u64, task: Task) {
        self.waiting.push_back((job, task));
        self.start_waiting();
    }

    pub fn next_report(&mut self) -> Option<Report> {
        let report = self.reports.try_recv().ok()?;
        if matches!(report, Report::Done(..)) {
            self.working -= 1;
            self.start_waiting();
        }
        Some(report)
    }

    fn start_waiting(&mut self) {
        while self.working < MAX_FILE_WORKERS {
            let Some((job, task)) = self.waiting.pop_front() else { return };
            let reporter = self.reporter.clone();
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            self.working += 1;
            if let Err(e) = thread.spawn(move || task(&reporter)) {
                let failure = Failure {
                    code: Code::Io,
                    errno: e.raw_os_error(),
                    path: None,
                    message: "no thread can be made for file work".into(),
                };
                self.reporter.send(Report::Done(job, Outcome::Failed(failure)));
            }
        }
    }
}
