//! The agent's one loop: sockets, pipes, signals and deadlines, each when it is ready.
//! A single thread owns every connection and job, so nothing is locked and nothing wakes idly.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{FRAME_TIME, HANDSHAKE_TIME, HELLO_TIME};
use pvmm_guest_agent::limits::{MAX_CONNECTIONS, MAX_PORT_STREAMS, MAX_STREAMS};
use pvmm_guest_agent::message::{Code, Shutdown, ShutdownHow};

use crate::cgroup::Cgroups;
use crate::channel::Step;
use crate::connection::Connection;
use crate::interpreter::Sessions;
use crate::job::{Job, Work};
use crate::listener::Listener;
use crate::oom::OomLog;
use crate::pool::Pool;
use crate::refresh::Identity;
use crate::spawn::Spawner;
use crate::sys::{self, Epoll, Ready};
use crate::token::Token;

/// Reads a job or connection may do before the next has its turn.
const TURN: usize = 4;
/// Connections beyond the cap that only the control port may use.
const CONTROL_RESERVE: usize = 8;
/// How long a socket that could not be accepted for lack of descriptors is left alone.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the agent is told when it starts.
pub struct Settings {
    pub listener: Listener,
    /// Where freeze, refresh and thaw are taken as well.
    pub control: Option<Listener>,
    pub cgroups: Option<Cgroups>,
    /// We are the guest's first process, and end it when asked.
    pub init: bool,
    /// Open-file limits for what we start.
    pub open_files: libc::rlimit,
}

/// Why the loop ended.
pub enum Ended {
    /// A client or signal asked for the end of the guest.
    Shutdown(Shutdown),
    /// As a service: our own end was asked for.
    Stopped,
}

pub struct Server {
    pub(crate) epoll: Epoll,
    pub(crate) settings: Settings,
    signals: OwnedFd,
    pub(crate) connections: BTreeMap<u64, Connection>,
    pub(crate) jobs: BTreeMap<u64, Job>,
    pub(crate) pids: BTreeMap<libc::pid_t, u64>,
    pub(crate) deadlines: BTreeSet<(Instant, Token)>,
    pub(crate) runnable: VecDeque<Token>,
    pub(crate) spawner: Spawner,
    pub(crate) pool: Pool,
    pub(crate) identity: Identity,
    pub(crate) oom: OomLog,
    pub(crate) sessions: Sessions,
    pub(crate) null: Arc<OwnedFd>,
    pub(crate) scratch: Vec<u8>,
    pub(crate) ending: Option<Ended>,
    next_id: u64,
}

impl Server {
    pub fn new(settings: Settings) -> io::Result<Self> {
        sys::default_signals();
        let signals = sys::signal_reader(&[
            libc::SIGCHLD,
            libc::SIGTERM,
            libc::SIGINT,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGRTMIN() + 4,
            libc::SIGRTMIN() + 5,
        ])?;
        let epoll = Epoll::new()?;
        let pool = Pool::new()?;
        epoll.watch_level(settings.listener.fd(), Token::Listener.bits())?;
        if let Some(control) = &settings.control {
            epoll.watch_level(control.fd(), Token::Control.bits())?;
        }
        epoll.watch_level(&signals, Token::Signals.bits())?;
        epoll.watch_level(pool.wake(), Token::Workers.bits())?;
        Ok(Self {
            epoll,
            settings,
            signals,
            connections: BTreeMap::new(),
            jobs: BTreeMap::new(),
            pids: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            runnable: VecDeque::new(),
            spawner: Spawner::new(),
            pool,
            identity: Identity::new(),
            oom: OomLog::open(),
            sessions: Sessions::default(),
            null: Arc::new(sys::open(c"/dev/null", libc::O_RDWR, 0)?),
            scratch: Vec::new(),
            ending: None,
            next_id: 1,
        })
    }

    /// Serves until told to end.
    pub fn run(&mut self) -> io::Result<Ended> {
        let mut ready = Vec::new();
        loop {
            self.flush_all();
            if let Some(ended) = self.ending.take() {
                return Ok(ended);
            }
            if self.runnable.is_empty()
                && let Some(cgroups) = &mut self.settings.cgroups
            {
                // Everything is on its way: whoever waits does not wait for this.
                cgroups.tidy();
            }
            self.epoll.wait(self.patience(), &mut ready)?;
            for event in &ready {
                self.note(event);
            }
            // Before the pipes: a worker says what it has begun before it writes.
            self.take_worker_reports();
            self.fire_deadlines();
            for _ in 0..self.runnable.len() {
                let Some(token) = self.runnable.pop_front() else { break };
                self.advance(token);
            }
        }
    }

    /// Ends every job, for a service that stops.
    pub fn close(mut self) {
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        for id in ids {
            self.drop_connection(id);
        }
        self.sessions.kill_all();
        for job in self.jobs.values() {
            match &job.work {
                Work::Process(process) if !process.is_reaped() => process.kill_tree(),
                _ => {}
            }
        }
        if let Some(cgroups) = self.settings.cgroups.take() {
            cgroups.close();
        }
    }

