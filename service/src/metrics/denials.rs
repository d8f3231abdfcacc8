//! Denied attempts of all sandboxes to reach the network: their number, and each for the audit log.
//!
//! Each network process has a counter and a log of its own, which go with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use pvmm_sandbox::Sandbox;
use pvmm_sandbox::denial_log::DenialLog;

use crate::audit::Act;
use crate::blocking::{Blocking, Work};
use crate::error::ApiError;

/// How long one round of questions may take; VMs that are left then are asked in the next.
const BUDGET: Duration = Duration::from_secs(2);
/// The most attempts of one sandbox that a round logs, so that a guest cannot fill the audit log.
const MAX_LOGGED: usize = 20;

/// A sandbox with a network.
pub struct Networked {
    /// The id of the sandbox.
    pub id: String,
    /// The owner's token.
    pub owner: String,
    pub vm: Sandbox,
}

/// The denied attempts of all sandboxes since the server's start.
#[derive(Default)]
pub struct Denials {
    /// The counter that is shown.
    pub total: Counter,
    /// The network processes at the last look, by VM.
    seen: Arc<Mutex<HashMap<String, Seen>>>,
}

struct Seen {
    count: u64,
    log: DenialLog,
}

impl Denials {
    /// Looks at the network processes of all sandboxes. Returns what they have denied since the
    /// last look.
    pub async fn look(
        &self,
        blocking: &Blocking,
        all: Vec<Networked>,
    ) -> Result<Vec<Act>, ApiError> {
        self.read(blocking, move |seen| {
            seen.retain(|id, _| all.iter().any(|one| one.vm.id() == id));
            all
        })
        .await
    }

    /// Looks at the network process of a sandbox that is about to end, for the last time.
    pub async fn look_last(
        &self,
        blocking: &Blocking,
        one: Networked,
    ) -> Result<Vec<Act>, ApiError> {
        let vm = one.vm.id().to_owned();
        let acts = self.read(blocking, move |_| vec![one]).await;
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(&vm);
        acts
    }

    async fn read(
        &self,
        blocking: &Blocking,
        choose: impl FnOnce(&mut HashMap<String, Seen>) -> Vec<Networked> + Send + 'static,
    ) -> Result<Vec<Act>, ApiError> {
        let (seen, total) = (Arc::clone(&self.seen), self.total.clone());
        let ask = move || {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            let deadline = Instant::now() + BUDGET;
            let mut acts = Vec::new();
            for sandbox in choose(&mut seen).iter().take_while(|_| Instant::now() < deadline) {
                let begun = || Seen { count: 0, log: sandbox.vm.denial_log() };
                let last = seen.entry(sandbox.vm.id().to_owned()).or_insert_with(begun);
                if let Some(count) = sandbox.vm.denied() {
                    total.inc_by(added(last.count, count));
                    last.count = count;
                }
                acts.extend(logged(sandbox, last.log.read().unwrap_or_default()));
            }
            Ok(acts)
        };
        blocking.run(Work::Short, ask).await
    }
}

/// Returns the lines of the audit log.
fn logged(sandbox: &Networked, targets: Vec<String>) -> Vec<Act> {
    let left_out = targets.len().saturating_sub(MAX_LOGGED);
    let more = (left_out > 0).then(|| format!("{left_out} more targets"));
    let shown = targets.into_iter().take(MAX_LOGGED).chain(more);
    shown
        .map(|target| {
            let mut act = Act::new("connect", &sandbox.owner, &sandbox.id).what(&target);
            act.denied = Some("the network policy does not allow it".to_owned());
            act
        })
        .collect()
}

/// Returns what a counter has grown by. One that is smaller than before belongs to a new process.
fn added(before: u64, now: u64) -> u64 {
    if before <= now { now - before } else { now }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_that_began_anew_is_added_whole() {
        assert_eq!((added(0, 3), added(3, 5), added(5, 2)), (3, 2, 2));
    }
}
