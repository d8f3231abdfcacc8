//! Starts what a request asks for, or answers it at once.

use pvmm_guest_agent::decode;
use pvmm_guest_agent::limits::{MAX_PORT_STREAMS, MAX_STREAMS, VERSION};
use pvmm_guest_agent::message::{Answer, Code, Request, Welcome};

use crate::agent::{Agent, Ended};
use crate::check::check;
use crate::connection::StreamId;
use crate::job::Jobs;
use crate::jobs::{attached, detached, exec, files, forward, freeze, interpreter};
use crate::{metrics, sys};

/// Serves the request of a new stream.
pub fn open(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, payload: &[u8]) {
    let request = match decode::<Request>(payload) {
        Ok(request) => request,
        Err(e) => return agent.refuse(id, Code::BadRequest, &cause(&e)),
    };
    if let Err(why) = check(&request) {
        return agent.refuse(id, Code::BadRequest, why);
    }
    let control = matches!(request, Request::Freeze(_) | Request::Refresh(_) | Request::Thaw {});
    if control && !agent.connections.get(&id.connection).is_some_and(|it| it.control) {
        let why = "freeze, refresh and thaw are for the control port";
        return agent.refuse(id, Code::Unsupported, why);
    }
    let brief =
        control || matches!(request, Request::Ping {} | Request::Info {} | Request::Shutdown(_));
    let to_port = matches!(request, Request::Connect(_));
    if !brief && !has_stream_left(agent, jobs, id.connection, to_port) {
        let why = "the connection has all the streams it may have";
        return agent.refuse(id, Code::TooMany, why);
    }
    let runs = matches!(request, Request::Exec(_) | Request::OpenSession(_) | Request::RunCode(_));
    if runs && agent.is_frozen() {
        return agent.refuse(id, Code::Frozen, "the workload is frozen: thaw it first");
    }
    serve(agent, jobs, id, request);
}

fn serve(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, request: Request) {
    let answer = match request {
        Request::Ping {} => Answer::Done {},
        Request::Info {} => Answer::Info(metrics::info(agent)),
        Request::Metrics {} => Answer::Metrics(metrics::metrics(agent)),
        Request::Processes {} => Answer::Processes(detached::list(agent)),
        Request::ListSessions {} => Answer::Sessions(agent.sessions.list()),
        Request::Shutdown(shutdown) if agent.settings.init => {
            agent.ending = Some(Ended::Shutdown(shutdown));
            Answer::Done {}
        }
        Request::Shutdown(_) => {
            let why = "the agent is not the guest's init and cannot end it";
            return agent.refuse(id, Code::Unsupported, why);
        }
        Request::Exec(exec) if exec.detach.is_some() => {
            return detached::start(agent, jobs, id, &exec);
        }
        Request::Exec(exec) => return exec::start(agent, jobs, id, &exec),
        Request::Attach(attach) => return attached::start(agent, jobs, id, attach),
        Request::SignalProcess(signal) => return detached::signal(agent, id, signal),
        Request::ForgetProcess(it) => return detached::forget(agent, jobs, id, it),
        Request::Freeze(freeze) => return freeze::start(agent, jobs, id, freeze),
        Request::Refresh(refresh) => return freeze::refresh(agent, jobs, id, &refresh),
        Request::Thaw {} => return freeze::thaw(agent, id),
        Request::Connect(connect) => return forward::start(agent, jobs, id, connect),
        Request::OpenSession(open) => return interpreter::open(agent, jobs, id, open),
        Request::RunCode(run) => return interpreter::run(agent, jobs, id, run),
        Request::CloseSession(close) => return interpreter::close(agent, id, &close),
        file => return files::start(agent, jobs, id, file),
    };
    agent.answer(id, answer);
}

/// Returns whether another stream, to a port or for other work, fits on a connection.
fn has_stream_left(agent: &Agent, jobs: &Jobs, connection: u64, to_port: bool) -> bool {
    let Some(connection) = agent.connections.get(&connection) else { return false };
    let most = if to_port { MAX_PORT_STREAMS } else { MAX_STREAMS };
    connection.streams.len() < MAX_STREAMS
        || jobs.count(connection.streams.values(), to_port) < most
}

/// Returns what a client is told about the agent when it connects.
pub fn welcome(agent: &Agent) -> Welcome {
    let mut capabilities =
        vec!["exec", "files", "info", "connect", "pty", "detach", "code", "metrics", "tar"];
    if agent.settings.control.is_some() {
        capabilities.push("refresh");
    }
    if agent.settings.init {
        capabilities.push("shutdown");
    }
    if agent.settings.cgroups.is_some() {
        capabilities.push("cgroups");
        capabilities.push("limits");
    }
    Welcome {
        version: VERSION,
        capabilities: capabilities.into_iter().map(str::to_owned).collect(),
        agent: env!("CARGO_PKG_VERSION").into(),
        kernel: sys::system::uname().0,
        init: agent.settings.init,
        uptime_us: sys::system::uptime().as_micros() as u64,
    }
}

/// Formats an error and its cause, shortened, for a client's log.
fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    if let Some(source) = error.source() {
        text = format!("{text}: {source}");
    }
    text.chars().take(200).collect()
}
