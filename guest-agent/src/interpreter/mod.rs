//! Interpreter sessions: processes that keep their state from call to call and belong to no client.
//! A session is found by its name, so it outlives connections, and with them forks and restores.

mod run;

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::{MAX_ARGS, MAX_CODE, MAX_SESSION_NAME, MAX_SESSIONS};
use pvmm_guest_agent::message::{
    Answer, ByteBuf, CloseSession, Code, Command, Exec, ExecStatus, Failure, Language, OpenSession,
    Outcome, RunCode, SessionInfo,
};

use crate::cgroup::{self, Cgroup, Freezer};
use crate::channel::Source;
use crate::exec;
use crate::job::{Job, Work};
use crate::pool::{Report, Reporter};
use crate::server::Server;
use crate::spawn::SpawnError;
use crate::stdio::Stdio;
use crate::sys::{self, Reaped};
use crate::token::Token;

const PYTHON: &str = include_str!("driver.py");
const NODE: &str = include_str!("driver.js");
/// How long a call waits for the one before it, whose client has gone, to be over.
const ABANDONED_TIME: Duration = Duration::from_secs(10);

/// One interpreter, as the loop and the thread of a call share it.
pub struct Session {
    name: String,
    language: Language,
    pid: libc::pid_t,
    /// `None` once it is dead.
    cgroup: Mutex<Option<Cgroup>>,
    freezer: Option<Freezer>,
    state: Mutex<State>,
    changed: Condvar,
    runs: AtomicU64,
    /// The client of the call that runs has gone.
    abandoned: AtomicBool,
}

#[derive(Default)]
struct State {
    /// `None` while a call has them, and when the session is over.
    ends: Option<Ends>,
    version: String,
    ended: Option<ExecStatus>,
}

/// Our ends of what the interpreter holds.
pub struct Ends {
    control: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
    /// Readable when the interpreter is dead, whoever else holds its pipes.
    process: OwnedFd,
}

/// The sessions there are.
#[derive(Default)]
pub struct Sessions {
    by_name: BTreeMap<String, Arc<Session>>,
    /// Closed, and not yet reaped.
    closing: Vec<Arc<Session>>,
    next: u64,
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the ends for a call; `None` while another call has them or when it is over.
    fn take(&self) -> Option<Ends> {
        let deadline = Instant::now() + ABANDONED_TIME;
        let mut state = self.lock();
        while state.ends.is_none()
            && state.ended.is_none()
            && self.abandoned.load(Ordering::Acquire)
        {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = match self.changed.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        state.ends.take()
    }

    fn give_back(&self, ends: Ends) {
        self.abandoned.store(false, Ordering::Release);
        self.lock().ends = Some(ends);
        self.changed.notify_all();
    }

    /// How it ended; waits a little for the loop to hear of it.
    fn wait_ended(&self, patience: Duration) -> Option<ExecStatus> {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        while state.ended.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = match self.changed.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        state.ended
    }

    /// As Ctrl-C would: to the process and what it started in its own group.
    pub fn interrupt(&self) {
        if self.lock().ended.is_none() {
            let _ = sys::kill(-self.pid, libc::SIGINT);
        }
    }

    pub fn kill(&self) {
        let cgroup = self.cgroup.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cgroup {
            Some(cgroup) => cgroup.kill(),
            None if self.lock().ended.is_none() => cgroup::kill_relatives(self.pid),
            None => {}
        }
    }

    /// Whether the whole workload stands still, and waiting for it proves nothing.
    fn is_frozen(&self) -> bool {
        self.freezer.as_ref().is_some_and(Freezer::is_frozen)
    }

    fn info(&self) -> SessionInfo {
        let state = self.lock();
        SessionInfo {
            session: self.name.clone(),
            language: self.language,
            version: state.version.clone(),
            pid: self.pid as u32,
            busy: state.ends.is_none(),
            runs: self.runs.load(Ordering::Relaxed),
        }
    }
}

impl Server {
    pub(crate) fn open_session(&mut self, connection: u64, stream: u32, request: OpenSession) {
        if let Some(name) = &request.session
            && let Some(session) = self.sessions.by_name.get(name)
        {
            let outcome = match request.reuse && session.language == request.language {
                true => Outcome::Ok(Answer::Session(session.info())),
                false => failed(Code::Io, Some(libc::EEXIST), "there is a session of that name"),
            };
            return self.conclude(connection, stream, &outcome);
        }
        if self.sessions.by_name.len() >= MAX_SESSIONS {
            let why = "there are all the sessions there may be: close one";
            return self.refuse(connection, stream, Code::TooMany, why);
        }
        let session = match self.start_session(request) {
            Ok(session) => session,
            Err(SpawnError { errno, .. }) => {
                let outcome = failed(Code::Io, Some(errno), "cannot start the interpreter");
                return self.conclude(connection, stream, &outcome);
            }
        };
        let call = Arc::clone(&session);
        self.submit_call(connection, stream, session, None, move || run::wait_ready(&call));
    }

