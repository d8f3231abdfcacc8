//! Interpreter sessions: their processes, and the calls in them.
//!
//! A session's process is a job without a client. A call is work on a thread that a client can
//! interrupt.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::MAX_SESSIONS;
use pvmm_guest_agent::message::{
    Answer, ByteBuf, CloseSession, Code, Command, Exec, OpenSession, Outcome, RunCode, Signal,
};

use super::worker;
use crate::agent::Agent;
use crate::channel::Source;
use crate::connection::StreamId;
use crate::interpreter::{self, Session, SessionEnds, run, spare, start};
use crate::job::{Job, Jobs, Progress, Stream};
use crate::launch::{self, launch, prepare};
use crate::process;
use crate::spawn::SpawnError;
use crate::stdio::Stdio;
use crate::sys::{self, Reaped};
use crate::token::Token;

const NO_SESSION: &str = "there is no session of that name";

pub fn open(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, mut request: OpenSession) {
    if request.spare {
        return open_spare(agent, jobs, id, request);
    }
    if let Some(session) = request.session.as_ref().and_then(|name| agent.sessions.get(name)) {
        if request.reuse && session.language == request.language {
            return agent.answer(id, Answer::Session(session.info()));
        }
        return agent.fail(id, Code::Io, Some(libc::EEXIST), "there is a session of that name");
    }
    if agent.sessions.open() >= MAX_SESSIONS {
        let why = "there are all the sessions there may be: close one";
        return agent.refuse(id, Code::TooMany, why);
    }
    let name = request.session.take().unwrap_or_else(|| agent.sessions.new_name());
    if let Some(session) = agent.sessions.take_spare(&request) {
        agent.sessions.insert(name, Arc::clone(&session));
        return call(agent, jobs, id, session, move |session| {
            start::settle(session, &spare::settings(&request))
        });
    }
    match start_session(agent, jobs, id, request) {
        Ok(session) => {
            agent.sessions.insert(name, Arc::clone(&session));
            call(agent, jobs, id, session, start::wait_ready);
        }
        Err(error) => not_started(agent, id, &error),
    }
}

/// Starts an interpreter for the next request that it fits.
fn open_spare(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, mut request: OpenSession) {
    if let Some(session) = agent.sessions.spare() {
        return agent.answer(id, Answer::Session(session.info()));
    }
    request.env.push((ByteBuf::from(spare::VARIABLE), ByteBuf::from("1")));
    match start_session(agent, jobs, id, request) {
        Ok(session) => {
            agent.sessions.set_spare(Arc::clone(&session));
            call(agent, jobs, id, session, start::wait_ready);
        }
        Err(error) => not_started(agent, id, &error),
    }
}

fn not_started(agent: &mut Agent, id: StreamId, error: &SpawnError) {
    agent.fail(id, Code::Io, Some(error.errno), "cannot start the interpreter");
}

/// Begins work with a session, on a thread of the pool.
fn call(
    agent: &mut Agent,
    jobs: &mut Jobs,
    id: StreamId,
    session: Arc<Session>,
    work: impl FnOnce(&Session) -> Outcome + Send + 'static,
) {
    let stream = Stream::new(agent.new_id(), id);
    let own = Arc::clone(&session);
    submit(agent, jobs, CallJob { stream, session }, move || work(&own));
}

