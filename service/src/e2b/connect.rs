//! Calls as Connect frames them, in JSON: single messages, and streams of messages in envelopes.
//!
//! An envelope is a byte of flags, a length in four bytes, and a message. The last one of a stream
//! has a flag of its own and says how the stream ended.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::{Buf, Bytes, BytesMut};
use futures_util::stream;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::extract::collect;

use super::error::CallError;

/// The largest message of a client.
const MAX_MESSAGE: usize = 4 << 20;
/// The bytes before a message.
const HEAD: usize = 5;
/// The flag of a message that is compressed, which none may be.
const COMPRESSED: u8 = 1;
/// The flag of the last message.
const LAST: u8 = 2;
/// The messages that wait for a client.
const QUEUE: usize = 64;
/// How long a client may pause within a stream that it sends.
const STALL: Duration = Duration::from_secs(120);
/// The content type of a stream.
const STREAM: &str = "application/connect+json";
/// The longest time limit of a call.
const MAX_TIME: Duration = Duration::from_secs(30 * 86_400);

fn envelope(flags: u8, message: &Value) -> Bytes {
    let text = message.to_string();
    let mut bytes = Vec::with_capacity(HEAD + text.len());
    bytes.push(flags);
    // A message is made of one chunk of output or one event, far below four gigabytes.
    bytes.extend_from_slice(&(u32::try_from(text.len()).unwrap_or(u32::MAX)).to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes.into()
}

fn last(outcome: Result<(), CallError>) -> Bytes {
    let message = match outcome {
        Ok(()) => json!({}),
        Err(error) => json!({ "error": error.json() }),
    };
    envelope(LAST, &message)
}

fn bad(message: impl Into<String>) -> CallError {
    CallError::new("invalid_argument", message)
}

/// Reads the message of a call that is not a stream.
fn message<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CallError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    serde_json::from_slice(bytes).map_err(|error| bad(format!("the message: {error}")))
}

/// The message of a call that is not a stream.
pub struct Message<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Message<T> {
    type Rejection = CallError;

    async fn from_request(request: Request, _: &S) -> Result<Self, CallError> {
        message(&collect(request.into_body(), MAX_MESSAGE).await?).map(Self)
    }
}

/// Returns the time limit that a client has set for a call.
pub fn time_limit(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("connect-timeout-ms")?.to_str().ok()?;
    let ms = text.parse().ok().filter(|ms| *ms > 0)?;
    Some(Duration::from_millis(ms).min(MAX_TIME))
}

/// Returns how often a client wants a sign of life within a stream.
pub fn ping_interval(headers: &HeaderMap) -> Duration {
    let wanted = headers.get("keepalive-ping-interval").and_then(|value| value.to_str().ok());
    let seconds = wanted.and_then(|text| text.parse().ok()).unwrap_or(50);
    Duration::from_secs(u64::clamp(seconds, 5, 300))
}

/// Takes the envelopes of a stream apart, in pieces of any size.
#[derive(Default)]
pub struct Envelopes {
    buffer: BytesMut,
}

impl Envelopes {
    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next complete message; `None` if more bytes are needed.
    pub fn next(&mut self) -> Result<Option<Bytes>, CallError> {
        loop {
            let Some(head) = self.buffer.first_chunk::<HEAD>() else { return Ok(None) };
            let [flags, length @ ..] = *head;
            let length = u32::from_be_bytes(length) as usize;
            if length > MAX_MESSAGE {
                return Err(CallError::new("resource_exhausted", "a message is above 4 MiB"));
            }
            if flags & COMPRESSED != 0 {
                return Err(CallError::new("unimplemented", "a message is compressed"));
            }
            if self.buffer.len() < HEAD + length {
                return Ok(None);
            }
            self.buffer.advance(HEAD);
            let message = self.buffer.split_to(length).freeze();
            if flags & LAST == 0 {
                return Ok(Some(message));
            }
        }
    }
}

/// The messages that a client sends as a stream.
pub struct Incoming {
    body: Body,
    envelopes: Envelopes,
}

impl Incoming {
    /// Begins to read a body.
    pub fn new(body: Body) -> Self {
        Self { body, envelopes: Envelopes::default() }
    }

