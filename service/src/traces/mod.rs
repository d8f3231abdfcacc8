//! Traces for OpenTelemetry: a span for each request and, below it, one for each operation on a
//! sandbox.
//!
//! A request that names a trace (`traceparent`, W3C Trace Context) becomes a part of it; one that
//! says that its trace is not recorded is not recorded here either. Spans have the path as the
//! router knows it, and no bodies, queries or tokens.

mod exporter;

use std::future::Future;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

pub use exporter::{Collector, Traces};

use crate::ids;

/// The kinds of spans, as OTLP numbers them.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;
/// The status of a span that failed, as OTLP numbers it.
const ERROR: u8 = 2;

/// The place of a span in a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Context {
    trace: String,
    span: String,
    parent: Option<String>,
}

tokio::task_local! {
    static REQUEST: Context;
}

impl Context {
    /// Returns the place of a request's span; none if its sender does not record the trace, or if
    /// there are no random numbers.
    pub fn of_request(traceparent: Option<&str>) -> Option<Self> {
        let span = ids::random_hex::<8>().ok()?;
        match traceparent.and_then(parse) {
            Some((_, _, false)) => None,
            Some((trace, parent, true)) => {
                Some(Self { trace: trace.into(), span, parent: Some(parent.into()) })
            }
            None => Some(Self { trace: ids::random_hex::<16>().ok()?, span, parent: None }),
        }
    }

    /// Returns the id of the trace.
    pub fn trace(&self) -> &str {
        &self.trace
    }

    /// Runs the handling of the request, so that operations in it are spans below its own.
    pub async fn scope<T>(self, work: impl Future<Output = T>) -> T {
        REQUEST.scope(self, work).await
    }
}

/// Takes the trace of the present request along into work that becomes a task of its own.
pub fn carried<T>(work: impl Future<Output = T>) -> impl Future<Output = T> {
    let context = REQUEST.try_with(Context::clone).ok();
    async move {
        match context {
            Some(context) => context.scope(work).await,
            None => work.await,
        }
    }
}

/// Returns trace, span and whether the trace is recorded, of a `traceparent` of version 00.
fn parse(text: &str) -> Option<(&str, &str, bool)> {
    let mut parts = text.trim().splitn(4, '-');
    let (version, trace, span, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_id = |text: &str, length| {
        let hex = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        text.len() == length && hex && text.bytes().any(|byte| byte != b'0')
    };
    if version != "00" || !is_id(trace, 32) || !is_id(span, 16) || flags.len() != 2 {
        return None;
    }
    let flags = u8::from_str_radix(flags, 16).ok()?;
    Some((trace, span, flags & 1 == 1))
}

/// An answered request.
pub struct Answered<'a> {
    pub method: &'a str,
    /// The path as the router knows it.
    pub route: &'a str,
    pub status: u16,
    pub sandbox: Option<&'a str>,
    pub took: Duration,
}

impl Traces {
    /// Adds the span of a request.
    pub fn request(&self, context: &Context, answered: &Answered<'_>) {
        let mut attributes = vec![
            text("http.request.method", answered.method),
            text("http.route", answered.route),
            json!({
                "key": "http.response.status_code",
                "value": { "intValue": answered.status.to_string() },
            }),
        ];
        attributes.extend(answered.sandbox.map(|id| text("pvmm.sandbox", id)));
        let name = format!("{} {}", answered.method, answered.route);
        let failed = answered.status >= 500;
        let mut span = span(context, &name, SERVER, answered.took, failed);
        span["attributes"] = attributes.into();
        self.send(span);
    }

    /// Adds the span of an operation that ends now, below the request that it belongs to. An
    /// operation of the server itself, such as a hibernation, is not part of a trace.
    pub fn operation(&self, name: &str, took: Duration, succeeded: bool) {
        let Ok(request) = REQUEST.try_with(Context::clone) else { return };
        let Ok(id) = ids::random_hex::<8>() else { return };
        let context = Context { trace: request.trace, span: id, parent: Some(request.span) };
        self.send(span(&context, name, INTERNAL, took, !succeeded));
    }
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

/// Returns a span that ends now, in the form of OTLP.
fn span(context: &Context, name: &str, kind: u8, took: Duration, failed: bool) -> Value {
    let end = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let begin = end.saturating_sub(took);
    let mut span = json!({
        "traceId": context.trace,
        "spanId": context.span,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": begin.as_nanos().to_string(),
        "endTimeUnixNano": end.as_nanos().to_string(),
        "status": if failed { json!({ "code": ERROR }) } else { json!({}) },
    });
    if let Some(parent) = &context.parent {
        span["parentSpanId"] = parent.as_str().into();
    }
    span
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    #[test]
    fn request_joins_the_trace_that_it_names() {
        let context = Context::of_request(Some(&format!("00-{TRACE}-{SPAN}-01"))).unwrap();
        assert_eq!((context.trace(), context.parent.as_deref()), (TRACE, Some(SPAN)));
        assert_eq!(Context::of_request(Some(&format!("00-{TRACE}-{SPAN}-00"))), None);
    }

    #[test]
    fn request_with_a_wrong_name_begins_a_trace() {
        let zeros = "0".repeat(32);
        for wrong in [
            "".into(),
            "00".into(),
            format!("00-{zeros}-{SPAN}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-zz"),
            format!("00-{TRACE}-{SPAN}-01-more"),
        ] {
            let context = Context::of_request(Some(&wrong)).unwrap();
            assert!(context.parent.is_none() && context.trace != TRACE, "{wrong}");
        }
    }

    #[tokio::test]
    async fn task_of_its_own_stays_in_the_trace_of_its_request() {
        let context = Context::of_request(None).unwrap();
        let trace = context.trace.clone();
        let work = async { REQUEST.with(|context| context.trace.clone()) };
        let task = context.scope(async { tokio::spawn(carried(work)).await });
        assert_eq!(task.await.unwrap(), trace);
    }
}
