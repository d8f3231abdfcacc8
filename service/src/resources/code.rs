//! `/v1/sandboxes/{id}/repl/sessions`: interpreters that keep their state between calls.
//!
//! A session belongs to the guest: it survives pause, hibernation and fork under its name.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pvmm::agent::{
    CodeOutput, CodeRequest, Interrupter, Language, MimeBundle, RunStatus, SessionOptions,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::audit::Act;
use crate::blocking::{Work, unless_stopped};
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner, Session, shown};
use crate::life::enter;
use crate::sse;

/// The time limit of code whose request has none.
const DEFAULT_TIME: Duration = Duration::from_secs(3600);
const MAX_TIME_MS: u64 = 86_400_000;

/// The body of a new session.
#[derive(Debug, Default, Deserialize)]
pub struct Open {
    language: Option<String>,
    cwd: Option<String>,
}

/// The body of a run.
#[derive(Clone, Debug, Deserialize)]
pub struct Run {
    code: String,
    timeout_ms: Option<u64>,
}

/// Reads the name of a language.
pub fn language(name: &str) -> Result<Language, ApiError> {
    match &name.to_ascii_lowercase()[..] {
        "python" | "python3" | "py" => Ok(Language::Python),
        "javascript" | "js" | "node" | "nodejs" => Ok(Language::Node),
        _ => Err(ApiError::bad_request(format!(
            "language: '{}' is not supported; use python or javascript",
            shown(name)
        ))),
    }
}

/// Returns the name of a language.
pub fn word(language: Language) -> &'static str {
    match language {
        Language::Python => "python",
        Language::Node => "javascript",
    }
}

/// `POST /v1/sandboxes/{id}/repl/sessions`
pub async fn open(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Open>,
) -> Result<Response, ApiError> {
    let language = language(body.language.as_deref().unwrap_or("python"))?;
    let mut options = SessionOptions::new(language);
    options.cwd = body.cwd.map(String::into_bytes);
    let in_use = enter(&app, &id).await?;
    let begun = Instant::now();
    let work = move || Ok(in_use.agent()?.open_session(&options)?);
    let outcome = app.blocking.run(Work::Long, work).await;
    app.audit.write(&Act::new("open_session", &owner, &id).since(begun).outcome(&outcome));
    let session = json!({ "id": outcome?.session, "language": word(language) });
    Ok((StatusCode::CREATED, axum::Json(session)).into_response())
}

/// `GET /v1/sandboxes/{id}/repl/sessions`
pub async fn list(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
) -> Result<axum::Json<Value>, ApiError> {
    let in_use = enter(&app, &id).await?;
    let work = move || Ok(in_use.agent()?.sessions()?);
    let sessions = app.blocking.run(Work::Short, work).await?;
    let shape = |session: &pvmm::agent::SessionInfo| json!({ "id": session.session, "language": word(session.language), "busy": session.busy });
    Ok(axum::Json(sessions.iter().map(shape).collect()))
}

/// Writes one displayed value as a map of MIME types. Images are base64; JSON is text.
pub fn bundle(bundle: &MimeBundle) -> Value {
    let is_binary = |mime: &str| {
        let image = mime.starts_with("image/") && mime != "image/svg+xml";
        image || mime.starts_with("audio/") || mime.starts_with("video/") || mime.ends_with("/pdf")
    };
    let part = |(mime, data): &(String, Vec<u8>)| {
        let text = if is_binary(mime) {
            STANDARD.encode(data)
        } else {
            String::from_utf8_lossy(data).into_owned()
        };
        (mime.clone(), json!(text))
    };
    // Clients take an object with this key for another form.
    let parts = bundle.parts.iter().filter(|(mime, _)| mime != "type").map(part);
    Value::Object(parts.collect::<Map<_, _>>())
}

/// Returns why the code did not reach its end: its stack trace, or the end of its interpreter.
pub fn failure(output: &CodeOutput) -> Option<String> {
    let died = matches!(output.report.status, RunStatus::Died { .. });
    match &output.error {
        Some(error) if error.traceback.is_empty() => {
            Some(format!("{}: {}", error.name, error.value))
        }
        Some(error) => Some(error.traceback.clone()),
        None if died => Some("the interpreter ended, and the session with it".to_owned()),
        None => None,
    }
}

fn answer(output: &CodeOutput) -> Result<Value, ApiError> {
    if output.report.timed_out {
        let message = "the code ran longer than its time limit, and its session goes on";
        return Err(ApiError::timeout(message));
    }
    let results: Vec<_> = output.displays.iter().chain(&output.result).map(bundle).collect();
    let error = failure(output);
    let exit = i32::from(error.is_some());
    Ok(json!({
        "results": results,
        "stdout": String::from_utf8_lossy(&output.stdout),
        "stderr": String::from_utf8_lossy(&output.stderr),
        "error": error,
        "exit": exit,
        "exit_code": exit,
        "duration_ms": output.report.duration_us / 1000,
        "truncated": output.truncated,
    }))
}