    /// Waits for the next message; `None` at the end.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, CallError> {
        loop {
            if let Some(bytes) = self.envelopes.next()? {
                return message(&bytes).map(Some);
            }
            match tokio::time::timeout(STALL, self.body.frame()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => {
                    if let Ok(bytes) = frame.into_data() {
                        self.envelopes.push(&bytes);
                    }
                }
                Ok(Some(Err(_))) => return Err(bad("the body was cut short")),
                Err(_) => return Err(bad("the body took too long")),
            }
        }
    }

    /// Waits for the one message of a call whose answer is a stream.
    pub async fn only<T: DeserializeOwned>(&mut self) -> Result<T, CallError> {
        self.next().await?.ok_or_else(|| bad("the stream has no message"))
    }
}

/// The sending end of a stream of messages. It belongs to a thread that may wait.
pub struct Outgoing {
    sender: mpsc::Sender<Bytes>,
}

impl Outgoing {
    /// Sends a message; returns false once the client is gone.
    pub fn send(&self, message: &Value) -> bool {
        self.sender.blocking_send(envelope(0, message)).is_ok()
    }

    /// Ends the stream.
    pub fn end(self, outcome: Result<(), CallError>) {
        let _ = self.sender.blocking_send(last(outcome));
    }

    /// Returns whether the client is gone.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

fn response(body: Body) -> Response {
    let kind = HeaderValue::from_static(STREAM);
    (StatusCode::OK, [(header::CONTENT_TYPE, kind)], body).into_response()
}

/// Makes a stream of messages and the answer that carries it.
pub fn outgoing() -> (Outgoing, Response) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let body = stream::unfold(receiver, |mut receiver: mpsc::Receiver<Bytes>| async move {
        receiver.recv().await.map(|bytes| (Ok::<_, Infallible>(bytes), receiver))
    });
    (Outgoing { sender }, response(Body::from_stream(body)))
}

/// Answers a call of streams with its one message or its error.
pub fn streamed(outcome: Result<Value, CallError>) -> Response {
    let (mut bytes, outcome) = match outcome {
        Ok(message) => (envelope(0, &message).to_vec(), Ok(())),
        Err(error) => (Vec::new(), Err(error)),
    };
    bytes.extend_from_slice(&last(outcome));
    response(Body::from(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_in_pieces_of_any_size_give_their_messages() {
        let mut bytes = envelope(0, &json!({ "a": 1 })).to_vec();
        bytes.extend_from_slice(&envelope(0, &json!("two")));
        bytes.extend_from_slice(&last(Ok(())));
        for size in [1, 2, 5, 7, bytes.len()] {
            let (mut envelopes, mut messages) = (Envelopes::default(), Vec::new());
            for piece in bytes.chunks(size) {
                envelopes.push(piece);
                while let Some(bytes) = envelopes.next().unwrap() {
                    messages.push(message::<Value>(&bytes).unwrap());
                }
            }
            assert_eq!(messages, [json!({ "a": 1 }), json!("two")], "{size}");
        }
    }

    #[test]
    fn envelope_that_is_too_long_or_compressed_is_refused() {
        for head in [[0, 0xff, 0xff, 0xff, 0xff], [1, 0, 0, 0, 1]] {
            let mut envelopes = Envelopes::default();
            envelopes.push(&head);
            assert!(envelopes.next().is_err());
        }
        assert!(message::<Value>(b"{").is_err());
        assert_eq!(message::<Value>(b"").unwrap(), json!({}));
    }

    #[test]
    fn end_of_a_stream_says_how_it_ended() {
        assert_eq!(&last(Ok(()))[..], b"\x02\0\0\0\x02{}");
        let error = last(Err(CallError::new("not_found", "x")));
        assert_eq!(&error[HEAD..], br#"{"error":{"code":"not_found","message":"x"}}"#);
    }

    #[test]
    fn time_limit_of_zero_is_none() {
        let limit = |text: &'static str| {
            let value = HeaderValue::from_static(text);
            time_limit(&HeaderMap::from_iter([("connect-timeout-ms".parse().unwrap(), value)]))
        };
        assert_eq!(limit("1500"), Some(Duration::from_millis(1500)));
        assert_eq!(limit("99999999999999"), Some(MAX_TIME));
        for text in ["0", "-1", "x", ""] {
            assert_eq!(limit(text), None, "{text}");
        }
    }
}
