//! An exec: a process whose input and outputs are its client's stream.
//!
//! Whatever the process does, its stream ends with exactly one outcome.

use std::time::Instant;

use pvmm_guest_agent::limits::DRAIN_TIME;
use pvmm_guest_agent::message::{
    Answer, Exec, ExecReport, ExecStatus, Outcome, OutputCount, Signal, Started, Usage, WindowSize,
};
use pvmm_guest_agent::{Channel, Kind};

use crate::agent::Agent;
use crate::cgroup::Cgroups;
use crate::channel::{Sink, Source};
use crate::connection::StreamId;
use crate::job::{Job, Jobs, Progress, Stream};
use crate::launch::{self, launch, prepare};
use crate::process::{self, Process};
use crate::spawn::SpawnError;
use crate::stdio::Stdio;
use crate::sys::Reaped;
use crate::token::Token;

pub struct ExecJob {
    stream: Stream,
    process: Process,
    /// The client has gone; the job is forgotten when the process is reaped.
    abandoned: bool,
}

pub fn start(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, exec: &Exec) {
    let mut stream = Stream::new(agent.new_id(), id);
    let Some((process, stdio)) = begin(agent, &stream, exec) else { return };
    let Stdio { input, output, error, .. } = stdio;
    let limit = exec.output_limit;
    stream.sources.push(Source::of_process(Channel::Output, output.ours, limit));
    stream.sources.extend(error.map(|it| Source::of_process(Channel::Error, it.ours, limit)));
    stream.sink = input.map(|ends| match process.terminal {
        Some(_) => Sink::terminal(ends.ours),
        None => Sink::new(ends.ours, None),
    });
    let started = Started { pid: Some(process.pid as u32), ..Started::default() };
    jobs.open(agent, ExecJob { stream, process, abandoned: false });
    if let Some(connection) = agent.connections.get_mut(&id.connection) {
        connection.out.control_unhurried(Kind::Started, id.number, &started);
    }
}

/// Starts the process of an exec. For one that does not start, the stream ends with a report.
pub fn begin(agent: &mut Agent, stream: &Stream, exec: &Exec) -> Option<(Process, Stdio)> {
    let begun = Instant::now();
    match try_begin(agent, stream.job, exec, begun) {
        Ok(started) => Some(started),
        Err(SpawnError { stage, errno }) => {
            let report = ExecReport {
                status: ExecStatus::CouldNotStart { stage, errno },
                timed_out: false,
                background: false,
                oom: false,
                stdout: OutputCount::default(),
                stderr: OutputCount::default(),
                duration_us: begun.elapsed().as_micros() as u64,
                usage: Usage::default(),
            };
            agent.answer(stream.id, Answer::Exec(report));
            None
        }
    }
}

fn try_begin(
    agent: &mut Agent,
    job: u64,
    exec: &Exec,
    begun: Instant,
) -> Result<(Process, Stdio), SpawnError> {
    let user = launch::find_user(agent, exec)?;
    let named = launch::user_name(agent, exec).is_some();
    let owner = user.as_ref().filter(|_| named).map(|user| user.credentials.uid);
    let mut stdio = Stdio::of(exec, owner).map_err(prepare)?;
    watch_stdio(agent, job, &stdio).map_err(prepare)?;
    let (pid, cgroup) = launch(agent, exec, user, &stdio, None)?;
    agent.pids.insert(pid, job);
    agent.deadlines.set(Token::Job(job), process::deadline(exec, begun));
    let terminal = stdio.terminal.take();
    Ok((Process::new(exec, pid, cgroup, terminal, begun), stdio))
}

fn watch_stdio(agent: &Agent, job: u64, stdio: &Stdio) -> std::io::Result<()> {
    agent.watch(&stdio.output.ours, Token::Output(job))?;
    if let Some(ends) = &stdio.error {
        agent.watch(&ends.ours, Token::Error(job))?;
    }
    match &stdio.input {
        Some(ends) => agent.watch(&ends.ours, Token::Input(job)),
        None => Ok(()),
    }
}

impl ExecJob {
    /// Makes the job of a killed process that nobody waits for, until it is reaped.
    pub fn orphan(stream: Stream, mut process: Process) -> Self {
        process.set_killed();
        Self { stream, process, abandoned: true }
    }
}

impl Job for ExecJob {
    fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    fn outcome(&mut self) -> Option<Outcome> {
        let count = |index: usize| self.stream.sources.get(index).map(Source::count);
        let report =
            self.process.report(count(0).unwrap_or_default(), count(1).unwrap_or_default());
        report.map(|report| Outcome::Ok(Answer::Exec(report)))
    }

    fn deadline(&mut self, agent: &mut Agent) -> Progress {
        if self.process.is_dead() {
            for source in &mut self.stream.sources {
                self.process.background |= source.stop_soon();
            }
            agent.wake_outputs(self.stream.job);
        } else {
            agent.deadlines.set(Token::Job(self.stream.job), self.process.time_out());
        }
        Progress::Going
    }

    fn died(&mut self, dead: &Reaped, agent: &mut Agent) -> Progress {
        let limited = agent.settings.cgroups.as_ref().is_some_and(Cgroups::has_limits);
        self.process.set_dead(dead, &mut agent.oom, limited);
        if self.process.timed_out || self.abandoned {
            self.process.kill_tree();
        }
        if self.abandoned {
            return Progress::Forgotten;
        }
        agent.deadlines.set(Token::Job(self.stream.job), Some(Instant::now() + DRAIN_TIME));
        self.progress()
    }

    fn signal(&self, signal: Signal, _agent: &Agent) {
        self.process.signal(signal.signal, signal.scope);
    }

    fn resize(&self, size: WindowSize, _agent: &Agent) -> Result<(), &'static str> {
        self.process.resize(size)
    }

    fn cancel(&mut self, agent: &mut Agent) -> Progress {
        self.process.kill_tree();
        if !self.process.is_dead() {
            self.process.set_killed();
            agent.deadlines.set(Token::Job(self.stream.job), None);
        }
        Progress::Going
    }

    fn abandon(&mut self, agent: &mut Agent) -> Progress {
        self.stream.close();
        self.process.kill_tree();
        self.abandoned = true;
        self.process.set_killed();
        agent.deadlines.set(Token::Job(self.stream.job), None);
        if self.process.is_dead() { Progress::Forgotten } else { Progress::Going }
    }

    fn release(self: Box<Self>, agent: &mut Agent) {
        agent.retire(self.process.cgroup);
    }

    fn kill(&self, _agent: &Agent) {
        if !self.process.is_dead() {
            self.process.kill_tree();
        }
    }
}
