//! One look at all sandboxes: their rows, their memory, their processor time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_sandbox::Sandbox;
use pvmm_sandbox::usage::Usage;
use tokio::sync::Mutex;

use crate::blocking::{Blocking, Work};
use crate::error::ApiError;
use crate::store::SandboxRow;

/// How long a look is good for all who ask.
const FRESH: Duration = Duration::from_secs(1);
/// How long a look may read; the sandboxes that are left then have no numbers in it.
const BUDGET: Duration = Duration::from_secs(1);

/// A sandbox at the time of a look.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its row.
    pub row: SandboxRow,
    /// Memory and processor time of its VM, if it runs and they were read in time.
    pub usage: Option<Usage>,
}

/// One look at all sandboxes, newest first.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The sandboxes.
    pub sandboxes: Vec<Seen>,
    at: Instant,
}

impl Sample {
    /// Makes a look at these sandboxes, now.
    pub fn of(sandboxes: Vec<Seen>) -> Self {
        Self { sandboxes, at: Instant::now() }
    }
}

/// The last look. The lock makes those who ask meanwhile wait for it instead of looking too.
#[derive(Default)]
pub struct Sampler {
    last: Mutex<Option<Arc<Sample>>>,
}

impl Sampler {
    /// Looks at the sandboxes that `known` returns, unless someone did so within the last second.
    pub async fn look(
        &self,
        blocking: &Blocking,
        known: impl FnOnce() -> Vec<(SandboxRow, Option<Sandbox>)>,
    ) -> Result<Arc<Sample>, ApiError> {
        let mut last = self.last.lock().await;
        if let Some(sample) = last.as_ref().filter(|sample| sample.at.elapsed() < FRESH) {
            return Ok(Arc::clone(sample));
        }
        let known = known();
        let read = move || {
            let deadline = Instant::now() + BUDGET;
            let look = |(row, vm): (SandboxRow, Option<Sandbox>)| {
                let vm = vm.filter(|_| Instant::now() < deadline);
                Seen { row, usage: vm.and_then(|vm| vm.usage()) }
            };
            Ok(known.into_iter().map(look).collect())
        };
        let sandboxes = blocking.run(Work::Short, read).await?;
        let sample = Arc::new(Sample::of(sandboxes));
        *last = Some(Arc::clone(&sample));
        Ok(sample)
    }
}
