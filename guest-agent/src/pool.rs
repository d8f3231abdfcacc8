//! Threads for file work, started on demand and ended when it is done.
//!
//! A disk, a FIFO or a network filesystem may block; the event loop and every exec must not wait
//! for it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use pvmm_guest_agent::limits::MAX_FILE_WORKERS;
use pvmm_guest_agent::message::{Code, Metadata, Outcome};

use crate::sys;

/// Enough for a path walk; buffers are on the heap.
const STACK_BYTES: usize = 128 << 10;

/// A report of a worker to the event loop.
pub enum WorkerReport {
    /// A file is open and has this metadata, or changes are reported from now on.
    Started(u64, Option<Metadata>),
    Done(u64, Outcome),
}

/// A worker's connection to the event loop.
#[derive(Clone)]
pub struct Reporter {
    sender: Sender<WorkerReport>,
    wake: Arc<OwnedFd>,
}

impl Reporter {
    pub fn send(&self, report: WorkerReport) {
        // The receiver lives as long as the event loop; without it the report is not needed.
        let _ = self.sender.send(report);
        let _ = sys::write_once(&self.wake, &1u64.to_ne_bytes());
    }
}

type Task = Box<dyn FnOnce(&Reporter) + Send>;

pub struct Pool {
    reporter: Reporter,
    reports: Receiver<WorkerReport>,
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

    /// Returns a descriptor that is readable when there are reports.
    pub fn wake(&self) -> &OwnedFd {
        &self.reporter.wake
    }

    pub fn clear_wake(&self) {
        let _ = sys::read_onto(&self.reporter.wake, &mut Vec::new(), 8);
    }

    /// Runs the task, now or when a thread is free. The task must report `Done` for this job
    /// exactly once.
    pub fn submit(&mut self, job: u64, task: Task) {
        self.waiting.push_back((job, task));
        self.start_waiting();
    }

    pub fn next_report(&mut self) -> Option<WorkerReport> {
        let report = self.reports.try_recv().ok()?;
        if matches!(report, WorkerReport::Done(..)) {
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
                let why = "no thread can be made for file work";
                let outcome = Outcome::failed(Code::Io, e.raw_os_error(), why);
                self.reporter.send(WorkerReport::Done(job, outcome));
            }
        }
    }
}
