//! A job: the work behind a stream, and what the event loop may ask of it.
//!
//! Every kind of job is a file in `jobs/`. Most have at most one input and two outputs, and one
//! outcome when those have ended, which is what the default methods do.

use std::collections::BTreeMap;

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::message::{Outcome, Signal, WindowSize};
use pvmm_guest_agent::window::WindowError;

use crate::agent::Agent;
use crate::channel::{Pumped, Sink, Source};
use crate::connection::StreamId;
use crate::sys::{Ready, Reaped};
use crate::token::Token;

/// Reads that a job may do before the next gets its turn.
const TURN: usize = 4;

/// The result of what a job has just done.
pub enum Progress {
    /// The job goes on.
    Going,
    /// The job is over, and its client is sent this outcome.
    Ended(Outcome),
    /// The job is over, and nobody waits for its outcome.
    Forgotten,
}

/// The stream of a job: its client, and the agent's ends of the pipes to the work.
pub struct Stream {
    /// The job's own number.
    pub job: u64,
    pub id: StreamId,
    pub sink: Option<Sink>,
    pub sources: Vec<Source>,
    /// The outcome of work on a thread, once that has ended.
    reported: Option<Outcome>,
}

/// The calls that the event loop and a client's frames make to a job.
pub trait Job {
    fn stream(&mut self) -> &mut Stream;

    /// Returns the outcome if the work is over; asked for once all outputs have ended.
    fn outcome(&mut self) -> Option<Outcome> {
        self.stream().reported.take()
    }

    /// Ends the job if its work and its outputs are over.
    fn progress(&mut self) -> Progress {
        let outcome = if self.stream().outputs_ended() { self.outcome() } else { None };
        outcome.map_or(Progress::Going, Progress::Ended)
    }

    /// Notes the readiness of a descriptor, and returns whether the job can advance.
    fn note(&mut self, token: Token, event: &Ready) -> bool {
        self.stream().note(token, event)
    }

    fn advance_input(&mut self, agent: &mut Agent) -> Progress {
        if self.stream().pump_input(agent) { self.progress() } else { Progress::Going }
    }

    fn advance_output(&mut self, token: Token, agent: &mut Agent) -> Progress {
        if self.stream().pump_output(token, agent) { self.progress() } else { Progress::Going }
    }

    /// Handles the job's deadline, which is cleared by then.
    fn deadline(&mut self, _agent: &mut Agent) -> Progress {
        Progress::Going
    }

    /// Handles the death of the process that the job has in `Agent::pids`.
    fn died(&mut self, _dead: &Reaped, _agent: &mut Agent) -> Progress {
        Progress::Going
    }

    /// Takes the outcome that a thread of the pool reports.
    fn reported(&mut self, outcome: Outcome) -> Progress {
        self.stream().reported = Some(outcome);
        self.progress()
    }

    /// Takes credit for an output; returns `None` if the job has no such channel.
    fn grant(&mut self, channel: Channel, bytes: u32) -> Option<Result<(), WindowError>> {
        self.stream().source(channel).map(|source| source.grant(bytes))
    }

    /// Handles the end of the client's input, which the sink has already accepted.
    fn input_ended(&mut self, _agent: &mut Agent) {}

    fn signal(&self, _signal: Signal, _agent: &Agent) {}

    fn resize(&self, _size: WindowSize, _agent: &Agent) -> Result<(), &'static str> {
        Err("only a process has a terminal")
    }

    /// Ends the work at the client's request; the outcome is still sent. Work on a thread sees its
    /// pipe break, and its report then ends the stream.
    fn cancel(&mut self, _agent: &mut Agent) -> Progress {
        self.stream().close();
        self.progress()
    }

    /// Ends the work of a client that has gone. Work on a thread sees its pipe break; its report is
    /// ignored.
    fn abandon(&mut self, _agent: &mut Agent) -> Progress {
        Progress::Forgotten
    }

    /// Gives back what the job had of the agent; the last call.
    fn release(self: Box<Self>, _agent: &mut Agent) {}

    /// Kills the job's processes, for a service that stops.
    fn kill(&self, _agent: &Agent) {}

    /// Returns whether the stream is one to a port, of which there may be more.
    fn is_to_port(&self) -> bool {
        false
    }
}

impl Stream {
    pub fn new(job: u64, id: StreamId) -> Self {
        Self { job, id, sink: None, sources: Vec::new(), reported: None }
    }

    fn source(&mut self, channel: Channel) -> Option<&mut Source> {
        self.sources.iter_mut().find(|source| source.channel == channel)
    }

