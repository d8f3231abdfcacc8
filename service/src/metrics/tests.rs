//! Tests of the numbers, and of the files that name them.

use std::collections::BTreeSet;

use super::*;

const DOCS: &str = include_str!("../../../docs/operations.md");
const DASHBOARD: &str = include_str!("../../../docs/grafana.json");

fn written(metrics: &Metrics) -> String {
    // A status has no line before its first answer.
    metrics.count_response(200);
    metrics.text(&Sample::of(Vec::new())).unwrap()
}

/// Returns the names that Prometheus has, without those of a histogram's parts.
fn names(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let name = |line: &str| match line.split_once(' ') {
        Some((name, "counter")) => format!("{name}_total"),
        Some((name, _)) => name.to_owned(),
        None => line.to_owned(),
    };
    lines.map(name).collect()
}

/// Returns the words of a text that begin with `pvmm_`.
fn mentioned(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("pvmm_")).map(str::to_owned).collect()
}

#[test]
fn docs_name_every_metric_and_no_other() {
    assert_eq!(mentioned(DOCS), names(&written(&Metrics::default())));
}

#[test]
fn dashboard_shows_every_metric_and_no_other() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let expressions = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let expressions: Vec<_> = expressions.map(|it| it["expr"].as_str().unwrap()).collect();
    let shown: BTreeSet<_> = mentioned(&expressions.join(" "))
        .into_iter()
        .map(|name| name.trim_end_matches("_bucket").to_owned())
        .collect();
    assert_eq!(shown, names(&written(&Metrics::default())));
}

#[tokio::test]
async fn operation_is_counted_by_its_outcome() {
    let metrics = Metrics::default();
    let work = async { Ok(()) };
    metrics.timed(Operation::Fork, work).await.unwrap();
    let failed = async { Err::<(), _>(ApiError::internal("no")) };
    assert!(metrics.timed(Operation::Fork, failed).await.is_err());
    let text = written(&metrics);
    for line in [
        "pvmm_operation_duration_seconds_count{operation=\"fork\"} 1",
        "pvmm_operation_duration_seconds_count{operation=\"exec\"} 0",
        "pvmm_operation_failures_total{operation=\"fork\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}\n{text}");
    }
    let recent: Vec<_> = metrics.recent.list().iter().map(|it| it.succeeded).collect();
    assert_eq!(recent, [true, false]);
}

#[test]
fn end_is_counted_by_its_cause() {
    let metrics = Metrics::default();
    metrics.count_end(Ending::REBOOT);
    metrics.count_end(Ending::TTL_PASSED);
    metrics.count_end("its monitor process is gone");
    let text = written(&metrics);
    for line in ["{cause=\"reset\"} 1", "{cause=\"other\"} 1", "{cause=\"crash\"} 0"] {
        assert!(text.contains(&format!("pvmm_guest_ended_total{line}\n")), "{line}\n{text}");
    }
}
