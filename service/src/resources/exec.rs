//! `/v1/sandboxes/{id}/exec` and `/exec/stream`: runs a shell line in the guest.
//!
//! A client that goes away does not end its command, apart from one that streams; the time limit
//! does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use pvmm::agent::{Agent, FileWriteOptions};
use pvmm::exec::{ExecRequest, ExecStatus, ExitStatus, Output, ProcessEvent, Signaller, Stage};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::audit::Act;
use crate::blocking::{Work, unless_stopped};
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner};
use crate::ids;
use crate::life::{InUse, enter};
use crate::metrics::Operation;
use crate::sse::{self, Events};
use crate::text::Utf8Chunks;

/// The time limit of a command whose request has none.
const DEFAULT_TIME: Duration = Duration::from_secs(3600);
/// The longest time limit.
const MAX_SECONDS: f64 = 86_400.0;
/// A longer line is given to the shell as a file: one argument has at most 128 KiB.
const MAX_ARGUMENT: usize = 100 << 10;
/// The shell of a line, and its folder if none is given. Most guests have both.
const BASH: &str = "/bin/bash";
const HOME: &str = "/root";
/// Runs a line by the shell that there is, in root's home if no folder is given.
const BY_LINE: &str = r#"[ -n "$2" ] || cd /root 2>/dev/null
[ -x /bin/bash ] && exec /bin/bash -c "$1"
exec /bin/sh -c "$1""#;
/// Runs a file in the same way, and removes it.
const BY_FILE: &str = r#"[ -n "$2" ] || cd /root 2>/dev/null
shell=/bin/sh; [ -x /bin/bash ] && shell=/bin/bash
exec 9<"$1"; rm -f "$1"; exec "$shell" /dev/fd/9"#;

/// The shell that runs a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shell {
    /// Bash in root's home, as if both were there.
    Bash,
    /// The shell and the folder that a first shell in the guest finds.
    Found,
}

impl Shell {
    /// Returns the shell to try when the line did not start by this one.
    fn next(self, status: ExecStatus) -> Option<Self> {
        match status {
            ExecStatus::CouldNotStart { stage: Stage::Chdir | Stage::Exec, .. } => {
                (self == Self::Bash).then_some(Self::Found)
            }
            _ => None,
        }
    }
}

/// The body of an exec.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Exec {
    /// The shell line.
    pub cmd: String,
    /// The time limit in seconds.
    pub timeout_seconds: Option<f64>,
    /// Variables that are added to the environment.
    pub env: Option<BTreeMap<String, String>>,
    /// The working directory; root's home by default.
    pub cwd: Option<String>,
    /// The user; root by default.
    pub user: Option<String>,
    /// The standard input; empty by default.
    pub stdin: Option<String>,
}

impl Exec {
    fn timeout(&self) -> Result<Duration, ApiError> {
        match self.timeout_seconds {
            None => Ok(DEFAULT_TIME),
            Some(seconds) if seconds > 0.0 && seconds <= MAX_SECONDS => {
                Ok(Duration::from_secs_f64(seconds))
            }
            Some(_) => {
                let message = format!("timeout_seconds: use a number up to {MAX_SECONDS}");
                Err(ApiError::bad_request(message))
            }
        }
    }

    /// Returns the shell to try first. Other users than root may not enter root's home.
    fn shell(&self) -> Shell {
        let enters = self.user.is_none() || self.cwd.is_some();
        if enters && self.cmd.len() <= MAX_ARGUMENT { Shell::Bash } else { Shell::Found }
    }

