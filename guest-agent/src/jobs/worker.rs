//! Work on a thread of the pool, whose report ends the stream.
//!
//! It serves file requests, watches and freezes; only the interpreter's calls need more.

use pvmm_guest_agent::message::Outcome;

use crate::agent::Agent;
use crate::job::{Job, Jobs, Stream};
use crate::pool::{Reporter, WorkerReport};

struct WorkerJob {
    stream: Stream,
}

/// Does the work on a thread.
pub fn start(
    agent: &mut Agent,
    jobs: &mut Jobs,
    stream: Stream,
    work: impl FnOnce(&Reporter) -> Outcome + Send + 'static,
) {
    let job = stream.job;
    jobs.open(agent, WorkerJob { stream });
    submit(agent, job, work);
}

/// Queues the work of a job for the threads.
pub fn submit(
    agent: &mut Agent,
    job: u64,
    work: impl FnOnce(&Reporter) -> Outcome + Send + 'static,
) {
    let task = move |reporter: &Reporter| {
        let outcome = work(reporter);
        reporter.send(WorkerReport::Done(job, outcome));
    };
    agent.pool.submit(job, Box::new(task));
}

impl Job for WorkerJob {
    fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }
}
