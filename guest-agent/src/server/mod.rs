//! The agent's event loop: sockets, pipes, signals and deadlines, each when it is ready.
//!
//! A single thread owns every connection and job, so nothing is locked and nothing wakes up idly.

mod frames;

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{HANDSHAKE_TIME, MAX_CONNECTIONS};
use pvmm_guest_agent::message::{Code, Shutdown, ShutdownHow, Started, Welcome};

use crate::agent::{Agent, Ended, Settings};
use crate::cgroup::Cgroups;
use crate::channel::Pumped;
use crate::connection::Connection;
use crate::job::Jobs;
use crate::pool::WorkerReport;
use crate::requests;
use crate::sys::{self, Ready};
use crate::token::Token;

/// Connections beyond the limit that are reserved for the control port.
const CONTROL_RESERVE: usize = 8;
/// The pause after an accept that failed for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub struct Server {
    agent: Agent,
    jobs: Jobs,
    signals: OwnedFd,
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
        let agent = Agent::new(settings)?;
        let (epoll, settings) = (&agent.epoll, &agent.settings);
        epoll.watch_level(settings.listener.fd(), Token::Listener.bits())?;
        if let Some(control) = &settings.control {
            epoll.watch_level(control.fd(), Token::Control.bits())?;
        }
        epoll.watch_level(&signals, Token::Signals.bits())?;
        epoll.watch_level(agent.pool.wake(), Token::Workers.bits())?;
        Ok(Self { agent, jobs: Jobs::default(), signals })
    }

    /// Returns what a client is told about the agent when it connects.
    pub fn welcome(&self) -> Welcome {
        requests::welcome(&self.agent)
    }

    /// Serves until it is asked to end.
    pub fn run(&mut self) -> io::Result<Ended> {
        let mut ready = Vec::new();
        loop {
            self.flush_all();
            if let Some(ended) = self.agent.ending.take() {
                return Ok(ended);
            }
            if self.agent.runnable.is_empty()
                && let Some(cgroups) = &mut self.agent.settings.cgroups
            {
                // Everything is sent, so no client waits for the cleanup.
                cgroups.tidy();
            }
            self.agent.epoll.wait(self.patience(), &mut ready)?;
            for event in &ready {
                self.note(event);
            }
            // Before the pipes: a worker reports its start before it writes.
            self.take_worker_reports();
            self.fire_deadlines();
            for _ in 0..self.agent.runnable.len() {
                let Some(token) = self.agent.runnable.pop_front() else { break };
                self.advance(token);
            }
        }
    }

    /// Ends every job, for a service that stops.
    pub fn close(mut self) {
        let ids: Vec<u64> = self.agent.connections.keys().copied().collect();
        for id in ids {
            self.jobs.drop_connection(&mut self.agent, id);
        }
        self.jobs.kill_all(&self.agent);
        if let Some(cgroups) = self.agent.settings.cgroups.take() {
            cgroups.close();
        }
    }

    fn patience(&self) -> Option<Duration> {
        if !self.agent.runnable.is_empty() {
            return Some(Duration::ZERO);
        }
        let lingering = self.agent.connections.values().filter(|it| it.writable);
        let lingering = lingering.filter_map(|connection| connection.out.due());
        let first = self.agent.deadlines.first();
        let untidy = self.agent.settings.cgroups.as_ref().and_then(Cgroups::tidy_at);
        let first = lingering.chain(first).chain(untidy).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    fn note(&mut self, event: &Ready) {
        let token = Token::from_bits(event.token);
        match token {
            Token::Listener => self.accept_all(false),
            Token::Control => self.accept_all(true),
            Token::Signals => self.take_signals(),
            Token::Workers => self.agent.pool.clear_wake(),
            Token::Connection(id) => {
                let Some(connection) = self.agent.connections.get_mut(&id) else { return };
                connection.readable |= event.readable;
                connection.hung_up |= event.hung_up;
                connection.writable |= event.writable;
                self.agent.runnable.push_back(token);
            }
            Token::Input(id) | Token::Output(id) | Token::Error(id) => {
                if self.jobs.get_mut(id).is_some_and(|job| job.note(token, event)) {
                    self.agent.runnable.push_back(token);
                }
            }
            Token::Job(_) => {}
        }
    }

    fn advance(&mut self, token: Token) {
        match token {
            Token::Connection(id) if self.read_connection(id) == Pumped::More => {
                self.agent.runnable.push_back(token);
            }
            Token::Input(id) => {
                self.jobs.step(&mut self.agent, id, |job, agent| job.advance_input(agent));
            }
            Token::Output(id) | Token::Error(id) => {
                self.jobs.step(&mut self.agent, id, |job, agent| job.advance_output(token, agent));
            }
            _ => {}
        }
    }

    fn accept_all(&mut self, control: bool) {
        loop {
            let listener = self.agent.settings.control.as_ref().filter(|_| control);
            match listener.unwrap_or(&self.agent.settings.listener).accept() {
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
        // Clients that use up all connections must not keep the host from refreshing the guest.
        let most = MAX_CONNECTIONS + if control { CONTROL_RESERVE } else { 0 };
        if self.agent.connections.len() >= most {
            let mut connection = Connection::new(socket);
            connection.say_goodbye(Code::TooMany, "the agent has all the connections it serves");
            return;
        }
        let id = self.agent.new_id();
        if self.agent.watch(&socket, Token::Connection(id)).is_err() {
            return;
        }
        let mut connection = Connection::new(socket);
        connection.control = control;
        let deadline = Instant::now() + HANDSHAKE_TIME;
        self.agent.deadlines.set(Token::Connection(id), Some(deadline));
        self.agent.connections.insert(id, connection);
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
            self.agent.ending = Some(if self.agent.settings.init {
                Ended::Shutdown(Shutdown { how, grace_ms: None })
            } else {
                Ended::Stopped
            });
        }
    }

    fn reap_all(&mut self) {
        while let Some(dead) = sys::reap() {
            if let Some(id) = self.agent.pids.remove(&dead.pid) {
                self.jobs.step(&mut self.agent, id, |job, agent| job.died(&dead, agent));
            }
        }
        if let Some(cgroups) = &mut self.agent.settings.cgroups {
            cgroups.note_deaths();
        }
    }

    fn take_worker_reports(&mut self) {
        while let Some(report) = self.agent.pool.next_report() {
            match report {
                WorkerReport::Started(id, metadata) => {
                    if let Some(job) = self.jobs.get_mut(id) {
                        let started = Started { metadata, ..Started::default() };
                        self.agent.started(job.stream().id, &started);
                    }
                }
                WorkerReport::Done(id, outcome) => {
                    self.jobs.step(&mut self.agent, id, |job, _| job.reported(outcome));
                }
            }
        }
    }

    fn fire_deadlines(&mut self) {
        let now = Instant::now();
        while let Some(token) = self.agent.deadlines.take_passed(now) {
            match token {
                Token::Connection(id) => {
                    self.expel(id, Code::Silent, "a frame was awaited for too long");
                }
                Token::Job(id) => {
                    self.jobs.step(&mut self.agent, id, |job, agent| job.deadline(agent));
                }
                _ => {}
            }
        }
    }

    fn flush_all(&mut self) {
        let mut lost = Vec::new();
        let mut eased = Vec::new();
        for (id, connection) in &mut self.agent.connections {
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
            let Some(connection) = self.agent.connections.get(&id) else { continue };
            if connection.readable {
                self.agent.runnable.push_back(Token::Connection(id));
            }
            for job in connection.streams.values() {
                self.agent.runnable.extend([Token::Output(*job), Token::Error(*job)]);
            }
        }
        for id in lost {
            self.jobs.drop_connection(&mut self.agent, id);
        }
    }
}
