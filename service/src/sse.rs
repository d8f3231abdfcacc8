//! Answers that are streams: server-sent events, raw bytes, and JSON that takes long.
//!
//! Each stream is a bounded channel, so that a slow client slows its guest and not the server's
//! memory. Silence is broken by comments or spaces, because clients give up after it.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::{self, Stream};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::error::ApiError;
use crate::text::ascii_json;
use crate::traces;

/// The most events or chunks that wait for a client.
const QUEUE: usize = 64;
/// The silence after which a comment is sent; clients wait 30 seconds.
const PING: Duration = Duration::from_secs(8);
/// The time after which the head of a slow answer is sent.
const SLOW: Duration = Duration::from_secs(10);

/// The sending end of a stream of events. It belongs to a thread that may wait.
pub struct Events {
    sender: mpsc::Sender<Bytes>,
}

impl Events {
    /// Sends an event with a JSON object; returns false once the client is gone.
    pub fn send(&self, event: &str, data: &Value) -> bool {
        let text = format!("event: {event}\ndata: {}\n\n", ascii_json(data));
        self.sender.blocking_send(text.into()).is_ok()
    }

    /// Sends a line of text as it is; returns false once the client is gone. Text that clients take
    /// for the end of the stream is changed a little.
    pub fn line(&self, text: &str) -> bool {
        let text = text.replace(['\r', '\n'], " ").replace("event: done", "event:done");
        let text = if text.trim() == "end" { "\"end\"" } else { &text };
        self.sender.blocking_send(format!("data: {text}\n\n").into()).is_ok()
    }

    /// Sends the end of a stream of lines.
    pub fn end(&self) {
        let _ = self.sender.blocking_send(Bytes::from_static(b"event: done\ndata: end\n\n"));
    }

    /// Returns whether the client is gone.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

/// Makes a stream of events and the answer that carries it.
pub fn events() -> (Events, Response) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let body = stream::unfold(receiver, |mut receiver| async move {
        match tokio::time::timeout(PING, receiver.recv()).await {
            Ok(Some(bytes)) => Some((Ok::<_, Infallible>(bytes), receiver)),
            Ok(None) => None,
            Err(_) => Some((Ok(Bytes::from_static(b": ping\n\n")), receiver)),
        }
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (Events { sender }, (headers, Body::from_stream(body)).into_response())
}

/// The sending end of a stream of bytes.
pub type Chunks = mpsc::Sender<std::io::Result<Bytes>>;

/// Makes a stream of bytes and its body. An error in it cuts the answer short, which clients
/// notice.
pub fn chunks() -> (Chunks, Body) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    (sender, Body::from_stream(received(receiver)))
}

fn received<T: Send>(receiver: mpsc::Receiver<T>) -> impl Stream<Item = T> {
    stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|item| (item, receiver))
    })
}

/// Answers with JSON that may take long. After some seconds the head and then spaces are sent,
/// which are legal before JSON; from then on a failure can only be told inside, by `late`.
pub async fn slow_json(
    status: StatusCode,
    work: impl Future<Output = Result<Value, ApiError>> + Send + 'static,
    late: impl Fn(&ApiError) -> Value + Send + 'static,
) -> Response {
    let mut task = tokio::spawn(traces::carried(work));
    let failed = |_| Err(ApiError::internal("the server failed at this request"));
    match tokio::time::timeout(SLOW, &mut task).await {
        Ok(done) => match done.unwrap_or_else(failed) {
            Ok(value) => (status, axum::Json(value)).into_response(),
            Err(error) => error.into_response(),
        },
        Err(_) => {
            let body = stream::unfold(Some((task, late)), move |waiting| async move {
                let (mut task, late) = waiting?;
                match tokio::time::timeout(PING, &mut task).await {
                    Ok(done) => {
                        let value = done.unwrap_or_else(failed).unwrap_or_else(|e| late(&e));
                        Some((Ok::<_, Infallible>(Bytes::from(value.to_string())), None))
                    }
                    Err(_) => Some((Ok(Bytes::from_static(b" ")), Some((task, late)))),
                }
            });
            let json = HeaderValue::from_static("application/json");
            (status, [(header::CONTENT_TYPE, json)], Body::from_stream(body)).into_response()
        }
    }
}
