//! The state that all jobs use: connections, deadlines, control groups, threads, and the tables of
//! processes.
//!
//! It knows no job. A job is given it for each thing that the job does.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pvmm_guest_agent::Kind;
use pvmm_guest_agent::message::{Answer, Code, Outcome, Shutdown, Started};

use crate::cgroup::{Cgroup, Cgroups};
use crate::connection::{Connection, StreamId};
use crate::deadlines::Deadlines;
use crate::defaults::Defaults;
use crate::detached::DetachedProcess;
use crate::interpreter::Sessions;
use crate::listener::Listener;
use crate::oom::OomLog;
use crate::pool::Pool;
use crate::refresh::Identity;
use crate::spawn::Spawner;
use crate::sys::{self, Epoll};
use crate::token::Token;

/// The configuration of the agent.
pub struct Settings {
    pub listener: Listener,
    /// The listener that also serves freeze, refresh and thaw.
    pub control: Option<Listener>,
    pub cgroups: Option<Cgroups>,
    /// Whether the agent is the guest's first process, and shuts the guest down on request.
    pub init: bool,
    /// Open-file limits of the started processes.
    pub open_files: libc::rlimit,
}

/// Why the event loop ended.
pub enum Ended {
    /// A client or signal asked to shut the guest down.
    Shutdown(Shutdown),
    /// The agent, as a service, was asked to stop.
    Stopped,
}

pub struct Agent {
    pub epoll: Epoll,
    pub settings: Settings,
    pub connections: BTreeMap<u64, Connection>,
    /// The jobs of started processes.
    pub pids: BTreeMap<libc::pid_t, u64>,
    pub deadlines: Deadlines,
    pub runnable: VecDeque<Token>,
    pub spawner: Spawner,
    pub pool: Pool,
    pub identity: Identity,
    pub defaults: Defaults,
    pub oom: OomLog,
    pub sessions: Sessions,
    /// The detached processes, by their jobs.
    pub detached: BTreeMap<u64, DetachedProcess>,
    pub null: Arc<OwnedFd>,
    pub scratch: Vec<u8>,
    pub ending: Option<Ended>,
    next_id: u64,
}

impl Agent {
    pub fn new(settings: Settings) -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
            settings,
            connections: BTreeMap::new(),
            pids: BTreeMap::new(),
            deadlines: Deadlines::default(),
            runnable: VecDeque::new(),
            spawner: Spawner::new(),
            pool: Pool::new()?,
            identity: Identity::new(),
            defaults: Defaults::read(),
            oom: OomLog::open(),
            sessions: Sessions::default(),
            detached: BTreeMap::new(),
            null: Arc::new(sys::open(c"/dev/null", libc::O_RDWR, 0)?),
            scratch: Vec::new(),
            ending: None,
            next_id: 1,
        })
    }

    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub fn watch(&self, fd: &OwnedFd, token: Token) -> io::Result<()> {
        self.epoll.watch_edges(fd, token.bits())
    }

    /// Returns the number of running execs, detached or not.
    pub fn execs(&self) -> u32 {
        (self.pids.len() - self.sessions.len()) as u32
    }

    pub fn is_frozen(&self) -> bool {
        self.settings.cgroups.as_ref().is_some_and(Cgroups::is_frozen)
    }

    pub fn retire(&mut self, cgroup: Option<Cgroup>) {
        if let (Some(cgroups), Some(cgroup)) = (&mut self.settings.cgroups, cgroup) {
            cgroups.retire(cgroup);
        }
    }

    /// Schedules a job's outputs, after credit or room has become available.
    pub fn wake_outputs(&mut self, job: u64) {
        self.runnable.extend([Token::Output(job), Token::Error(job)]);
    }

    /// Tells a client that the work of its stream has started.
    pub fn started(&mut self, stream: StreamId, started: &Started) {
        if let Some(connection) = self.connections.get_mut(&stream.connection) {
            connection.out.control(Kind::Started, stream.number, started);
        }
    }

    pub fn answer(&mut self, stream: StreamId, answer: Answer) {
        self.conclude(stream, &Outcome::Ok(answer));
    }

    pub fn refuse(&mut self, stream: StreamId, code: Code, why: &str) {
        self.fail(stream, code, None, why);
    }

    pub fn fail(&mut self, stream: StreamId, code: Code, errno: Option<i32>, why: &str) {
        self.conclude(stream, &Outcome::failed(code, errno, why));
    }

    /// Sends a stream's last frame and forgets the stream.
    pub fn conclude(&mut self, stream: StreamId, outcome: &Outcome) {
        if let Some(connection) = self.connections.get_mut(&stream.connection) {
            connection.streams.remove(&stream.number);
            connection.out.control(Kind::Done, stream.number, outcome);
        }
    }
}
