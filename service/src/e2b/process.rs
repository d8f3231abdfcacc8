//! `process.Process`: commands and terminals that go on without their client.
//!
//! A process belongs to its guest. It outlives the request that started it, the server, and a pause
//! of the sandbox; its time limit, an end by a client or its own ends it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pvmm::agent::Agent;
use pvmm::exec::{AttachFrom, ExecError, ExecRequest, ExecStatus, Listed, Stage, WindowSize};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::audit::Act;
use crate::blocking::Work;
use crate::error::ApiError;
use crate::extract::Owner;
use crate::life::enter;

use super::accounts::{Account, user_of};
use super::connect::{self, Incoming, Message};
use super::error::CallError;
use super::follow::{Follow, follow};
use super::inputs;
use super::state::{Door, Target};

/// The newest bytes of each output that a guest keeps for a client that reads slowly.
const KEPT: u32 = 4 << 20;
/// How long a process may take to read what a client sends.
const INPUT_TIME: Duration = Duration::from_secs(60);
/// The shell that the clients ask for, and the one that every guest has.
const BASH: &str = "/bin/bash";
const SHELL: &str = "/bin/sh";

type Answer = Result<axum::Json<Value>, CallError>;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    cmd: String,
    args: Vec<String>,
    envs: BTreeMap<String, String>,
    cwd: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Size {
    rows: u16,
    cols: u16,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Terminal {
    size: Size,
}

impl Terminal {
    fn window(self) -> WindowSize {
        WindowSize { rows: self.size.rows.max(1), columns: self.size.cols.max(1) }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Start {
    process: Config,
    pty: Option<Terminal>,
    tag: Option<String>,
    stdin: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Selector {
    pid: Option<u32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

impl Input {
    fn bytes(&self) -> Result<Vec<u8>, CallError> {
        let text = self.stdin.as_ref().or(self.pty.as_ref()).map_or("", |text| text);
        let bad = |_| CallError::new("invalid_argument", "the input is not base64");
        STANDARD.decode(text).map_err(bad)
    }
}

/// The message of a call about a process.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct About {
    process: Selector,
    pty: Option<Terminal>,
    input: Input,
    signal: Value,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Piece {
    start: Option<About>,
    data: Option<About>,
}

/// Starts a process. A guest without bash gets its line by the shell that it has.
fn launch(
    agent: &Agent,
    account: &Account,
    start: &Start,
    env: &BTreeMap<String, String>,
    limit: Option<Duration>,
) -> Result<u64, CallError> {
    match agent.start_detached(&request(account, start, env, limit)?, Some(KEPT)) {
        Ok(process) => Ok(process.id),
        Err(ExecError::NotStarted(status)) => match status.status {
            ExecStatus::CouldNotStart { stage: Stage::Exec, errno: libc::ENOENT }
                if start.process.cmd == BASH =>
            {
                let process = Config { cmd: SHELL.to_owned(), ..start.process.clone() };
                let other = Start { process, ..start.clone() };
                launch(agent, account, &other, env, limit)
            }
            status => {
                let message = format!("the command could not be started: {status:?}");
                Err(CallError::new("invalid_argument", message))
            }
        },
        Err(error) => Err(error.into()),
    }
}

fn request(
    account: &Account,
    start: &Start,
    env: &BTreeMap<String, String>,
    limit: Option<Duration>,
) -> Result<ExecRequest, CallError> {
    let Config { cmd, args, envs, cwd } = &start.process;
    let bad = |message: &str| Err(CallError::new("invalid_argument", message));
    if cmd.is_empty() {
        return bad("process.cmd: name a program");
    }
    if start.tag.as_ref().is_some_and(|tag| !tag.is_empty()) {
        return Err(CallError::new("unimplemented", "tag: processes have numbers only"));
    }
    let mut request = ExecRequest::argv(std::iter::once(cmd).chain(args));
    if !account.is_root() {
        request = request.user(account.name.clone());
    }
    request = request.env("HOME", &account.home).env("LANG", "C.UTF-8");
    for (name, value) in env.iter().chain(envs) {
        request = request.env(name, value);
    }
    request = request.cwd(account.absolute(cwd.as_deref().unwrap_or_default()));
    if let Some(limit) = limit {
        request = request.timeout(limit);
    }
    Ok(match start.pty {
        Some(terminal) => request.terminal(terminal.window()),
        // A client that does not say has an input.
        None if start.stdin.unwrap_or(true) => request.piped_stdin(),
        None => request,
    })
}

async fn started(
    door: &Arc<Door>,
    id: &str,
    headers: &HeaderMap,
    start: Start,
) -> Result<Follow, CallError> {
    let in_use = enter(&door.app, id).await?;
    let (user, limit) = (user_of(headers), connect::time_limit(headers));
    let (ping, id) = (connect::ping_interval(headers), id.to_owned());
    let work = move || {
        let agent = in_use.agent()?;
        let account = Account::find(&agent, user.as_deref())?;
        let env = in_use.row().env;
        let attached = launch(&agent, &account, &start, &env, limit).and_then(|process| {
            let attached = agent.attach(process, AttachFrom::default())?;
            attached.replay(Instant::now() + Duration::from_secs(60))?;
            Ok((process, attached))
        });
        Ok(attached.map(|(number, process)| Follow {
            pid: process.pid().unwrap_or_default(),
            in_use,
            agent,
            process,
            key: (id, number),
            terminal: start.pty.is_some(),
            ping,
            until: None,
            over: false,
        }))
    };
    door.app.blocking.run(Work::Short, work).await?
}

/// `Start`
pub async fn start(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let wanted: Result<Start, _> = Incoming::new(body).only().await;
    let wanted = match wanted {
        Ok(wanted) => wanted,
        Err(error) => return connect::streamed(Err(error)),
    };
    let what = std::iter::once(&wanted.process.cmd).chain(&wanted.process.args);
    let what = what.cloned().collect::<Vec<_>>().join(" ");
    match started(&door, &id, &headers, wanted).await {
        Ok(it) => follow(&door, &owner, what, it).await,
        Err(error) => {
            let message = error.json()["message"].as_str().unwrap_or_default().to_owned();
            let told = Err::<(), _>(ApiError::bad_request(message));
            door.app.audit.write(&Act::new("exec", &owner, &id).what(&what).outcome(&told));
            connect::streamed(Err(error))
        }
    }
}

/// Returns the process of a guest that a client selects.
fn find(agent: &Agent, selector: &Selector) -> Result<Listed, CallError> {
    let Some(pid) = selector.pid else {
        return Err(CallError::new("unimplemented", "process: select it by its pid"));
    };
    let listed = agent.processes()?;
    let mut found: Vec<_> = listed.into_iter().filter(|it| it.pid == pid).collect();
    // A number may be used again after its process has ended.
    found.sort_by_key(|it| (it.ended.is_none(), it.id));
    let missing = || CallError::new("not_found", format!("process with pid {pid} not found"));
    found.pop().ok_or_else(missing)
}

async fn attached(
    door: &Arc<Door>,
    id: &str,
    headers: &HeaderMap,
    about: About,
) -> Result<Follow, CallError> {
    let in_use = enter(&door.app, id).await?;
    let until = connect::time_limit(headers).map(|limit| Instant::now() + limit);
    let (ping, id) = (connect::ping_interval(headers), id.to_owned());
    let work = move || {
        let agent = in_use.agent()?;
        let attached = find(&agent, &about.process).and_then(|it| {
            // What was printed before has been read by the client that started the process, unless
            // nobody waits for its end any more.
            let from = match it.ended {
                None => AttachFrom { stdout: it.stdout.to, stderr: it.stderr.to, input: false },
                Some(_) => {
                    AttachFrom { stdout: it.stdout.from, stderr: it.stderr.from, input: false }
                }
            };
            Ok((agent.attach(it.id, from)?, it))
        });
        Ok(attached.map(|(process, it)| Follow {
            in_use,
            agent,
            process,
            key: (id, it.id),
            pid: it.pid,
            terminal: it.terminal,
            ping,
            until,
            over: false,
        }))
    };
    door.app.blocking.run(Work::Short, work).await?
}

/// `Connect`
pub async fn connect(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let about: Result<About, _> = Incoming::new(body).only().await;
    let found = match about {
        Ok(about) => attached(&door, &id, &headers, about).await,
        Err(error) => Err(error),
    };
    match found {
        Ok(it) => {
            let what = format!("connect {}", it.pid);
            follow(&door, &owner, what, it).await
        }
        Err(error) => connect::streamed(Err(error)),
    }
}

/// Writes a process as the clients read it.
fn shape(it: &Listed) -> Value {
    let words = [BASH, "-l", "-c"];
    let config = match it.command.strip_prefix(&format!("{} ", words.join(" "))) {
        Some(line) => json!({ "cmd": BASH, "args": ["-l", "-c", line] }),
        None => json!({ "cmd": it.command }),
    };
    json!({ "config": config, "pid": it.pid })
}

/// `List`
pub async fn list(State(door): State<Arc<Door>>, Target(id): Target) -> Answer {
    let in_use = enter(&door.app, &id).await?;
    let work = move || Ok(in_use.agent()?.processes()?);
    let listed = door.app.blocking.run(Work::Short, work).await?;
    let running: Vec<_> = listed.iter().filter(|it| it.ended.is_none()).map(shape).collect();
    Ok(axum::Json(json!({ "processes": running })))
}

/// Runs a call about a process that has not ended, in a thread.
async fn with_process(
    door: &Arc<Door>,
    id: &str,
    selector: Selector,
    work: Work,
    call: impl FnOnce(&Door, &Agent, &inputs::Key) -> Result<(), CallError> + Send + 'static,
) -> Result<(), CallError> {
    let in_use = enter(&door.app, id).await?;
    let (shared, id) = (Arc::clone(door), id.to_owned());
    let work = door.app.blocking.run(work, move || {
        let agent = in_use.agent()?;
        Ok(find(&agent, &selector).and_then(|it| match it.ended {
            None => call(&shared, &agent, &(id, it.id)),
            Some(_) => Err(CallError::new("not_found", "the process has ended")),
        }))
    });
    work.await?
}

/// Returns how long a client waits for a process to read.
fn input_time(headers: &HeaderMap) -> Duration {
    connect::time_limit(headers).unwrap_or(INPUT_TIME).min(INPUT_TIME)
}

/// `SendInput`
pub async fn send_input(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    headers: HeaderMap,
    Message(about): Message<About>,
) -> Answer {
    let bytes = about.input.bytes()?;
    let until = Instant::now() + input_time(&headers);
    let call = move |door: &Door, agent: &Agent, key: &inputs::Key| {
        door.inputs.write(agent, key, &bytes, until)
    };
    with_process(&door, &id, about.process, Work::Long, call).await?;
    Ok(axum::Json(json!({})))
}

async fn stream_in(door: &Arc<Door>, id: &str, body: Body) -> Result<(), CallError> {
    let mut incoming = Incoming::new(body);
    let mut selector = None;
    while let Some(piece) = incoming.next::<Piece>().await? {
        if let Some(start) = piece.start {
            selector = Some(start.process);
        }
        let Some(data) = piece.data else { continue };
        let Some(selector) = selector.clone() else {
            return Err(CallError::new("invalid_argument", "the stream names no process"));
        };
        let bytes = data.input.bytes()?;
        let until = Instant::now() + INPUT_TIME;
        let call = move |door: &Door, agent: &Agent, key: &inputs::Key| {
            door.inputs.write(agent, key, &bytes, until)
        };
        with_process(door, id, selector, Work::Long, call).await?;
    }
    Ok(())
}

/// `StreamInput`
pub async fn stream_input(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    body: Body,
) -> Response {
    connect::streamed(stream_in(&door, &id, body).await.map(|()| json!({})))
}

/// `CloseStdin`
pub async fn close_stdin(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    Message(about): Message<About>,
) -> Answer {
    let call = |door: &Door, agent: &Agent, key: &inputs::Key| door.inputs.close(agent, key);
    with_process(&door, &id, about.process, Work::Short, call).await?;
    Ok(axum::Json(json!({})))
}

/// Reads a signal: its name or its number.
fn signal(value: &Value) -> Result<i32, CallError> {
    match (value.as_str(), value.as_i64()) {
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => Ok(libc::SIGKILL),
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => Ok(libc::SIGTERM),
        _ => {
            Err(CallError::new("invalid_argument", "signal: use SIGNAL_SIGKILL or SIGNAL_SIGTERM"))
        }
    }
}

/// `SendSignal`
pub async fn send_signal(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    Message(about): Message<About>,
) -> Answer {
    let signal = signal(&about.signal)?;
    let what = format!("signal {signal} to {}", about.process.pid.unwrap_or_default());
    // A kill ends the whole tree: a shell that is killed leaves no command behind.
    let call = move |_: &Door, agent: &Agent, key: &inputs::Key| {
        Ok(agent.signal_process(key.1, signal, signal == libc::SIGKILL)?)
    };
    with_process(&door, &id, about.process, Work::Short, call).await?;
    door.app.audit.write(&Act::new("signal", &owner, &id).what(&what));
    Ok(axum::Json(json!({})))
}

/// `Update`
pub async fn update(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    Message(about): Message<About>,
) -> Answer {
    let Some(terminal) = about.pty else {
        return Err(CallError::new("invalid_argument", "pty: give the size of the terminal"));
    };
    let call = move |_: &Door, agent: &Agent, key: &inputs::Key| {
        let from = AttachFrom { stdout: u64::MAX, stderr: u64::MAX, input: false };
        let process = agent.attach(key.1, from)?;
        process.replay(Instant::now() + Duration::from_secs(60))?;
        process.signaller().resize(terminal.window())?;
        Ok(())
    };
    with_process(&door, &id, about.process, Work::Short, call).await?;
    Ok(axum::Json(json!({})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_clients_are_read() {
        let text = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","x"],"envs":{"A":"b"}},
            "pty":{"size":{"cols":4,"rows":3}}}"#;
        let start: Start = serde_json::from_str(text).unwrap();
        assert_eq!(start.pty.unwrap().window(), WindowSize { rows: 3, columns: 4 });
        assert_eq!(start.process.envs["A"], "b");
        let text = r#"{"process":{"pid":5},"signal":"SIGNAL_SIGKILL","input":{"stdin":"YWJj"}}"#;
        let about: About = serde_json::from_str(text).unwrap();
        assert_eq!((about.process.pid, signal(&about.signal).unwrap()), (Some(5), 9));
        assert_eq!(about.input.bytes().unwrap(), b"abc");
        assert!(signal(&json!("SIGNAL_SIGSTOP")).is_err());
    }
}