    pub(crate) fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn watch(&self, fd: &OwnedFd, token: Token) -> io::Result<()> {
        self.epoll.watch_edges(fd, token.bits())
    }

    fn patience(&self) -> Option<Duration> {
        if !self.runnable.is_empty() {
            return Some(Duration::ZERO);
        }
        let lingering = self.connections.values().filter(|it| it.writable);
        let lingering = lingering.filter_map(|connection| connection.out.due());
        let first = self.deadlines.first().map(|(first, _)| *first);
        let untidy = self.settings.cgroups.as_ref().and_then(Cgroups::tidy_at);
        let first = lingering.chain(first).chain(untidy).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    fn note(&mut self, event: &Ready) {
        let token = Token::from_bits(event.token);
        match token {
            Token::Listener => self.accept_all(false),
            Token::Control => self.accept_all(true),
            Token::Signals => self.take_signals(),
            Token::Workers => self.pool.clear_wake(),
            Token::Connection(id) => {
                let Some(connection) = self.connections.get_mut(&id) else { return };
                connection.readable |= event.readable;
                connection.hung_up |= event.hung_up;
                connection.writable |= event.writable;
                self.runnable.push_back(token);
            }
            Token::Input(id) => {
                let job = self.jobs.get_mut(&id).filter(|_| event.writable);
                let Some(job) = job else { return };
                // Without a sink it is a connection that was begun.
                if let Some(sink) = &mut job.sink {
                    sink.set_ready();
                }
                self.runnable.push_back(token);
            }
            Token::Output(id) | Token::Error(id) => {
                let Some(job) = self.jobs.get_mut(&id) else { return };
                if job.outliving().is_some() {
                    self.runnable.push_back(token);
                } else if let Some(source) = job.source_of(token) {
                    source.set_ready(event.hung_up);
                    self.runnable.push_back(token);
                }
            }
            Token::Job(_) => {}
        }
    }

    fn advance(&mut self, token: Token) {
        match token {
            Token::Connection(id) if self.read_connection(id) == Step::More => {
                self.runnable.push_back(token);
            }
            Token::Input(id) => self.advance_input(id),
            Token::Output(id) | Token::Error(id) => self.advance_output(id, token),
            _ => {}
        }
    }

    fn advance_input(&mut self, id: u64) {
        if self.advance_connect(id) {
            return;
        }
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let connection = job.connection.and_then(|id| self.connections.get_mut(&id));
        if let (Some(sink), Some(connection)) = (&mut job.sink, connection) {
            sink.pump(&mut connection.out, job.stream);
            if sink.is_closed() {
                self.finish_if_over(id);
            }
        }
    }

    pub(crate) fn advance_output(&mut self, id: u64, token: Token) {
        if self.advance_detached(id, token) || self.advance_follower(id) {
            return;
        }
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(connection) = job.connection.and_then(|id| self.connections.get_mut(&id)) else {
            return;
        };
        let stream = job.stream;
        let Some(source) = job.source_of(token) else { return };
        for _ in 0..TURN {
            if source.pump(&mut connection.out, stream, &mut self.scratch) == Step::Waiting {
                connection.pressed |= !connection.out.has_room();
                if source.has_ended() {
                    self.finish_if_over(id);
                }
                return;
            }
        }
        self.runnable.push_back(token);
    }

    /// Puts a job's outputs in line, after credit or room has come.
    pub(crate) fn wake_outputs(&mut self, id: u64) {
        self.runnable.push_back(Token::Output(id));
        self.runnable.push_back(Token::Error(id));
    }

    fn accept_all(&mut self, control: bool) {
        loop {
            let listener = self.settings.control.as_ref().filter(|_| control);
            match listener.unwrap_or(&self.settings.listener).accept() {
                Ok(Some(socket)) => self.admit(socket, control),
                Ok(None) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => {
                    // Out of descriptors or memory: do not spin on the waiting client.
                    std::thread::sleep(ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn admit(&mut self, socket: OwnedFd, control: bool) {
        // Whoever has taken all connections must not keep the host from refreshing the guest.
        let most = MAX_CONNECTIONS + if control { CONTROL_RESERVE } else { 0 };
        if self.connections.len() >= most {
            let mut connection = Connection::new(socket);
            connection.say_goodbye(Code::TooMany, "the agent has all the connections it serves");
            return;
        }
        let id = self.new_id();
        if self.watch(&socket, Token::Connection(id)).is_err() {
            return;
        }
        let mut connection = Connection::new(socket);
        connection.control = control;
        let deadline = Instant::now() + HANDSHAKE_TIME;
        connection.deadline = Some(deadline);
        self.deadlines.insert((deadline, Token::Connection(id)));
        self.connections.insert(id, connection);
    }

    fn take_signals(&mut self) {
        while let Some(signal) = sys::next_signal(&self.signals) {
            let how = match signal {
                libc::SIGCHLD => {
                    self.reap_all();
                    continue;
                }
                libc::SIGUSR1 | libc::SIGUSR2 => ShutdownHow::Poweroff,
                other if other == libc::SIGRTMIN() + 4 => ShutdownHow::Poweroff,
                _ => ShutdownHow::Reboot,
            };
            self.ending = Some(if self.settings.init {
                Ended::Shutdown(Shutdown { how, grace_ms: None })
            } else {
                Ended::Stopped
            });
        }
    }

    fn reap_all(&mut self) {
        while let Some(dead) = sys::reap() {
            if let Some(id) = self.pids.remove(&dead.pid) {
                self.process_died(id, &dead);
            } else {
                self.session_died(&dead);
            }
        }
        if let Some(cgroups) = &mut self.settings.cgroups {
            cgroups.note_deaths();
        }
    }

    fn fire_deadlines(&mut self) {
        let now = Instant::now();
        while let Some(&(at, token)) = self.deadlines.first().filter(|(at, _)| *at <= now) {
            self.deadlines.remove(&(at, token));
            match token {
                Token::Connection(id) => {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.say_goodbye(Code::Silent, "a frame was awaited for too long");
                        self.drop_connection(id);
                    }
                }
                Token::Job(id) => self.job_deadline(id),
                _ => {}
            }
        }
    }

    /// Moves the one deadline of a connection or job.
    pub(crate) fn set_deadline(&mut self, token: Token, new: Option<Instant>) {
        let slot = match token {
            Token::Connection(id) => self.connections.get_mut(&id).map(|it| &mut it.deadline),
            Token::Job(id) => self.jobs.get_mut(&id).map(|it| &mut it.deadline),
            _ => None,
        };
        let Some(slot) = slot else { return };
        if let Some(old) = std::mem::replace(slot, new) {
            self.deadlines.remove(&(old, token));
        }
        if let Some(new) = new {
            self.deadlines.insert((new, token));
        }
    }

    /// Sends what one connection has waiting; `flush_all` finds out if it is lost.
    pub(crate) fn flush(&mut self, id: u64) {
        if let Some(connection) = self.connections.get_mut(&id).filter(|c| c.writable) {
            connection.writable = connection.out.flush(&connection.socket).unwrap_or(true);
        }
    }

    fn flush_all(&mut self) {
        let mut lost = Vec::new();
        let mut eased = Vec::new();
        for (id, connection) in &mut self.connections {
            if !connection.writable || !connection.out.is_due() {
                continue;
            }
            match connection.out.flush(&connection.socket) {
                Ok(all) => connection.writable = all,
                Err(_) => lost.push(*id),
            }
            if connection.pressed && connection.out.has_room() {
                connection.pressed = false;
                eased.push(*id);
            }
        }
        for id in eased {
            let Some(connection) = self.connections.get(&id) else { continue };
            if connection.readable {
                self.runnable.push_back(Token::Connection(id));
            }
            for job in connection.streams.values() {
                self.runnable.push_back(Token::Output(*job));
                self.runnable.push_back(Token::Error(*job));
            }
        }
        for id in lost {
            self.drop_connection(id);
        }
    }

    /// Forgets a connection and ends what was attached to it.
    pub(crate) fn drop_connection(&mut self, id: u64) {
        self.set_deadline(Token::Connection(id), None);
        let Some(connection) = self.connections.remove(&id) else { return };
        for job in connection.streams.into_values() {
            self.abandon(job);
        }
    }

    /// A frame has begun, or has been finished: moves the deadline for its rest.
    pub(crate) fn time_frame(&mut self, id: u64, progressed: bool) {
        let Some(connection) = self.connections.get(&id) else { return };
        let begun = connection.decoder.in_frame();
        if !connection.greeted {
            // It may take its time before it says anything, but not over the words of its hello.
            let rest = begun.then(|| Instant::now() + HELLO_TIME);
            if rest.is_some_and(|rest| connection.deadline.is_none_or(|at| rest < at)) {
                self.set_deadline(Token::Connection(id), rest);
            }
            return;
        }
        if begun && !progressed && connection.deadline.is_some() {
            return;
        }
        let deadline = begun.then(|| Instant::now() + FRAME_TIME);
        self.set_deadline(Token::Connection(id), deadline);
    }

    /// Ends a connection whose client broke the rules, saying why.
    pub(crate) fn expel(&mut self, id: u64, code: Code, why: &str) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.say_goodbye(code, why);
            self.drop_connection(id);
        }
    }

    /// Whether another stream, to a port or for other work, fits on a connection.
    pub(crate) fn has_stream_left(&self, id: u64, to_port: bool) -> bool {
        let Some(connection) = self.connections.get(&id) else { return false };
        let most = if to_port { MAX_PORT_STREAMS } else { MAX_STREAMS };
        let is_port = |job| self.jobs.get(job).is_some_and(|job| matches!(job.work, Work::Tcp(_)));
        connection.streams.len() < MAX_STREAMS
            || connection.streams.values().filter(|job| is_port(job) == to_port).count() < most
    }
}
