//! What runs behind a stream: a process, or file work on a thread of the pool.
//! Both have at most one input and two outputs, and one outcome when those have ended.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::message::{ExecStatus, Outcome, Usage};

use crate::cgroup::Cgroup;
use crate::channel::{Sink, Source};
use crate::detached::{Follower, Outliving};
use crate::forward::Tcp;
use crate::interpreter::Session;
use crate::token::Token;

pub struct Job {
    /// `None` once the client has gone.
    pub connection: Option<u64>,
    pub stream: u32,
    pub work: Work,
    pub sink: Option<Sink>,
    pub sources: Vec<Source>,
    pub deadline: Option<Instant>,
}

pub enum Work {
    Process(Process),
    /// File work, and its outcome once the worker has reported it.
    File(Option<Outcome>),
    /// A call in an interpreter session, and its outcome once its thread has reported it.
    Code(Arc<Session>, Option<Outcome>),
    /// A connection to a port of the guest.
    Tcp(Tcp),
    /// Following a process that outlives its client.
    Attached(Follower),
}

pub struct Process {
    pub pid: libc::pid_t,
    pub cgroup: Option<Cgroup>,
    /// Our side of its terminal.
    pub terminal: Option<OwnedFd>,
    pub begun: Instant,
    pub grace: Duration,
    pub phase: Phase,
    pub timed_out: bool,
    pub background: bool,
    /// It goes on without a client.
    pub outliving: Option<Box<Outliving>>,
}

/// How far a process has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Running,
    /// Its time is over and it was asked to end.
    Terminating,
    Killed,
    /// It is dead; output that is still in the pipes is being sent.
    Dead(Death),
}

/// What is known of a dead process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    pub status: ExecStatus,
    /// Something in it was killed for lack of memory.
    pub oom: bool,
    pub usage: Usage,
    pub after: Duration,
}

impl Job {
    pub fn source(&mut self, channel: Channel) -> Option<&mut Source> {
        self.sources.iter_mut().find(|source| source.channel == channel)
    }

    pub fn source_of(&mut self, token: Token) -> Option<&mut Source> {
        match token {
            Token::Output(_) => self.source(Channel::Output),
            Token::Error(_) => self.source(Channel::Error),
            _ => None,
        }
    }

    pub fn outputs_ended(&self) -> bool {
        self.sources.iter().all(Source::has_ended)
            && self.outliving().is_none_or(Outliving::outputs_ended)
    }

    pub fn outliving(&self) -> Option<&Outliving> {
        match &self.work {
            Work::Process(process) => process.outliving.as_deref(),
            _ => None,
        }
    }

    pub fn outliving_mut(&mut self) -> Option<&mut Outliving> {
        match &mut self.work {
            Work::Process(process) => process.outliving.as_deref_mut(),
            _ => None,
        }
    }

    pub fn pid(&self) -> Option<u32> {
        match &self.work {
            Work::Process(process) => Some(process.pid as u32),
            _ => None,
        }
    }
}