    /// Returns the request for the agent. A long line is written to a file of the guest first.
    fn request(&self, agent: &Agent, shell: Shell) -> Result<ExecRequest, ApiError> {
        if self.cmd.contains('\0') {
            return Err(ApiError::bad_request("cmd: contains a NUL character"));
        }
        let given = if self.cwd.is_some() { "given" } else { "" };
        let mut request = if shell == Shell::Bash {
            ExecRequest::argv([BASH, "-c", &self.cmd]).cwd(HOME)
        } else if self.cmd.len() <= MAX_ARGUMENT {
            ExecRequest::argv(["/bin/sh", "-c", BY_LINE, "sh", &self.cmd, given])
        } else {
            let path = format!("/tmp/.pvmm-{}", ids::new_id()?);
            let options = FileWriteOptions { mode: Some(0o644), ..FileWriteOptions::default() };
            agent.write_file(&path, self.cmd.as_bytes(), &options)?;
            ExecRequest::argv(["/bin/sh", "-c", BY_FILE, "sh", &path, given])
        };
        if self.user.is_none() {
            request = request.env("HOME", "/root");
        }
        request = request.env("LANG", "C.UTF-8");
        for (name, value) in self.env.iter().flatten() {
            request = request.env(name, value);
        }
        if let Some(cwd) = &self.cwd {
            request = request.cwd(cwd);
        }
        if let Some(user) = &self.user {
            request = request.user(user);
        }
        Ok(request.timeout(self.timeout()?))
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn timed_out(body: &Exec) -> ApiError {
    let seconds = body.timeout().unwrap_or(DEFAULT_TIME).as_secs_f64();
    ApiError::timeout(format!("the command ran longer than {seconds} s"))
}

/// Writes the end of a command as clients read it.
fn ending(status: &ExitStatus) -> Value {
    let mut value = json!({
        "exit_code": status.shell_code(),
        "duration_ms": status.duration.as_millis() as u64,
        "timed_out": status.timed_out,
        "oom": status.oom,
    });
    if let ExecStatus::Signaled { signal, .. } = status.status {
        value["signal"] = json!(signal);
    }
    value
}

fn answer(output: &Output, body: &Exec) -> Result<Value, ApiError> {
    let mut value = ending(&output.status);
    value["stdout"] = json!(text(&output.stdout.bytes));
    value["stderr"] = json!(text(&output.stderr.bytes));
    value["truncated"] = json!(output.stdout.truncated() || output.stderr.truncated());
    match (output.status.timed_out, value) {
        (true, Value::Object(fields)) => Err(ApiError { fields, ..timed_out(body) }),
        (_, value) => Ok(value),
    }
}

fn run(
    in_use: &InUse,
    body: &Exec,
    shell: Shell,
    begun: impl FnOnce(Signaller),
) -> Result<Output, ApiError> {
    let agent = in_use.agent()?;
    let mut request = body.request(&agent, shell)?;
    if let Some(stdin) = &body.stdin {
        request = request.input(stdin.as_bytes());
    }
    agent.exec_with(&request, begun).map_err(|error| in_use.explain(error.into()))
}

/// Says inside an answer whose head was sent that its command failed. Clients read a missing exit
/// code as success.
fn late(error: &ApiError) -> Value {
    let mut value = error.json();
    let fields = [("exit_code", json!(125)), ("stdout", json!("")), ("stderr", json!(""))];
    for (name, default) in fields {
        if value.get(name).is_none() {
            value[name] = default;
        }
    }
    let stderr = value["stderr"].as_str().unwrap_or_default();
    value["stderr"] = json!(format!("{stderr}\n{}", error.message).trim_start());
    if let Some(fields) = value.as_object_mut() {
        fields.remove("error");
    }
    value
}

/// Runs a shell line in a sandbox to its end, or until `stop`, which kills the command.
pub async fn run_line(
    app: &Arc<App>,
    owner: &str,
    id: &str,
    body: Exec,
    stop: &CancellationToken,
) -> Result<Output, ApiError> {
    body.timeout()?;
    let begun = Instant::now();
    let (in_use, body) = (Arc::new(enter(app, id).await?), Arc::new(body));
    let mut shell = body.shell();
    let outcome = loop {
        let (in_use, body) = (Arc::clone(&in_use), Arc::clone(&body));
        let (handle, signaller) = oneshot::channel();
        let begin = move |signaller| drop(handle.send(signaller));
        let work = app.blocking.run(Work::Long, move || run(&in_use, &body, shell, begin));
        let kill = |signaller: Signaller| drop(signaller.send(libc::SIGKILL));
        let outcome = unless_stopped(work, signaller, stop, kill).await;
        match outcome.as_ref().ok().and_then(|output| shell.next(output.status.status)) {
            Some(next) => shell = next,
            None => break outcome,
        }
    };
    app.metrics.note(Operation::Exec, begun.elapsed(), outcome.is_ok());
    let mut act = Act::new("exec", owner, id).what(&body.cmd).since(begun).outcome(&outcome);
    if let Ok(output) = &outcome {
        act = act.exit(output.status.shell_code().into());
        act = act.bytes(output.stdout.total.saturating_add(output.stderr.total));
    }
    app.audit.write(&act);
    outcome
}

/// `POST /v1/sandboxes/{id}/exec`
pub async fn exec(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Exec>,
) -> Result<Response, ApiError> {
    body.timeout()?;
    app.find(&id)?;
    let work = async move {
        let never = CancellationToken::new();
        let output = run_line(&app, &owner, &id, body.clone(), &never).await?;
        answer(&output, &body)
    };
    Ok(sse::slow_json(StatusCode::OK, work, late).await)
}

/// Sends the output of a command as events until it ends or the client goes away.
fn stream(agent: &Agent, body: &Exec, events: &Events) -> Result<Option<ExitStatus>, ApiError> {
    const TICK: Duration = Duration::from_secs(1);
    let mut shell = body.shell();
    let mut process = agent.start(&body.request(agent, shell)?)?;
    let (mut stdout, mut stderr) = (Utf8Chunks::default(), Utf8Chunks::default());
    let send = |event: &str, chunk: String| {
        chunk.is_empty() || events.send(event, &json!({ "chunk": chunk }))
    };
    loop {
        let sent = match process.next_event(Some(Instant::now() + TICK))? {
            Some(ProcessEvent::Stdout(bytes)) => send("stdout", stdout.push(&bytes)),
            Some(ProcessEvent::Stderr(bytes)) => send("stderr", stderr.push(&bytes)),
            Some(ProcessEvent::Exited(status)) => {
                if let Some(next) = shell.next(status.status) {
                    shell = next;
                    process = agent.start(&body.request(agent, shell)?)?;
                    continue;
                }
                let _ = send("stdout", stdout.finish()) && send("stderr", stderr.finish());
                return Ok(Some(status));
            }
            None => !events.is_closed(),
        };
        if !sent {
            return Ok(None);
        }
    }
}

/// `POST /v1/sandboxes/{id}/exec/stream`
pub async fn exec_stream(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Exec>,
) -> Result<Response, ApiError> {
    body.timeout()?;
    let begun = Instant::now();
    let in_use = enter(&app, &id).await?;
    let (in_use, agent) =
        app.blocking.run(Work::Short, move || in_use.agent().map(|agent| (in_use, agent))).await?;
    let (events, response) = sse::events();
    let shared = Arc::clone(&app);
    let work = move || {
        let outcome = stream(&agent, &body, &events).map_err(|error| in_use.explain(error));
        match &outcome {
            Ok(Some(status)) if status.timed_out => {
                events.send("error", &timed_out(&body).json());
            }
            Ok(Some(status)) => {
                events.send("exit", &ending(status));
            }
            Ok(None) => {}
            Err(error) => {
                events.send("error", &error.json());
            }
        }
        shared.metrics.note(Operation::Exec, begun.elapsed(), outcome.is_ok());
        let mut act = Act::new("exec", &owner, &id).what(&body.cmd).since(begun).outcome(&outcome);
        if let Ok(Some(status)) = outcome {
            act = act.exit(status.shell_code().into());
        }
        shared.audit.write(&act);
        drop(in_use);
    };
    app.blocking.start(Work::Long, work).await?;
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(timeout: Option<f64>) -> Exec {
        let (env, cwd, user, stdin) = (None, None, None, None);
        Exec { cmd: "true".to_owned(), timeout_seconds: timeout, env, cwd, user, stdin }
    }

    #[test]
    fn timeout_that_is_no_time_is_refused() {
        assert_eq!(body(None).timeout(), Ok(DEFAULT_TIME));
        assert_eq!(body(Some(0.5)).timeout(), Ok(Duration::from_millis(500)));
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
            assert_eq!(body(Some(seconds)).timeout().unwrap_err().code, "bad_request");
        }
    }

    #[test]
    fn shell_that_a_guest_lacks_is_looked_for_once() {
        let status = |stage| ExecStatus::CouldNotStart { stage, errno: libc::ENOENT };
        assert_eq!(body(None).shell(), Shell::Bash);
        assert_eq!(Shell::Bash.next(status(Stage::Exec)), Some(Shell::Found));
        assert_eq!(Shell::Bash.next(status(Stage::Chdir)), Some(Shell::Found));
        assert_eq!(Shell::Bash.next(status(Stage::Limits)), None);
        assert_eq!(Shell::Found.next(status(Stage::Exec)), None);
        let other = Exec { user: Some("user".to_owned()), ..body(None) };
        assert_eq!(other.shell(), Shell::Found);
    }

    #[test]
    fn late_failure_never_reads_as_success() {
        let value = late(&ApiError::internal("the agent is lost"));
        assert_eq!(value["exit_code"], 125);
        assert_eq!(value["stderr"], "the agent is lost");
        let mut error = timed_out(&body(Some(30.0)));
        error.fields.insert("exit_code".to_owned(), json!(124));
        error.fields.insert("stdout".to_owned(), json!("some"));
        let value = late(&error);
        assert_eq!((&value["exit_code"], &value["stdout"]), (&json!(124), &json!("some")));
        assert!(value["stderr"].as_str().unwrap().contains("timeout"));
    }
}
