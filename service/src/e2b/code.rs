//! The code interpreter: `/execute` as lines of JSON, and `/contexts`.
//!
//! A context is a session of the guest. Code without a context runs in a session that all such
//! code of a language shares.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use pvmm::agent::{
    Agent, CodeEvent, CodeRequest, Language, MimeBundle, RunStatus, SessionInfo, SessionOptions,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use crate::audit::Act;
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Owner, Session, shown};
use crate::life::{InUse, enter};
use crate::resources::code::{bundle, language, word};
use crate::text::{Utf8Chunks, ascii_json};

use super::error::{Checked, CheckedJson, Refused};
use super::state::{Door, Target};

/// The longest time of code; the clients end it sooner.
const MAX_TIME: Duration = Duration::from_secs(86_400);
/// How often silent code is looked at, for a client that is gone.
const TICK: Duration = Duration::from_secs(1);
/// The lines that wait for a client.
const QUEUE: usize = 64;
/// The directory of a session that was not given one.
const HOME: &str = "/root";

/// The body of `/execute`.
#[derive(Clone, Debug, Deserialize)]
pub struct Execute {
    code: String,
    context_id: Option<String>,
    language: Option<String>,
    env_vars: Option<BTreeMap<String, String>>,
}

/// The body of a new context.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    language: Option<String>,
    cwd: Option<String>,
}

/// The sending end of the lines.
struct Lines {
    sender: mpsc::Sender<Bytes>,
}

impl Lines {
    fn send(&self, line: &Value) -> bool {
        // Some clients end a line at other characters than a newline.
        let text = format!("{}\n", ascii_json(line));
        self.sender.blocking_send(text.into()).is_ok()
    }

    fn text(&self, kind: &str, text: &str) -> bool {
        let timestamp = clock::now_ms().saturating_mul(1_000_000);
        text.is_empty() || self.send(&json!({ "type": kind, "text": text, "timestamp": timestamp }))
    }
}

/// Writes a displayed value as the clients read it.
fn result(value: &MimeBundle, main: bool) -> Value {
    let (mut result, mut extra) = (Map::new(), Map::new());
    if let Value::Object(parts) = bundle(value) {
        for (mime, data) in parts {
            let name = match &mime[..] {
                "text/plain" => "text",
                "text/html" => "html",
                "text/markdown" => "markdown",
                "text/latex" => "latex",
                "image/svg+xml" => "svg",
                "image/png" => "png",
                "image/jpeg" => "jpeg",
                "application/pdf" => "pdf",
                "application/javascript" => "javascript",
                "application/json" => {
                    let text = data.as_str().unwrap_or_default();
                    let parsed = serde_json::from_str(text).unwrap_or(data);
                    result.insert("json".to_owned(), parsed);
                    continue;
                }
                _ => {
                    extra.insert(mime, data);
                    continue;
                }
            };
            result.insert(name.to_owned(), data);
        }
    }
    if !extra.is_empty() {
        result.insert("extra".to_owned(), Value::Object(extra));
    }
    result.insert("type".to_owned(), json!("result"));
    result.insert("is_main_result".to_owned(), json!(main));
    Value::Object(result)
}

/// Returns code that sets variables of the environment, or puts back what they were.
fn environment(language: Language, env: &BTreeMap<String, String>, back: bool) -> String {
    // JSON in ASCII, as a string of JSON, is also a literal of both languages.
    let text = json!(ascii_json(&json!(env))).to_string();
    match (language, back) {
        (Language::Python, false) => format!(
            "def __pvmm_env(new):\n    import os\n    \
             old = {{k: os.environ.get(k) for k in new}}\n    \
             os.environ.update(new)\n    return old\n\
             __pvmm_old = __pvmm_env(__import__('json').loads({text}))\n"
        ),
        (Language::Python, true) => "def __pvmm_env(old):\n    import os\n    \
             for k, v in old.items():\n        \
             os.environ.pop(k, None) if v is None else os.environ.update({k: v})\n\
             __pvmm_env(globals().get('__pvmm_old', {}))\ndel __pvmm_env, __pvmm_old\n"
            .to_owned(),
        (Language::Node, false) => format!(
            "globalThis.__pvmmOld = {{}}; for (const [k, v] of Object.entries(JSON.parse({text}))) \
             {{ globalThis.__pvmmOld[k] = process.env[k]; process.env[k] = v }}; undefined"
        ),
        (Language::Node, true) => {
            "for (const [k, v] of Object.entries(globalThis.__pvmmOld || {})) \
             { if (v === undefined) delete process.env[k]; else process.env[k] = v }; \
             delete globalThis.__pvmmOld; undefined"
                .to_owned()
        }
    }
}