fn late(error: &ApiError) -> Value {
    let message = &error.message;
    json!({ "results": [], "stdout": "", "stderr": "", "error": message, "exit": 1, "exit_code": 1 })
}

/// Runs code in a session to its end, or until `stop`, which interrupts it.
pub async fn run_in_session(
    app: &Arc<App>,
    owner: &str,
    id: &str,
    session: String,
    request: CodeRequest,
    stop: &CancellationToken,
) -> Result<CodeOutput, ApiError> {
    let begun = Instant::now();
    let in_use = enter(app, id).await?;
    let code = request.code.clone();
    let (handle, interrupter) = oneshot::channel();
    let begin = move |interrupter| drop(handle.send(interrupter));
    let call = move || {
        let output = in_use.agent()?.run_code_with(&session, &request, begin);
        output.map_err(|error| in_use.explain(error.into()))
    };
    let work = app.blocking.run(Work::Long, call);
    let interrupt = |interrupter: Interrupter| drop(interrupter.interrupt());
    let outcome = unless_stopped(work, interrupter, stop, interrupt).await;
    let mut act = Act::new("run_code", owner, id).what(&code).since(begun).outcome(&outcome);
    if let Ok(output) = &outcome {
        act = act.exit(output.error.is_some().into());
        act = act.bytes((output.stdout.len() + output.stderr.len()) as u64);
    }
    app.audit.write(&act);
    outcome
}

/// `POST /v1/sandboxes/{id}/repl/sessions/{session}/run`
pub async fn run(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Session(session): Session,
    Json(body): Json<Run>,
) -> Result<Response, ApiError> {
    let timeout = match body.timeout_ms {
        None => DEFAULT_TIME,
        Some(ms) if (1..=MAX_TIME_MS).contains(&ms) => Duration::from_millis(ms),
        Some(_) => return Err(ApiError::bad_request("timeout_ms: use a number up to 86400000")),
    };
    app.find(&id)?;
    let work = async move {
        let request = CodeRequest::new(body.code).timeout(timeout);
        let never = CancellationToken::new();
        answer(&run_in_session(&app, &owner, &id, session, request, &never).await?)
    };
    Ok(sse::slow_json(StatusCode::OK, work, late).await)
}

/// `DELETE /v1/sandboxes/{id}/repl/sessions/{session}`
pub async fn close(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Session(session): Session,
) -> Result<StatusCode, ApiError> {
    let in_use = enter(&app, &id).await?;
    let work = move || Ok(in_use.agent()?.close_session(&session)?);
    let outcome = app.blocking.run(Work::Short, work).await;
    app.audit.write(&Act::new("close_session", &owner, &id).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvmm::agent::{CodeError, RunReport};

    fn output() -> CodeOutput {
        CodeOutput {
            stdout: b"out".to_vec(),
            stderr: Vec::new(),
            displays: Vec::new(),
            result: None,
            error: None,
            report: RunReport {
                status: RunStatus::Ok {},
                timed_out: false,
                stdout: Default::default(),
                stderr: Default::default(),
                dropped: 0,
                duration_us: 5000,
                run: 1,
            },
            truncated: false,
        }
    }

    #[test]
    fn results_are_bundles_in_order() {
        let part = |mime: &str, data: &[u8]| (mime.to_owned(), data.to_vec());
        let chart = MimeBundle { parts: vec![part("image/png", b"\x89PNG"), part("type", b"")] };
        let value = MimeBundle { parts: vec![part("text/plain", b"42")] };
        let output = CodeOutput { displays: vec![chart], result: Some(value), ..output() };
        let answer = answer(&output).unwrap();
        assert_eq!(answer["results"], json!([{ "image/png": "iVBORw==" }, { "text/plain": "42" }]));
        assert_eq!((&answer["exit"], &answer["duration_ms"]), (&json!(0), &json!(5)));
    }

    #[test]
    fn exception_is_an_error_with_exit_one() {
        let name = "ValueError".to_owned();
        let error = CodeError { name, value: "x".to_owned(), traceback: String::new() };
        let answer = answer(&CodeOutput { error: Some(error), ..output() }).unwrap();
        assert_eq!((&answer["error"], &answer["exit"]), (&json!("ValueError: x"), &json!(1)));
    }

    #[test]
    fn timeout_is_an_error_with_that_word() {
        let mut output = output();
        output.report.timed_out = true;
        let error = answer(&output).unwrap_err();
        assert_eq!(error.status, StatusCode::GATEWAY_TIMEOUT);
        assert!(error.message.contains("timeout"));
    }
}
