//! A stream that is attached to a detached process: its kept output, and then what follows.

use std::os::fd::OwnedFd;

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::message::{
    Answer, Attach, Code, ExecReport, Outcome, OutputCount, Replay, Signal, Started, WindowSize,
};
use pvmm_guest_agent::window::WindowError;

use super::detached::no_such_process;
use crate::agent::Agent;
use crate::channel::Sink;
use crate::connection::StreamId;
use crate::detached::DetachedProcess;
use crate::job::{Job, Jobs, Progress, Stream};
use crate::ring::Cursor;
use crate::token::Token;

struct AttachedJob {
    stream: Stream,
    process: u64,
    output: Cursor,
    error: Cursor,
}

pub fn start(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, request: Attach) {
    let job = agent.new_id();
    let Some(it) = agent.detached.get_mut(&request.id) else {
        return agent.conclude(id, &no_such_process(request.id));
    };
    it.attached.push(job);
    let output = Cursor::new(it.ring(Channel::Output), request.stdout_from);
    let error = Cursor::new(it.ring(Channel::Error), request.stderr_from);
    let terminal = it.has_one_output();
    let replay = Replay { stdout_from: output.at(), stderr_from: error.at(), terminal };
    let pid = Some(it.process.pid as u32);
    let input = it.input.as_ref().filter(|_| request.input);
    let input = input.and_then(|input| input.try_clone().ok());
    let mut stream = Stream::new(job, id);
    stream.sink = input
        .filter(|fd| agent.watch(fd, Token::Input(job)).is_ok())
        .map(|fd: OwnedFd| if terminal { Sink::terminal(fd) } else { Sink::new(fd, None) });
    let has_input = stream.sink.is_some();
    jobs.open(agent, AttachedJob { stream, process: request.id, output, error });
    agent.started(id, &Started { pid, replay: Some(replay), ..Started::default() });
    if request.input
        && !has_input
        && let Some(connection) = agent.connections.get_mut(&id.connection)
    {
        connection.out.credit(id.number, Channel::Input, 0, true);
    }
    agent.runnable.push_back(Token::Output(job));
}

impl AttachedJob {
    fn process<'a>(&self, agent: &'a Agent) -> Option<&'a DetachedProcess> {
        agent.detached.get(&self.process)
    }
}

impl Job for AttachedJob {
    fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Sends the available output. The stream ends with its process, whatever becomes of the input.
    fn advance_output(&mut self, _token: Token, agent: &mut Agent) -> Progress {
        let StreamId { connection, number } = self.stream.id;
        let connection = agent.connections.get_mut(&connection);
        let (Some(connection), Some(it)) = (connection, agent.detached.get(&self.process)) else {
            return Progress::Going;
        };
        let (output, error) = (&mut self.output, &mut self.error);
        for (cursor, channel) in [(&mut *output, Channel::Output), (&mut *error, Channel::Error)] {
            if let Some(ring) = it.ring(channel) {
                cursor.pump(ring, &mut connection.out, number);
            }
        }
        connection.pressed |= !connection.out.has_room();
        match it.report {
            Some(report) if output.has_ended() && error.has_ended() => {
                Progress::Ended(Outcome::Ok(Answer::Exec(ExecReport {
                    stdout: OutputCount { dropped: output.lost(), ..report.stdout },
                    stderr: OutputCount { dropped: error.lost(), ..report.stderr },
                    ..report
                })))
            }
            _ => Progress::Going,
        }
    }

    fn grant(&mut self, channel: Channel, bytes: u32) -> Option<Result<(), WindowError>> {
        match channel {
            Channel::Input => None,
            Channel::Output => Some(self.output.grant(bytes)),
            Channel::Error => Some(self.error.grant(bytes)),
        }
    }

    /// Ends the input of the process. Pipes are closed, a terminal only receives a key.
    fn input_ended(&mut self, agent: &mut Agent) {
        if let Some(it) = agent.detached.get_mut(&self.process).filter(|it| !it.has_one_output()) {
            it.input = None;
        }
    }

    fn signal(&self, signal: Signal, agent: &Agent) {
        if let Some(it) = self.process(agent) {
            it.process.signal(signal.signal, signal.scope);
        }
    }

    fn resize(&self, size: WindowSize, agent: &Agent) -> Result<(), &'static str> {
        self.process(agent).map_or(Ok(()), |it| it.process.resize(size))
    }

    /// Detaches the client; the process continues.
    fn cancel(&mut self, _agent: &mut Agent) -> Progress {
        Progress::Ended(Outcome::failed(Code::Cancelled, None, "no longer attached"))
    }

    fn release(self: Box<Self>, agent: &mut Agent) {
        if let Some(it) = agent.detached.get_mut(&self.process) {
            it.attached.retain(|other| *other != self.stream.job);
        }
    }
}
