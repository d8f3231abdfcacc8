//! Interpreter sessions: processes that keep their state from call to call and belong to no client.
//!
//! A session is found by its name, so it outlives connections, and with them forks and restores.

pub mod run;
pub mod spare;
pub mod start;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pvmm_guest_agent::limits::{MAX_ARGS, MAX_CODE, MAX_SESSION_NAME};
use pvmm_guest_agent::message::{ExecStatus, Language, OpenSession, SessionInfo};

use crate::cgroup::{self, Cgroup, Freezer};
use crate::sys;

const PYTHON: &str = include_str!("driver.py");
const NODE: &str = include_str!("driver.js");
/// How long a call waits for the end of a previous call whose client has gone.
const ABANDONED_TIME: Duration = Duration::from_secs(10);

/// One interpreter, shared by the event loop and the thread of a call.
pub struct Session {
    /// Not set while the session is a spare one.
    name: OnceLock<String>,
    pub language: Language,
    pid: libc::pid_t,
    /// `None` once the interpreter is dead.
    cgroup: Mutex<Option<Cgroup>>,
    freezer: Option<Freezer>,
    state: Mutex<SessionState>,
    changed: Condvar,
    runs: AtomicU64,
    /// The client of the running call has gone.
    abandoned: AtomicBool,
}

#[derive(Default)]
struct SessionState {
    /// `None` while a call uses them, and when the session is over.
    ends: Option<SessionEnds>,
    version: String,
    ended: Option<ExecStatus>,
}

/// The agent's ends of the interpreter's descriptors.
pub struct SessionEnds {
    pub control: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    /// Readable when the interpreter is dead, even if other processes hold its pipes.
    pub process: OwnedFd,
}

/// All sessions of the guest.
#[derive(Default)]
pub struct Sessions {
    by_name: BTreeMap<String, Arc<Session>>,
    /// A session that waits for a name.
    spare: Option<Arc<Session>>,
    /// Sessions that are closed and not yet reaped.
    closing: Vec<Arc<Session>>,
    next: u64,
}

impl Session {
    pub fn new(
        language: Language,
        pid: libc::pid_t,
        cgroup: Option<Cgroup>,
        freezer: Option<Freezer>,
        ends: SessionEnds,
    ) -> Self {
        Self {
            name: OnceLock::new(),
            language,
            pid,
            cgroup: Mutex::new(cgroup),
            freezer,
            state: Mutex::new(SessionState { ends: Some(ends), ..SessionState::default() }),
            changed: Condvar::new(),
            runs: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the condition holds, at most for the given time.
    fn wait_while(
        &self,
        patience: Duration,
        condition: impl FnMut(&mut SessionState) -> bool,
    ) -> MutexGuard<'_, SessionState> {
        let waited = self.changed.wait_timeout_while(self.lock(), patience, condition);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Takes the ends for a call; returns `None` while another call has them, or when the session
    /// is over.
    fn take(&self) -> Option<SessionEnds> {
        let mut state = self.wait_while(ABANDONED_TIME, |state| {
            state.ends.is_none() && state.ended.is_none() && self.abandoned.load(Ordering::Acquire)
        });
        state.ends.take()
    }

    fn give_back(&self, ends: SessionEnds) {
        self.abandoned.store(false, Ordering::Release);
        self.lock().ends = Some(ends);
        self.changed.notify_all();
    }

    /// Returns how the interpreter ended; waits a little for the event loop to reap it.
    fn wait_ended(&self, patience: Duration) -> Option<ExecStatus> {
        self.wait_while(patience, |state| state.ended.is_none()).ended
    }

    /// Interrupts the process and its group, as Ctrl-C would.
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

    /// Notes how the interpreter ended, and returns the control group that it leaves.
    pub fn set_ended(&self, status: ExecStatus) -> Option<Cgroup> {
        // Processes that it started are killed, too: nothing could reach them any more.
        self.kill();
        self.lock().ended = Some(status);
        self.changed.notify_all();
        self.cgroup.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns whether the workload is frozen, so that waiting proves nothing.
    fn is_frozen(&self) -> bool {
        self.freezer.as_ref().is_some_and(Freezer::is_frozen)
    }

    pub fn info(&self) -> SessionInfo {
        let state = self.lock();
        SessionInfo {
            session: self.name.get().cloned().unwrap_or_default(),
            language: self.language,
            version: state.version.clone(),
            pid: self.pid as u32,
            busy: state.ends.is_none(),
            runs: self.runs.load(Ordering::Relaxed),
        }
    }
}

impl Sessions {
    pub fn get(&self, name: &str) -> Option<&Arc<Session>> {
        self.by_name.get(name)
    }

    /// Returns the number of sessions that have a name.
    pub fn open(&self) -> usize {
        self.by_name.len()
    }

    /// Returns the number of sessions whose process is not reaped.
    pub fn len(&self) -> usize {
        self.by_name.len() + self.closing.len() + usize::from(self.spare.is_some())
    }

    pub fn list(&self) -> Vec<SessionInfo> {
        self.by_name.values().map(|session| session.info()).collect()
    }

    pub fn new_name(&mut self) -> String {
        loop {
            self.next += 1;
            let name = format!("s{}", self.next);
            if !self.by_name.contains_key(&name) {
                return name;
            }
        }
    }

    pub fn insert(&mut self, name: String, session: Arc<Session>) {
        let name = session.name.get_or_init(|| name).clone();
        self.by_name.insert(name, session);
    }

    /// Returns the session that waits for a name.
    pub fn spare(&self) -> Option<&Arc<Session>> {
        self.spare.as_ref()
    }

    pub fn set_spare(&mut self, session: Arc<Session>) {
        self.spare = Some(session);
    }

    /// Takes the spare session, if it can become what a request asks for.
    pub fn take_spare(&mut self, request: &OpenSession) -> Option<Arc<Session>> {
        let fits = |spare: &mut Arc<Session>| {
            spare.language == request.language && spare::fits(request) && !spare.info().busy
        };
        self.spare.take_if(fits)
    }

    /// Kills a session, and returns whether there was one. The name is free at once; a running call
    /// ends when the process does.
    pub fn close(&mut self, name: &str) -> bool {
        let Some(session) = self.by_name.remove(name) else { return false };
        session.kill();
        self.closing.push(session);
        true
    }

    /// Removes the session of a process that is reaped.
    pub fn remove(&mut self, pid: libc::pid_t) {
        self.closing.retain(|session| session.pid != pid);
        self.by_name.retain(|_, session| session.pid != pid);
        self.spare.take_if(|session| session.pid == pid);
    }
}

/// Returns the program of a language, the option for code, and the driver as code.
pub fn driver(language: Language) -> (&'static str, &'static str, &'static str) {
    match language {
        Language::Python => ("python3", "-c", PYTHON),
        Language::Node => ("node", "-e", NODE),
    }
}

/// Refuses an invalid session name.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if !name.is_empty() && name.len() <= MAX_SESSION_NAME && name.bytes().all(allowed) {
        Ok(())
    } else {
        Err("a session's name is 1 to 64 letters, digits, '-', '_' or '.'")
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
    if names.map(|word| word.len() + 1).sum::<usize>() > MAX_ARGS {
        Err("the environment is too long")
    } else {
        Ok(())
    }
}

/// Refuses code that is too long.
pub fn check_code(code: &[u8]) -> Result<(), &'static str> {
    if code.len() > MAX_CODE { Err("the code is too long: put it into a file") } else { Ok(()) }
}