/// Runs code and sends what it shows, until it ends or the client goes away.
fn run(
    agent: &Agent,
    session: &SessionInfo,
    body: &Execute,
    lines: &Lines,
) -> Result<bool, ApiError> {
    let env = body.env_vars.clone().unwrap_or_default();
    if !env.is_empty() {
        let code = environment(session.language, &env, false);
        agent.run_code(&session.session, &CodeRequest::new(code).timeout(MAX_TIME))?;
    }
    let outcome = follow(agent, &session.session, &body.code, lines);
    if !env.is_empty() {
        let code = environment(session.language, &env, true);
        agent.run_code(&session.session, &CodeRequest::new(code).timeout(MAX_TIME))?;
    }
    outcome
}

fn follow(agent: &Agent, session: &str, code: &str, lines: &Lines) -> Result<bool, ApiError> {
    let mut run = agent.start_code(session, &CodeRequest::new(code).timeout(MAX_TIME))?;
    let (mut stdout, mut stderr) = (Utf8Chunks::default(), Utf8Chunks::default());
    let mut failed = false;
    loop {
        let open = match run.next_event(Some(Instant::now() + TICK))? {
            Some(CodeEvent::Stdout(bytes)) => lines.text("stdout", &stdout.push(&bytes)),
            Some(CodeEvent::Stderr(bytes)) => lines.text("stderr", &stderr.push(&bytes)),
            Some(CodeEvent::Display(value)) => lines.send(&result(&value, false)),
            Some(CodeEvent::Result(value)) => lines.send(&result(&value, true)),
            Some(CodeEvent::Error(error)) => {
                failed = true;
                lines.send(&problem(&error.name, &error.value, &error.traceback))
            }
            Some(CodeEvent::Ended(report)) => {
                lines.text("stdout", &stdout.finish());
                lines.text("stderr", &stderr.finish());
                if !failed && report.timed_out {
                    lines.send(&problem("TimeoutError", "the code ran too long", ""));
                } else if !failed && matches!(report.status, RunStatus::Died { .. }) {
                    let value = "the interpreter ended, and the context with it";
                    lines.send(&problem("ContextEnded", value, ""));
                }
                let count = report.run;
                lines.send(&json!({ "type": "number_of_executions", "execution_count": count }));
                lines.send(&json!({ "type": "end_of_execution" }));
                return Ok(!failed);
            }
            None => !lines.sender.is_closed(),
        };
        if !open {
            // Dropping the run interrupts the code.
            return Ok(false);
        }
    }
}

fn problem(name: &str, value: &str, traceback: &str) -> Value {
    json!({ "type": "error", "name": name, "value": value, "traceback": traceback })
}

fn options(in_use: &InUse, language: Language, cwd: Option<&str>) -> SessionOptions {
    let bytes = |text: &str| text.as_bytes().to_vec();
    let env = in_use.row().env;
    SessionOptions {
        cwd: Some(bytes(cwd.unwrap_or(HOME))),
        env: env.iter().map(|(name, value)| (bytes(name), bytes(value))).collect(),
        ..SessionOptions::new(language)
    }
}

fn find(agent: &Agent, id: &str) -> Result<SessionInfo, ApiError> {
    let found = agent.sessions()?.into_iter().find(|session| session.session == id);
    found.ok_or_else(|| ApiError::not_found(format!("context '{}' not found", shown(id))))
}

/// Returns the session of a request. Waits.
fn session(in_use: &InUse, agent: &Agent, body: &Execute) -> Result<SessionInfo, ApiError> {
    if let Some(id) = &body.context_id {
        return find(agent, id);
    }
    let language = language(body.language.as_deref().unwrap_or("python"))?;
    let name = Some(format!("e2b-{}", word(language)));
    let options = SessionOptions { name, reuse: true, ..options(in_use, language, None) };
    Ok(agent.open_session(&options)?)
}

/// `POST /execute`
pub async fn execute(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    CheckedJson(body): CheckedJson<Execute>,
) -> Result<Response, Refused> {
    let begun = Instant::now();
    let in_use = enter(&door.app, &id).await?;
    let wanted = body.clone();
    let prepare = move || {
        let agent = in_use.agent()?;
        let session = session(&in_use, &agent, &wanted)?;
        Ok((in_use, agent, session))
    };
    let (in_use, agent, session) = door.app.blocking.run(Work::Long, prepare).await?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    let shared = Arc::clone(&door.app);
    let work = move || {
        let lines = Lines { sender };
        let outcome = run(&agent, &session, &body, &lines).map_err(|error| in_use.explain(error));
        if let Err(error) = &outcome {
            lines.send(&problem("SandboxError", &error.message, ""));
        }
        let act = Act::new("run_code", &owner, &id).what(&body.code).since(begun);
        let act = act.exit(i64::from(!matches!(outcome, Ok(true)))).outcome(&outcome);
        shared.audit.write(&act);
        drop(in_use);
    };
    door.app.blocking.start(Work::Long, work).await?;
    let body = stream::unfold(receiver, |mut receiver: mpsc::Receiver<Bytes>| async move {
        receiver.recv().await.map(|bytes| (Ok::<_, Infallible>(bytes), receiver))
    });
    let kind = HeaderValue::from_static("application/x-ndjson");
    Ok(([(header::CONTENT_TYPE, kind)], Body::from_stream(body)).into_response())
}

