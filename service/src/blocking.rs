//! Runs calls that wait in threads of their own, a bounded number at a time.
//!
//! The library and the agent's client block. Long work and short work have separate bounds, so that
//! many running commands do not keep a `pause` waiting. VMs start a few at a time: a start is work
//! for processors, and many at once would only make each of them late.

use std::future::Future;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use std::sync::Arc;

use crate::error::ApiError;
use crate::traces;

/// The most commands, transfers and streams at a time.
const LONG: usize = 448;
/// The most short calls at a time.
const SHORT: usize = 64;
/// The most starts at a time for each processor, and on any machine.
const STARTS_PER_CPU: usize = 2;
const STARTS: std::ops::RangeInclusive<usize> = 4..=64;
/// The threads that the runtime may have for all of them.
pub const THREADS: usize = LONG + SHORT + *STARTS.end();
/// How long a request waits for a free thread.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a start waits for others: less than clients wait for an answer.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// The kind of a call, by how long it may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A call that ends in seconds whatever the guest does.
    Short,
    /// A call that lasts as long as a command, a transfer or a stream.
    Long,
    /// A call that starts VMs.
    Start,
}

/// The bounds on calls that wait.
pub struct Blocking {
    long: Arc<Semaphore>,
    short: Arc<Semaphore>,
    start: Arc<Semaphore>,
}

impl Default for Blocking {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let starts = (cpus * STARTS_PER_CPU).clamp(*STARTS.start(), *STARTS.end());
        let [long, short, start] = [LONG, SHORT, starts].map(|most| Arc::new(Semaphore::new(most)));
        Self { long, short, start }
    }
}

impl Blocking {
    async fn permit(&self, work: Work) -> Result<OwnedSemaphorePermit, ApiError> {
        let (semaphore, patience) = match work {
            Work::Short => (&self.short, PATIENCE),
            Work::Long => (&self.long, PATIENCE),
            Work::Start => (&self.start, START_PATIENCE),
        };
        let acquire = Arc::clone(semaphore).acquire_owned();
        match tokio::time::timeout(patience, acquire).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(ApiError::unavailable("the server has too much to do: try again", 5)),
        }
    }

    /// Runs `call` in a thread and waits for its result. A caller that goes away does not end the
    /// call.
    pub async fn run<T, F>(&self, work: Work, call: F) -> Result<T, ApiError>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, ApiError> + Send + 'static,
    {
        let permit = self.permit(work).await?;
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            call()
        });
        task.await.map_err(|_| ApiError::internal("the server failed at this request"))?
    }

    /// Starts `call` in a thread without waiting for it.
    pub async fn start<F>(&self, work: Work, call: F) -> Result<(), ApiError>
    where
        F: FnOnce() + Send + 'static,
    {
        let permit = self.permit(work).await?;
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            call();
        });
        Ok(())
    }
}

/// Waits for work. If `stop` comes first, `end` ends the work by the handle that it has sent, and
/// the outcome of that is waited for.
pub async fn unless_stopped<T, H>(
    work: impl Future<Output = T>,
    handle: oneshot::Receiver<H>,
    stop: &CancellationToken,
    end: impl FnOnce(H),
) -> T {
    let mut work = std::pin::pin!(work);
    let stopped = async {
        stop.cancelled().await;
        handle.await
    };
    tokio::select! {
        outcome = &mut work => return outcome,
        handle = stopped => {
            if let Ok(handle) = handle {
                end(handle);
            }
        }
    }
    work.await
}

/// Runs a change to its end, also if the client goes away meanwhile: a half-made change would leave
/// a VM that nobody knows.
pub async fn to_the_end<T: Send + 'static>(
    change: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    let task = tokio::spawn(traces::carried(change));
    task.await.map_err(|_| ApiError::internal("the server failed at this request"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stopped_work_is_ended_by_its_handle() {
        let (sender, handle) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let work = async move {
            let _ = sender.send(end);
            ended.await.map_or("lost", |()| "ended")
        };
        let stop = CancellationToken::new();
        stop.cancel();
        let end = |end: oneshot::Sender<()>| assert!(end.send(()).is_ok());
        assert_eq!(unless_stopped(work, handle, &stop, end).await, "ended");
    }

    #[tokio::test]
    async fn work_that_is_not_stopped_comes_to_its_end() {
        let (_sender, handle) = oneshot::channel::<()>();
        let stop = CancellationToken::new();
        assert_eq!(unless_stopped(async { 7 }, handle, &stop, |()| {}).await, 7);
    }
}
