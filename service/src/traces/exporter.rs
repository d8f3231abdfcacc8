//! Sends spans to a collector, as OTLP over HTTP in JSON.
//!
//! A task of its own sends them in batches. A collector that is slow or gone delays no request:
//! spans that find no room are dropped, and their number is logged.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Uri, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The most spans that wait for the collector.
const QUEUE: usize = 4096;
/// The most spans in one request to it.
const BATCH: usize = 512;
/// How long spans gather before they are sent.
const GATHER: Duration = Duration::from_secs(1);
/// How long the collector may take.
const PATIENCE: Duration = Duration::from_secs(5);
const DEFAULT_PORT: u16 = 4318;

/// The address of a collector.
#[derive(Clone, Debug, PartialEq)]
pub struct Collector {
    authority: String,
    path: String,
}

impl FromStr for Collector {
    type Err = String;

    /// Reads the address of a collector, to which `/v1/traces` is added as its clients do.
    fn from_str(text: &str) -> Result<Self, String> {
        let uri: Uri = text.parse().map_err(|_| "write http://HOST:PORT".to_owned())?;
        let host = uri.host().filter(|host| !host.is_empty());
        match (uri.scheme_str(), host) {
            (Some("http"), Some(host)) => Ok(Self {
                authority: format!("{host}:{}", uri.port_u16().unwrap_or(DEFAULT_PORT)),
                path: format!("{}/v1/traces", uri.path().trim_end_matches('/')),
            }),
            (Some("https"), Some(_)) => {
                Err("TLS is not spoken here: run a collector on this host, which does".to_owned())
            }
            _ => Err("write http://HOST:PORT".to_owned()),
        }
    }
}

/// The way to the task that sends.
#[derive(Debug)]
pub struct Traces {
    spans: mpsc::Sender<Value>,
    dropped: Arc<AtomicU64>,
}

impl Traces {
    /// Starts the task that sends. After `end` is cancelled, it sends what there is and ends.
    pub fn start(
        collector: Collector,
        service: String,
        end: CancellationToken,
    ) -> (Self, JoinHandle<()>) {
        let (sender, spans) = mpsc::channel(QUEUE);
        let dropped = Arc::new(AtomicU64::new(0));
        let exporter = Exporter { collector, service, spans, dropped: Arc::clone(&dropped), end };
        (Self { spans: sender, dropped }, tokio::spawn(exporter.run()))
    }

    pub(super) fn send(&self, span: Value) {
        if self.spans.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

struct Exporter {
    collector: Collector,
    service: String,
    spans: mpsc::Receiver<Value>,
    dropped: Arc<AtomicU64>,
    end: CancellationToken,
}

impl Exporter {
    /// Waits for spans and lets more of them gather. Returns none when there will be no more.
    async fn batch(&mut self) -> Vec<Value> {
        let mut batch = Vec::new();
        tokio::select! {
            _ = self.spans.recv_many(&mut batch, BATCH) => {
                let _ = tokio::time::timeout(GATHER, self.end.cancelled()).await;
            }
            () = self.end.cancelled() => {}
        }
        while batch.len() < BATCH
            && let Ok(span) = self.spans.try_recv()
        {
            batch.push(span);
        }
        batch
    }

    async fn run(mut self) {
        let mut silent = false;
        loop {
            let batch = self.batch().await;
            if batch.is_empty() {
                return;
            }
            let count = batch.len() as u64;
            let text = envelope(&self.service, batch).to_string();
            let sent = tokio::time::timeout(PATIENCE, post(&self.collector, text)).await;
            let failure = match sent {
                Ok(Ok(())) => None,
                Ok(Err(reason)) => Some(reason),
                Err(_) => Some("no answer within 5 s".to_owned()),
            };
            if failure.is_some() {
                self.dropped.fetch_add(count, Ordering::Relaxed);
            }
            // Told once at each change, because a collector may be gone for days.
            if let (false, Some(reason)) = (silent, &failure) {
                log::warn!("traces: {}: {reason}; spans are dropped", self.collector.authority);
            } else if silent && failure.is_none() {
                let dropped = self.dropped.swap(0, Ordering::Relaxed);
                log::warn!("traces: the collector answers again; {dropped} spans were dropped");
            }
            silent = failure.is_some();
        }
    }
}

/// Returns the body of a request with spans.
fn envelope(service: &str, spans: Vec<Value>) -> Value {
    let name = json!({ "key": "service.name", "value": { "stringValue": service } });
    json!({ "resourceSpans": [{
        "resource": { "attributes": [name] },
        "scopeSpans": [{
            "scope": { "name": "pvmm", "version": env!("CARGO_PKG_VERSION") },
            "spans": spans,
        }],
    }] })
}

async fn post(collector: &Collector, text: String) -> Result<(), String> {
    let stream =
        TcpStream::connect(&collector.authority).await.map_err(|error| error.to_string())?;
    let (mut sender, connection) =
        http1::handshake::<_, Body>(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    let connection = tokio::spawn(connection);
    let request = Request::post(&collector.path)
        .header(header::HOST, &collector.authority)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(text))
        .map_err(|error| error.to_string())?;
    let answer = sender.send_request(request).await.map_err(|error| error.to_string());
    connection.abort();
    match answer?.status() {
        status if status.is_success() => Ok(()),
        status => Err(format!("status {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collector_is_a_plain_address_with_the_usual_path_and_port() {
        let collector = |text: &str| text.parse::<Collector>();
        let read = collector("http://127.0.0.1").unwrap();
        assert_eq!((&*read.authority, &*read.path), ("127.0.0.1:4318", "/v1/traces"));
        assert_eq!(collector("http://c:9/otlp/").unwrap().path, "/otlp/v1/traces");
        assert!(collector("https://c").unwrap_err().contains("TLS"));
        for wrong in ["", "c:4318", "ftp://c", "http://"] {
            assert!(collector(wrong).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn spans_without_a_collector_are_dropped_and_the_task_ends() {
        let (collector, end) = ("http://127.0.0.1:9".parse().unwrap(), CancellationToken::new());
        let (traces, task) = Traces::start(collector, "x".into(), end.clone());
        traces.send(json!({}));
        end.cancel();
        task.await.unwrap();
        assert_eq!(traces.dropped.load(Ordering::Relaxed), 1);
    }
}