    fn source_of(&mut self, token: Token) -> Option<&mut Source> {
        match token {
            Token::Output(_) => self.source(Channel::Output),
            Token::Error(_) => self.source(Channel::Error),
            _ => None,
        }
    }

    fn outputs_ended(&self) -> bool {
        self.sources.iter().all(Source::has_ended)
    }

    /// Closes the agent's ends of all pipes.
    pub fn close(&mut self) {
        self.sink = None;
        self.sources.clear();
    }

    fn note(&mut self, token: Token, event: &Ready) -> bool {
        if matches!(token, Token::Input(_)) {
            // Without a sink it is a socket that is connecting.
            if let Some(sink) = self.sink.as_mut().filter(|_| event.writable) {
                sink.set_ready();
            }
            return event.writable;
        }
        let source = self.source_of(token);
        source.map(|source| source.set_ready(event.hung_up)).is_some()
    }

    /// Writes the client's bytes to the work, and returns whether the input is closed.
    pub fn pump_input(&mut self, agent: &mut Agent) -> bool {
        let connection = agent.connections.get_mut(&self.id.connection);
        let (Some(sink), Some(connection)) = (&mut self.sink, connection) else { return false };
        sink.pump(&mut connection.out, self.id.number);
        sink.is_closed()
    }

    /// Sends output to the client, and returns whether the output has ended.
    fn pump_output(&mut self, token: Token, agent: &mut Agent) -> bool {
        let id = self.id;
        let Some(connection) = agent.connections.get_mut(&id.connection) else { return false };
        let Some(source) = self.source_of(token) else { return false };
        for _ in 0..TURN {
            let pumped = source.pump(&mut connection.out, id.number, &mut agent.scratch);
            if pumped == Pumped::Waiting {
                connection.pressed |= !connection.out.has_room();
                return source.has_ended();
            }
        }
        agent.runnable.push_back(token);
        false
    }
}

/// All jobs, by their numbers.
#[derive(Default)]
pub struct Jobs {
    by_id: BTreeMap<u64, Box<dyn Job>>,
}

impl Jobs {
    pub fn get_mut(&mut self, id: u64) -> Option<&mut (dyn Job + 'static)> {
        self.by_id.get_mut(&id).map(|job| &mut **job)
    }

    /// Adds a job, in place of another of the same number.
    pub fn insert(&mut self, mut job: impl Job + 'static) {
        self.by_id.insert(job.stream().job, Box::new(job));
    }

    /// Adds a job whose client sends and receives frames for it.
    pub fn open(&mut self, agent: &mut Agent, mut job: impl Job + 'static) {
        let Stream { id, job: number, .. } = *job.stream();
        if let Some(connection) = agent.connections.get_mut(&id.connection) {
            connection.streams.insert(id.number, number);
        }
        self.insert(job);
    }

    /// Lets a job do something, and ends it if it is over by that.
    pub fn step(
        &mut self,
        agent: &mut Agent,
        id: u64,
        act: impl FnOnce(&mut dyn Job, &mut Agent) -> Progress,
    ) {
        if let Some(job) = self.get_mut(id) {
            let progress = act(job, agent);
            self.settle(agent, id, progress);
        }
    }

    /// Ends a job, unless it goes on.
    pub fn settle(&mut self, agent: &mut Agent, id: u64, progress: Progress) {
        if matches!(progress, Progress::Going) {
            return;
        }
        agent.deadlines.set(Token::Job(id), None);
        let Some(mut job) = self.by_id.remove(&id) else { return };
        let stream = job.stream().id;
        job.release(agent);
        if let Progress::Ended(outcome) = progress {
            agent.conclude(stream, &outcome);
        }
    }

    /// Forgets a connection and ends its jobs.
    pub fn drop_connection(&mut self, agent: &mut Agent, id: u64) {
        agent.deadlines.set(Token::Connection(id), None);
        let Some(connection) = agent.connections.remove(&id) else { return };
        for job in connection.streams.into_values() {
            self.step(agent, job, |job, agent| job.abandon(agent));
        }
    }

    /// Counts the jobs among these that are streams to ports, or those that are not.
    pub fn count<'a>(&self, ids: impl Iterator<Item = &'a u64>, to_port: bool) -> usize {
        let is_to_port = |id| self.by_id.get(id).is_some_and(|job| job.is_to_port());
        ids.filter(|id| is_to_port(*id) == to_port).count()
    }

    pub fn kill_all(&self, agent: &Agent) {
        self.by_id.values().for_each(|job| job.kill(agent));
    }
}
