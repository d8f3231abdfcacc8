//! The threads of a transfer: each takes the next job, and the caller takes the results.
//!
//! The threads only read, compute and talk to the store; the caller alone writes files. So after an
//! interrupt nobody has to wait for a thread that waits for a server.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pvmm_images::Progress;

use crate::error::TravelError;

const THREADS: usize = 4;
/// How often an interrupt is looked for.
const LOOK: Duration = Duration::from_millis(100);

/// Does one thing in a thread, so that an interrupt need not wait for it.
pub fn one<R: Send + 'static>(
    work: impl Fn() -> Result<R, TravelError> + Send + Sync + 'static,
    progress: &mut dyn Progress,
) -> Result<R, TravelError> {
    let mut result = None;
    let take = |it, _: &mut dyn Progress| {
        result = Some(it);
        Ok(())
    };
    run(vec![()], move |()| work(), take, progress)?;
    result.ok_or(TravelError::Thread)
}

/// Does all `jobs` in a few threads, and gives each result to `take`. The first failure, or an
/// interrupt, ends the rest.
pub fn run<J, R>(
    jobs: Vec<J>,
    work: impl Fn(J) -> Result<R, TravelError> + Send + Sync + 'static,
    mut take: impl FnMut(R, &mut dyn Progress) -> Result<(), TravelError>,
    progress: &mut dyn Progress,
) -> Result<(), TravelError>
where
    J: Send + 'static,
    R: Send + 'static,
{
    let mut left = jobs.len();
    let (jobs, work) = (Arc::new(Mutex::new(jobs.into_iter())), Arc::new(work));
    let (results, done) = sync_channel(THREADS);
    for _ in 0..THREADS.min(left) {
        let (jobs, work, results) = (jobs.clone(), work.clone(), results.clone());
        thread::spawn(move || {
            let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
            while let Some(job) = next() {
                // Fails when the caller has gone.
                if results.send(work(job)).is_err() {
                    return;
                }
            }
        });
    }
    drop(results);
    while left > 0 {
        match done.recv_timeout(LOOK) {
            Ok(result) => take(result?, progress)?,
            Err(RecvTimeoutError::Timeout) => {
                if progress.interrupted() {
                    return Err(TravelError::Interrupted);
                }
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(TravelError::Thread),
        }
        left -= 1;
        if progress.interrupted() {
            return Err(TravelError::Interrupted);
        }
    }
    Ok(())
}
