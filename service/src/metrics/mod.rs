//! Numbers for operators, in the form that Prometheus reads.
//!
//! Counters and histograms are counted where the acts are; gauges are read when someone asks.
//! `docs/operations.md` and `docs/grafana.json` name them, and a test holds both against the names
//! here.

mod denials;
mod recent;
mod sample;

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use pvmm_sandbox::vm_dir::Ending;

use crate::clock;
use crate::error::ApiError;
use crate::store::State;
use crate::traces::Traces;

pub use denials::{Denials, Networked};
pub use recent::{Recent, Timing};
pub use sample::{Sample, Sampler, Seen};

/// The media type of the text.
pub const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// An act whose duration is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Create,
    Fork,
    Exec,
    Checkpoint,
    Rollback,
    Hibernate,
    Wake,
}

impl Operation {
    const ALL: [Self; 7] = [
        Self::Create,
        Self::Fork,
        Self::Exec,
        Self::Checkpoint,
        Self::Rollback,
        Self::Hibernate,
        Self::Wake,
    ];

    /// Returns the operation in one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Fork => "fork",
            Self::Exec => "exec",
            Self::Checkpoint => "checkpoint",
            Self::Rollback => "rollback",
            Self::Hibernate => "hibernate",
            Self::Wake => "wake",
        }
    }
}

/// One label and its value.
type Label<T> = [(&'static str, T); 1];

/// A histogram whose buckets double from half a millisecond to more than an hour.
fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 24))
}

/// The numbers of a server.
pub struct Metrics {
    registry: Registry,
    durations: Family<Label<&'static str>, Histogram, fn() -> Histogram>,
    failures: Family<Label<&'static str>, Counter>,
    responses: Family<Label<u16>, Counter>,
    sandboxes: Family<Label<&'static str>, Gauge>,
    forked: Gauge,
    private: Gauge<u64, AtomicU64>,
    shared: Gauge<u64, AtomicU64>,
    unmeasured: Gauge,
    ended: Family<Label<&'static str>, Counter>,
    /// Attempts to reach the network that were denied.
    pub denials: Denials,
    /// The last durations, for the page.
    pub recent: Recent,
    /// The spans of requests and operations, if there is a collector.
    pub traces: Option<Traces>,
    /// Memory and processor time of sandboxes.
    pub sampler: Sampler,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            durations: Family::new_with_constructor(histogram),
            failures: Family::default(),
            responses: Family::default(),
            sandboxes: Family::default(),
            forked: Gauge::default(),
            private: Gauge::default(),
            shared: Gauge::default(),
            unmeasured: Gauge::default(),
            ended: Family::default(),
            denials: Denials::default(),
            recent: Recent::default(),
            traces: None,
            sampler: Sampler::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let of = &mut self.registry;
        of.register(
            "pvmm_operation_duration_seconds",
            "Time that an operation took, without those that failed",
            self.durations.clone(),
        );
        of.register(
            "pvmm_operation_failures",
            "Operations that were begun and failed",
            self.failures.clone(),
        );
        of.register("pvmm_responses", "Answers by their status", self.responses.clone());
        of.register("pvmm_sandboxes", "Sandboxes by their state", self.sandboxes.clone());
        let forked = "Sandboxes that were forked from another";
        of.register("pvmm_sandboxes_forked", forked, self.forked.clone());
        of.register(
            "pvmm_memory_private_bytes",
            "Host memory that only one sandbox has, summed over running ones",
            self.private.clone(),
        );
        of.register(
            "pvmm_memory_shared_bytes",
            "Host memory that a sandbox shares, summed over running ones",
            self.shared.clone(),
        );
        of.register(
            "pvmm_sandboxes_unmeasured",
            "Running sandboxes whose memory could not be read in time",
            self.unmeasured.clone(),
        );
        of.register(
            "pvmm_guest_ended",
            "Guests that ended by themselves, by cause",
            self.ended.clone(),
        );
        of.register(
            "pvmm_egress_denied",
            "Attempts of guests to reach the network that were denied",
            self.denials.total.clone(),
        );
        // A graph begins at zero, and not at the first act.
        for operation in Operation::ALL {
            drop(self.durations.get_or_create(&[("operation", operation.word())]));
            drop(self.failures.get_or_create(&[("operation", operation.word())]));
        }
        for cause in ["reset", "crash", "poweroff", "other"] {
            drop(self.ended.get_or_create(&[("cause", cause)]));
        }
    }

    /// Notes the end of an operation that took `took`.
    pub fn note(&self, operation: Operation, took: Duration, succeeded: bool) {
        let label = [("operation", operation.word())];
        if succeeded {
            self.durations.get_or_create(&label).observe(took.as_secs_f64());
        } else {
            self.failures.get_or_create(&label).inc();
        }
        if let Some(traces) = &self.traces {
            traces.operation(operation.word(), took, succeeded);
        }
        self.recent.push(Timing { time_ms: clock::now_ms(), operation, took, succeeded });
    }

    /// Measures an operation. A caller that goes away before its end is not counted.
    pub async fn timed<T>(
        &self,
        operation: Operation,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let begun = Instant::now();
        let outcome = work.await;
        self.note(operation, begun.elapsed(), outcome.is_ok());
        outcome
    }

    /// Counts an answer.
    pub fn count_response(&self, status: u16) {
        self.responses.get_or_create(&[("status", status)]).inc();
    }

    /// Counts a guest that ended by itself; `reason` is that of its VM.
    pub fn count_end(&self, reason: &str) {
        let cause = match reason {
            Ending::REBOOT => "reset",
            Ending::TRIPLE_FAULT => "crash",
            Ending::POWEROFF => "poweroff",
            // The server has asked for it.
            Ending::TTL_PASSED => return,
            _ => "other",
        };
        self.ended.get_or_create(&[("cause", cause)]).inc();
    }

    /// Writes all numbers, with the gauges as they are in `sample`.
    pub fn text(&self, sample: &Sample) -> Result<String, ApiError> {
        for state in [State::Running, State::Paused, State::Hibernated, State::Failed] {
            let count = sample.sandboxes.iter().filter(|it| it.row.state == state).count();
            self.sandboxes.get_or_create(&[("state", state.word())]).set(count as i64);
        }
        let forked = sample.sandboxes.iter().filter(|it| it.row.parent.is_some()).count();
        self.forked.set(forked as i64);
        let usages = || sample.sandboxes.iter().filter_map(|it| it.usage);
        self.private.set(usages().map(|usage| usage.private).sum());
        self.shared.set(usages().map(|usage| usage.shared).sum());
        let running = sample.sandboxes.iter().filter(|it| it.row.vm.is_some()).count();
        self.unmeasured.set(running.saturating_sub(usages().count()) as i64);
        let mut text = String::new();
        encode(&mut text, &self.registry).map_err(|e| ApiError::internal(e.to_string()))?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests;
