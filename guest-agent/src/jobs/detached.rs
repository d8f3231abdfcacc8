//! A detached process as a job without a client, and the requests about such processes.
//!
//! The process itself is in the agent's table, where the streams that are attached to it find it.

use std::time::Instant;

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::{DRAIN_TIME, MAX_DETACHED};
use pvmm_guest_agent::message::{
    Answer, Code, Detached, Exec, Outcome, ProcessId, ProcessInfo, Scope, SignalProcess,
};

use super::exec::{self, ExecJob};
use crate::agent::Agent;
use crate::cgroup::Cgroups;
use crate::channel::Pumped;
use crate::connection::StreamId;
use crate::detached::DetachedProcess;
use crate::job::{Job, Jobs, Progress, Stream};
use crate::sys::{Ready, Reaped};
use crate::token::Token;

struct DetachedJob {
    /// The stream of the request that started the process; it has ended.
    stream: Stream,
}

pub fn start(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, exec: &Exec) {
    if !make_room(agent, jobs) {
        let why = "there are as many detached processes as there may be";
        return agent.refuse(id, Code::TooMany, why);
    }
    let stream = Stream::new(agent.new_id(), id);
    let Some((process, stdio)) = exec::begin(agent, &stream, exec) else { return };
    let detached = Detached { id: stream.job, pid: process.pid as u32 };
    agent.detached.insert(stream.job, DetachedProcess::new(exec, process, stdio));
    jobs.insert(DetachedJob { stream });
    agent.answer(id, Answer::Detached(detached));
}

impl Job for DetachedJob {
    fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    fn note(&mut self, token: Token, _event: &Ready) -> bool {
        matches!(token, Token::Output(_) | Token::Error(_))
    }

    fn advance_output(&mut self, token: Token, agent: &mut Agent) -> Progress {
        let job = self.stream.job;
        let Some(it) = agent.detached.get_mut(&job) else { return Progress::Going };
        let channel =
            if matches!(token, Token::Error(_)) { Channel::Error } else { Channel::Output };
        if it.read(channel, &mut agent.scratch) == Pumped::More {
            agent.runnable.push_back(token);
        }
        wake_followers(agent, job);
        conclude(agent, job)
    }

    fn deadline(&mut self, agent: &mut Agent) -> Progress {
        let job = self.stream.job;
        let Some(it) = agent.detached.get_mut(&job) else { return Progress::Going };
        if it.process.is_dead() {
            it.stop();
            conclude(agent, job)
        } else {
            agent.deadlines.set(Token::Job(job), it.process.time_out());
            Progress::Going
        }
    }

    fn died(&mut self, dead: &Reaped, agent: &mut Agent) -> Progress {
        let job = self.stream.job;
        let limited = agent.settings.cgroups.as_ref().is_some_and(Cgroups::has_limits);
        let Some(it) = agent.detached.get_mut(&job) else { return Progress::Going };
        it.process.set_dead(dead, &mut agent.oom, limited);
        if it.process.timed_out {
            it.process.kill_tree();
        }
        agent.deadlines.set(Token::Job(job), Some(Instant::now() + DRAIN_TIME));
        conclude(agent, job)
    }

    fn kill(&self, agent: &Agent) {
        if let Some(it) = agent.detached.get(&self.stream.job).filter(|it| !it.process.is_dead()) {
            it.process.kill_tree();
        }
    }
}

/// Keeps the report of a process that has ended with all its output read. The job stays until the
/// process is forgotten.
fn conclude(agent: &mut Agent, job: u64) -> Progress {
    if agent.detached.get_mut(&job).is_some_and(|it| it.conclude()) {
        agent.deadlines.set(Token::Job(job), None);
        wake_followers(agent, job);
    }
    Progress::Going
}

fn wake_followers(agent: &mut Agent, job: u64) {
    if let Some(it) = agent.detached.get(&job) {
        agent.runnable.extend(it.attached.iter().map(|follower| Token::Output(*follower)));
    }
}

/// Returns whether another process can be detached. If need be, the oldest ended one is forgotten.
fn make_room(agent: &mut Agent, jobs: &mut Jobs) -> bool {
    if agent.detached.len() < MAX_DETACHED {
        return true;
    }
    let ended = agent.detached.iter().find(|(_, it)| it.report.is_some()).map(|(id, _)| *id);
    if let Some(id) = ended {
        drop_process(agent, jobs, id);
    }
    ended.is_some()
}

pub fn list(agent: &Agent) -> Vec<ProcessInfo> {
    agent.detached.iter().map(|(id, it)| it.info(*id)).collect()
}

pub fn signal(agent: &mut Agent, stream: StreamId, request: SignalProcess) {
    let Some(it) = agent.detached.get(&request.id) else {
        return agent.conclude(stream, &no_such_process(request.id));
    };
    if request.scope != Scope::Tree || it.has_tree() {
        it.process.signal(request.signal, request.scope);
    }
    agent.answer(stream, Answer::Done {});
}

/// Kills what is left of a process, unless it may go on, and forgets the process.
pub fn forget(agent: &mut Agent, jobs: &mut Jobs, stream: StreamId, request: ProcessId) {
    let ProcessId { id, leave } = request;
    let Some(it) = agent.detached.get(&id) else {
        return agent.conclude(stream, &no_such_process(id));
    };
    if it.has_tree() && !(leave && it.process.is_dead()) {
        it.process.kill_tree();
    }
    drop_process(agent, jobs, id);
    agent.answer(stream, Answer::Done {});
}

fn drop_process(agent: &mut Agent, jobs: &mut Jobs, id: u64) {
    let Some(it) = agent.detached.remove(&id) else { return };
    for follower in it.attached {
        jobs.settle(agent, follower, Progress::Ended(no_such_process(id)));
    }
    let dead = it.process.is_dead();
    let Some(job) = jobs.get_mut(id) else { return };
    let stream = Stream::new(id, job.stream().id);
    agent.deadlines.set(Token::Job(id), None);
    // Once reaped, it is forgotten like any process without a client.
    jobs.insert(ExecJob::orphan(stream, it.process));
    if dead {
        jobs.settle(agent, id, Progress::Forgotten);
    }
}

pub fn no_such_process(id: u64) -> Outcome {
    Outcome::failed(Code::Io, Some(libc::ESRCH), format!("there is no process {id}"))
}
