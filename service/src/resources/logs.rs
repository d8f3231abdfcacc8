//! `/v1/sandboxes/{id}/logs`: what the guest's console printed, so far or as it comes.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use pvmm_sandbox::Sandbox;
use pvmm_sandbox::log_file::LogReader;
use serde::Deserialize;
use serde_json::json;

use crate::app::{App, Entry};
use crate::blocking::Work;
use crate::error::ApiError;
use crate::extract::{Id, Owner, Queried};
use crate::sse::{self, Events};
use crate::text::Utf8Chunks;

/// How often a followed log is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// The most of a log that one answer has; the log itself is bounded, too.
const MAX_TEXT: u64 = 32 << 20;
/// The longest line of a followed log.
const MAX_LINE: usize = 64 << 10;

/// The query of a request for logs.
#[derive(Debug, Default, Deserialize)]
pub struct Wanted {
    stream: Option<String>,
    follow: Option<String>,
}

impl Wanted {
    pub(super) fn follow(&self) -> Result<bool, ApiError> {
        match self.follow.as_deref() {
            None | Some("" | "0" | "false") => Ok(false),
            Some("1" | "true") => Ok(true),
            Some(_) => Err(ApiError::bad_request("follow: use true or false")),
        }
    }

    /// Returns whether the console is wanted, which counts as standard output.
    fn console(&self) -> Result<bool, ApiError> {
        match self.stream.as_deref() {
            None | Some("" | "both" | "stdout") => Ok(true),
            Some("stderr") => Ok(false),
            Some(_) => Err(ApiError::bad_request("stream: use stdout, stderr or both")),
        }
    }
}

fn whole(vm: &Sandbox) -> Result<Vec<u8>, ApiError> {
    let mut text = Vec::new();
    LogReader::open(&vm.console_log())?.take(MAX_TEXT).read_to_end(&mut text)?;
    Ok(text)
}

/// Splits text into lines as it comes.
#[derive(Default)]
pub(super) struct Lines {
    text: Utf8Chunks,
    rest: String,
}

impl Lines {
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.rest += &self.text.push(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.rest.find('\n') {
            let line: String = self.rest.drain(..=end).collect();
            lines.push(line.trim_end_matches(['\r', '\n']).to_owned());
        }
        if self.rest.len() > MAX_LINE {
            lines.push(std::mem::take(&mut self.rest));
        }
        lines
    }

    /// Returns the last line if it has no end.
    pub(super) fn rest(&mut self) -> Option<String> {
        Some(std::mem::take(&mut self.rest)).filter(|rest| !rest.is_empty())
    }
}

/// Sends lines until the sandbox ends or hibernates, or the client goes away.
fn follow(entry: &Entry, vm: &Sandbox, events: &Events) -> Result<(), ApiError> {
    let mut reader = LogReader::open(&vm.console_log())?;
    let (mut lines, mut buffer) = (Lines::default(), vec![0; 64 << 10]);
    loop {
        // Looked at before reading, so that all that was printed before the end is sent.
        let ended = entry.lock().vm.as_ref().is_none_or(|now| now.id() != vm.id());
        loop {
            let count = reader.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            for line in lines.push(&buffer[..count]) {
                if !events.send("log", &json!({ "line": line })) {
                    return Ok(());
                }
            }
        }
        if ended || events.is_closed() {
            return Ok(());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// `GET /v1/sandboxes/{id}/logs`
pub async fn logs(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
    Queried(wanted): Queried<Wanted>,
) -> Result<Response, ApiError> {
    let (follows, console) = (wanted.follow()?, wanted.console()?);
    let entry = app.find(&id)?;
    // Logs do not wake a sandbox: while it hibernates, it prints nothing.
    let vm = entry.lock().vm.clone().filter(|_| console);
    if follows {
        let (events, response) = sse::events();
        if let Some(vm) = vm {
            let work = move || {
                if let Err(error) = follow(&entry, &vm, &events) {
                    log::warn!("sandbox {id}: its log cannot be read: {}", error.message);
                }
            };
            app.blocking.start(Work::Long, work).await?;
        }
        return Ok(response);
    }
    let text = match vm {
        Some(vm) => app.blocking.run(Work::Short, move || whole(&vm)).await?,
        None => Vec::new(),
    };
    let text = String::from_utf8_lossy(&text).into_owned();
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, plain)], text).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_arrive_whole_however_they_are_cut() {
        let mut lines = Lines::default();
        assert_eq!(lines.push("a\r\nb".as_bytes()), ["a"]);
        assert_eq!(lines.push(&"é\n".as_bytes()[..1]), Vec::<String>::new());
        assert_eq!(lines.push(&"é\n".as_bytes()[1..]), ["bé"]);
        assert_eq!(lines.push(&vec![b'x'; MAX_LINE + 1]).len(), 1);
    }

    #[test]
    fn query_is_read_as_clients_write_it() {
        let wanted = |follow: &str, stream: &str| Wanted {
            follow: Some(follow.to_owned()),
            stream: Some(stream.to_owned()),
        };
        assert_eq!(wanted("1", "both").follow(), Ok(true));
        assert_eq!(wanted("false", "both").follow(), Ok(false));
        assert!(wanted("maybe", "both").follow().is_err());
        assert_eq!(wanted("1", "stderr").console(), Ok(false));
        assert!(wanted("1", "all").console().is_err());
    }
}