/// Writes a context as the clients read it. Its directory is where its interpreter is now.
fn shape(agent: &Agent, session: &SessionInfo) -> Value {
    let link = agent.stat(format!("/proc/{}/cwd", session.pid), false);
    let target = link.ok().and_then(|metadata| metadata.target);
    let cwd = target.map_or(HOME.to_owned(), |cwd| String::from_utf8_lossy(&cwd).into_owned());
    json!({ "id": session.session, "language": word(session.language), "cwd": cwd })
}

async fn in_guest<T: Send + 'static>(
    door: &Door,
    id: &str,
    call: impl FnOnce(&InUse, &Agent) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, Refused> {
    let in_use = enter(&door.app, id).await?;
    let call = move || call(&in_use, &in_use.agent()?);
    Ok(door.app.blocking.run(Work::Long, call).await?)
}

/// `POST /contexts`
pub async fn create(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    CheckedJson(body): CheckedJson<Create>,
) -> Result<axum::Json<Value>, Refused> {
    let language = language(body.language.as_deref().unwrap_or("python"))?;
    let call = move |in_use: &InUse, agent: &Agent| {
        let session = agent.open_session(&options(in_use, language, body.cwd.as_deref()))?;
        Ok(shape(agent, &session))
    };
    let context = in_guest(&door, &id, call).await?;
    door.app.audit.write(&Act::new("open_session", &owner, &id));
    Ok(axum::Json(context))
}

/// `GET /contexts`
pub async fn list(
    State(door): State<Arc<Door>>,
    Target(id): Target,
) -> Result<axum::Json<Value>, Refused> {
    let call = |_: &InUse, agent: &Agent| {
        Ok(agent.sessions()?.iter().map(|session| shape(agent, session)).collect())
    };
    Ok(axum::Json(Value::Array(in_guest(&door, &id, call).await?)))
}

/// `DELETE /contexts/{session}`
pub async fn remove(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    Checked(Session(session)): Checked<Session>,
) -> Result<StatusCode, Refused> {
    let call = move |_: &InUse, agent: &Agent| {
        find(agent, &session)?;
        Ok(agent.close_session(&session)?)
    };
    in_guest(&door, &id, call).await?;
    door.app.audit.write(&Act::new("close_session", &owner, &id));
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /contexts/{session}/restart`
pub async fn restart(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    Checked(Session(name)): Checked<Session>,
) -> Result<StatusCode, Refused> {
    let call = move |in_use: &InUse, agent: &Agent| {
        let session = find(agent, &name)?;
        let cwd = shape(agent, &session)["cwd"].as_str().map(str::to_owned);
        agent.close_session(&name)?;
        let options = options(in_use, session.language, cwd.as_deref());
        agent.open_session(&SessionOptions { name: Some(name), reuse: true, ..options })?;
        Ok(())
    };
    in_guest(&door, &id, call).await?;
    door.app.audit.write(&Act::new("restart_session", &owner, &id));
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_has_the_names_of_the_clients() {
        let part = |mime: &str, data: &[u8]| (mime.to_owned(), data.to_vec());
        let parts = vec![
            part("text/plain", b"42"),
            part("image/png", b"\x89PNG"),
            part("application/json", b"{\"a\":1}"),
            part("application/x-other", b"o"),
        ];
        let expected = json!({
            "type": "result",
            "is_main_result": true,
            "text": "42",
            "png": "iVBORw==",
            "json": { "a": 1 },
            "extra": { "application/x-other": "o" },
        });
        assert_eq!(result(&MimeBundle { parts }, true), expected);
    }

    #[test]
    fn environment_is_a_literal_whatever_it_contains() {
        let env = BTreeMap::from([("A".to_owned(), "'\"\\\n\u{2028}".to_owned())]);
        for language in [Language::Python, Language::Node] {
            let code = environment(language, &env, false);
            assert!(code.is_ascii() && code.contains("loads(") || code.contains("parse("));
        }
    }
}