fn start_session(
    agent: &mut Agent,
    jobs: &mut Jobs,
    id: StreamId,
    request: OpenSession,
) -> Result<Arc<Session>, SpawnError> {
    let (program, option, driver) = interpreter::driver(request.language);
    let program = request.program.unwrap_or_else(|| ByteBuf::from(program));
    let words = [program, ByteBuf::from(option), ByteBuf::from(driver)];
    let exec = Exec {
        env: request.env,
        cwd: request.cwd,
        user: request.user,
        ..Exec::new(Command::Argv(words.into()))
    };
    let stdio = Stdio::of(&exec, None).map_err(prepare)?;
    let (control, theirs) = sys::session::control_pair().map_err(prepare)?;
    let user = launch::find_user(agent, &exec)?;
    let (pid, cgroup) = launch(agent, &exec, user, &stdio, Some(theirs.as_raw_fd()))?;
    let process = match sys::session::process_watch(pid) {
        Ok(process) => process,
        Err(e) => {
            let _ = sys::kill(pid, libc::SIGKILL);
            agent.retire(cgroup);
            return Err(prepare(e));
        }
    };
    // Pipes always include one for errors.
    let stderr = stdio.error.map_or_else(|| agent.null.try_clone(), |ends| Ok(ends.ours));
    let stderr = stderr.map_err(prepare)?;
    let ends = SessionEnds { control, stdout: stdio.output.ours, stderr, process };
    let freezer = agent.settings.cgroups.as_ref().map(|cgroups| cgroups.freezer());
    let session = Arc::new(Session::new(request.language, pid, cgroup, freezer, ends));
    let stream = Stream::new(agent.new_id(), id);
    agent.pids.insert(pid, stream.job);
    jobs.insert(SessionJob { stream, session: Arc::clone(&session) });
    Ok(session)
}

pub fn run(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, request: RunCode) {
    let Some(session) = agent.sessions.get(&request.session).map(Arc::clone) else {
        return agent.fail(id, Code::Io, Some(libc::ENOENT), NO_SESSION);
    };
    let made = sys::pipe().and_then(|(ours, theirs)| {
        sys::set_nonblocking(&ours)?;
        sys::set_nonblocking(&theirs)?;
        Ok((ours, theirs))
    });
    let (ours, theirs): (OwnedFd, OwnedFd) = match made {
        Ok(pipe) => pipe,
        Err(e) => return agent.fail(id, Code::Io, e.raw_os_error(), "cannot make a pipe"),
    };
    let mut stream = Stream::new(agent.new_id(), id);
    if let Err(e) = agent.watch(&ours, Token::Output(stream.job)) {
        return agent.fail(id, Code::Io, e.raw_os_error(), "cannot watch a pipe");
    }
    stream.sources.push(Source::new(Channel::Output, ours, None));
    let call = Arc::clone(&session);
    submit(agent, jobs, CallJob { stream, session }, move || run::run(&call, &request, theirs));
}

/// Runs a call on a thread of the pool; its outcome ends the stream.
fn submit(
    agent: &mut Agent,
    jobs: &mut Jobs,
    call: CallJob,
    work: impl FnOnce() -> Outcome + Send + 'static,
) {
    let job = call.stream.job;
    jobs.open(agent, call);
    worker::submit(agent, job, |_| work());
}

pub fn close(agent: &mut Agent, id: StreamId, request: &CloseSession) {
    if agent.sessions.close(&request.session) {
        agent.answer(id, Answer::Done {});
    } else {
        agent.fail(id, Code::Io, Some(libc::ENOENT), NO_SESSION);
    }
}

/// The process of a session.
struct SessionJob {
    /// The stream of the request that opened the session; the session outlives it.
    stream: Stream,
    session: Arc<Session>,
}

impl Job for SessionJob {
    fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    fn died(&mut self, dead: &Reaped, agent: &mut Agent) -> Progress {
        agent.sessions.remove(dead.pid);
        let cgroup = self.session.set_ended(process::status(dead.status));
        agent.retire(cgroup);
        Progress::Forgotten
    }

    fn kill(&self, _agent: &Agent) {
        self.session.kill();
    }
}

/// A call in a session.
struct CallJob {
    stream: Stream,
    session: Arc<Session>,
}

impl Job for CallJob {
    fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    fn signal(&self, signal: Signal, _agent: &Agent) {
        // Code can be interrupted; a session is ended by closing it.
        if signal.signal == libc::SIGINT {
            self.session.interrupt();
        }
    }
}