    fn start_session(&mut self, request: OpenSession) -> Result<Arc<Session>, SpawnError> {
        let (program, option, driver) = match request.language {
            Language::Python => ("python3", "-c", PYTHON),
            Language::Node => ("node", "-e", NODE),
        };
        let program = request.program.unwrap_or_else(|| ByteBuf::from(program));
        let words = [program, ByteBuf::from(option), ByteBuf::from(driver)];
        let exec = Exec {
            env: request.env,
            cwd: request.cwd,
            user: request.user,
            ..Exec::new(Command::Argv(words.into()))
        };
        let stdio = Stdio::of(&exec, None).map_err(exec::prepare)?;
        let (control, theirs) = sys::session::control_pair().map_err(exec::prepare)?;
        let (pid, cgroup) = self.spawn_exec(&exec, &stdio, theirs.as_raw_fd())?;
        let process = match sys::session::process_watch(pid) {
            Ok(process) => process,
            Err(e) => {
                let _ = sys::kill(pid, libc::SIGKILL);
                self.retire(cgroup);
                return Err(exec::prepare(e));
            }
        };
        let name = request.session.unwrap_or_else(|| self.sessions.new_name());
        // Pipes always come with one for errors.
        let stderr = stdio.error.map_or_else(|| self.null.try_clone(), |ends| Ok(ends.ours));
        let stderr = stderr.map_err(exec::prepare)?;
        let ends = Ends { control, stdout: stdio.output.ours, stderr, process };
        let session = Arc::new(Session {
            name: name.clone(),
            language: request.language,
            pid,
            cgroup: Mutex::new(cgroup),
            freezer: self.settings.cgroups.as_ref().map(|cgroups| cgroups.freezer()),
            state: Mutex::new(State { ends: Some(ends), ..State::default() }),
            changed: Condvar::new(),
            runs: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
        });
        self.sessions.by_name.insert(name, Arc::clone(&session));
        Ok(session)
    }

    /// Starts a process as an exec would, with a descriptor 3.
    fn spawn_exec(
        &mut self,
        exec: &Exec,
        stdio: &Stdio,
        control: RawFd,
    ) -> Result<(libc::pid_t, Option<Cgroup>), SpawnError> {
        let user = exec::find_user(exec.user.as_deref())?;
        let cgroup = match &mut self.settings.cgroups {
            Some(cgroups) => Some(cgroups.create().map_err(exec::prepare)?),
            None => None,
        };
        let mut plan = self.plan(exec, user, stdio, cgroup.as_ref())?;
        plan.control = Some(control);
        match self.spawner.spawn(&plan) {
            Ok(pid) => Ok((pid, cgroup)),
            Err(e) => {
                self.retire(cgroup);
                Err(e)
            }
        }
    }

    pub(crate) fn run_code(&mut self, connection: u64, stream: u32, request: RunCode) {
        let Some(session) = self.sessions.by_name.get(&request.session).map(Arc::clone) else {
            return self.conclude(connection, stream, &no_session());
        };
        let made = sys::pipe().and_then(|(ours, theirs)| {
            sys::set_nonblocking(&ours)?;
            sys::set_nonblocking(&theirs)?;
            Ok((ours, theirs))
        });
        let (ours, theirs) = match made {
            Ok(pipe) => pipe,
            Err(e) => {
                let outcome = failed(Code::Io, e.raw_os_error(), "cannot make a pipe");
                return self.conclude(connection, stream, &outcome);
            }
        };
        let call = Arc::clone(&session);
        self.submit_call(connection, stream, session, Some(ours), move || {
            run::run(&call, &request, theirs)
        });
    }

    /// Does the work on a thread of the pool; its outcome ends the stream.
    fn submit_call(
        &mut self,
        connection: u64,
        stream: u32,
        session: Arc<Session>,
        output: Option<OwnedFd>,
        work: impl FnOnce() -> Outcome + Send + 'static,
    ) {
        let id = self.new_id();
        let mut sources = Vec::new();
        if let Some(output) = output {
            if let Err(e) = self.watch(&output, Token::Output(id)) {
                let outcome = failed(Code::Io, e.raw_os_error(), "cannot watch a pipe");
                return self.conclude(connection, stream, &outcome);
            }
            sources.push(Source::new(Channel::Output, output, None));
        }
        let job = Job {
            connection: Some(connection),
            stream,
            work: Work::Code(session, None),
            sink: None,
            sources,
            deadline: None,
        };
        self.jobs.insert(id, job);
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.streams.insert(stream, id);
        }
        let task = move |reporter: &Reporter| {
            let outcome = work();
            reporter.send(Report::Done(id, outcome));
        };
        self.pool.submit(id, Box::new(task));
    }

    pub(crate) fn close_session(&mut self, connection: u64, stream: u32, request: &CloseSession) {
        // The name is free at once; a call in it ends when the process does.
        let outcome = match self.sessions.by_name.remove(&request.session) {
            Some(session) => {
                session.kill();
                self.sessions.closing.push(session);
                Outcome::Ok(Answer::Done {})
            }
            None => no_session(),
        };
        self.conclude(connection, stream, &outcome);
    }

    pub(crate) fn list_sessions(&mut self, connection: u64, stream: u32) {
        let list = self.sessions.by_name.values().map(|session| session.info()).collect();
        self.answer(connection, stream, Answer::Sessions(list));
    }

    /// A process that is no exec's has died: a session's, perhaps.
    pub(crate) fn session_died(&mut self, dead: &Reaped) {
        let Some(session) = self.sessions.take(dead.pid) else { return };
        // What it started goes with it: nobody could reach that any more.
        session.kill();
        session.lock().ended = Some(exec::status(dead.status));
        session.changed.notify_all();
        let cgroup = session.cgroup.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.retire(cgroup);
    }
}

impl Sessions {
    fn new_name(&mut self) -> String {
        loop {
            self.next += 1;
            let name = format!("s{}", self.next);
            if !self.by_name.contains_key(&name) {
                return name;
            }
        }
    }

    fn take(&mut self, pid: libc::pid_t) -> Option<Arc<Session>> {
        if let Some(index) = self.closing.iter().position(|session| session.pid == pid) {
            return Some(self.closing.swap_remove(index));
        }
        let name = self.by_name.values().find(|session| session.pid == pid)?.name.clone();
        self.by_name.remove(&name)
    }

    /// Ends them all, for a service that stops.
    pub fn kill_all(&self) {
        self.by_name.values().for_each(|session| session.kill());
    }
}

/// Refuses what can never work.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    match !name.is_empty() && name.len() <= MAX_SESSION_NAME && name.bytes().all(allowed) {
        true => Ok(()),
        false => Err("a session's name is 1 to 64 letters, digits, '-', '_' or '.'"),
    }
}

/// Refuses an interpreter that can never be started.
pub fn check_open(open: &OpenSession) -> Result<(), &'static str> {
    open.session.as_deref().map_or(Ok(()), check_name)?;
    let words = [open.program.as_ref(), open.cwd.as_ref()].into_iter().flatten();
    let wrong = words.into_iter().any(|word| word.is_empty() || word.contains(&0));
    if wrong {
        return Err("program or cwd is empty or contains NUL");
    }
    let names = open.env.iter().flat_map(|(name, value)| [name, value]);
    match names.map(|word| word.len() + 1).sum::<usize>() > MAX_ARGS {
        true => Err("the environment is too long"),
        false => Ok(()),
    }
}

/// Refuses code that is too long.
pub fn check_code(code: &[u8]) -> Result<(), &'static str> {
    if code.len() > MAX_CODE { Err("the code is too long: put it into a file") } else { Ok(()) }
}

fn failed(code: Code, errno: Option<i32>, message: &str) -> Outcome {
    Outcome::Failed(Failure { code, errno, path: None, message: message.to_owned() })
}

fn no_session() -> Outcome {
    failed(Code::Io, Some(libc::ENOENT), "there is no session of that name")
}
