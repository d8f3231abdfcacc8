//! Processes that outlive their client, and the clients that come back to them.
//! Such a process never waits for a reader: of its output the newest is kept, the rest is counted.

use std::io;
use std::os::fd::OwnedFd;

use pvmm_guest_agent::limits::{DEFAULT_KEEP, MAX_DETACHED, MAX_KEEP};
use pvmm_guest_agent::message::{
    Answer, Attach, Code, Command, Detached, Exec, ExecReport, Failure, Kept, Outcome, OutputCount,
    ProcessInfo, Replay, Scope, SignalProcess, Started,
};
use pvmm_guest_agent::{Channel, Kind};

use crate::channel::{Sink, Step};
use crate::job::{Job, Phase, Process, Work};
use crate::ring::{Cursor, Ring};
use crate::server::Server;
use crate::stdio::Stdio;
use crate::sys;
use crate::token::Token;

/// Bytes of a command line that a listing shows.
const COMMAND_SHOWN: usize = 200;
/// Reads of an output before others have their turn.
const TURN: usize = 4;
const CHUNK: usize = 64 << 10;

/// What a process without a client has instead.
pub struct Outliving {
    command: String,
    pub rings: Vec<Ring>,
    input: Option<OwnedFd>,
    /// Streams that follow it.
    attached: Vec<u64>,
    pub report: Option<ExecReport>,
}

/// A stream that follows a process.
pub struct Follower {
    process: u64,
    output: Cursor,
    error: Cursor,
}

impl Outliving {
    pub fn new(exec: &Exec, stdio: Stdio) -> Self {
        let keep = exec.detach.and_then(|detach| detach.keep).unwrap_or(DEFAULT_KEEP);
        let cap = keep.min(MAX_KEEP) as usize;
        let mut rings = vec![Ring::new(Channel::Output, stdio.output.ours, cap)];
        rings.extend(stdio.error.map(|ends| Ring::new(Channel::Error, ends.ours, cap)));
        Self {
            command: shown(&exec.command),
            rings,
            input: stdio.input.map(|ends| ends.ours),
            attached: Vec::new(),
            report: None,
        }
    }

    fn ring(&self, channel: Channel) -> Option<&Ring> {
        self.rings.iter().find(|ring| ring.channel == channel)
    }

    fn kept(&self, channel: Channel) -> Kept {
        self.ring(channel).map(Ring::kept).unwrap_or_default()
    }

    pub fn outputs_ended(&self) -> bool {
        self.rings.iter().all(|ring| ring.fd.is_none())
    }

    /// Takes what is in the pipes now and no more; whether somebody still held one.
    pub fn stop(&mut self) -> bool {
        let mut held = false;
        for ring in &mut self.rings {
            let Some(fd) = ring.fd.take() else { continue };
            let mut left = sys::waiting_bytes(&fd) as usize;
            held = true;
            while left > 0 {
                let mut bytes = Vec::new();
                match sys::read_onto(&fd, &mut bytes, left.min(CHUNK)) {
                    Ok(count) if count > 0 => left -= count,
                    _ => break,
                }
                ring.push(&bytes);
            }
        }
        held
    }
}

/// The beginning of a command line, for people.
fn shown(command: &Command) -> String {
    let words: Vec<String> = match command {
        Command::Argv(argv) => {
            argv.iter().take(COMMAND_SHOWN).map(|arg| String::from_utf8_lossy(arg).into()).collect()
        }
        Command::Shell(line) => vec![String::from_utf8_lossy(line).into()],
    };
    words.join(" ").chars().take(COMMAND_SHOWN).collect()
}

impl Server {
    /// Whether there is room for another, if need be by forgetting the oldest that has ended.
    pub(crate) fn room_for_detached(&mut self) -> bool {
        let ids: Vec<(u64, bool)> = self
            .jobs
            .iter()
            .filter_map(|(id, job)| job.outliving().map(|it| (*id, it.report.is_some())))
            .collect();
        if ids.len() < MAX_DETACHED {
            return true;
        }
        match ids.iter().find(|(_, ended)| *ended) {
            Some((id, _)) => {
                self.forget_detached(*id);
                true
            }
            None => false,
        }
    }

    pub(crate) fn processes(&self) -> Vec<ProcessInfo> {
        let listed = self.jobs.iter().filter_map(|(id, job)| {
            let Work::Process(process) = &job.work else { return None };
            let it = process.outliving.as_ref()?;
            Some(ProcessInfo {
                id: *id,
                pid: process.pid as u32,
                command: it.command.clone(),
                age_us: process.begun.elapsed().as_micros() as u64,
                terminal: process.terminal.is_some(),
                attached: it.attached.len() as u32,
                stdout: it.kept(Channel::Output),
                stderr: it.kept(Channel::Error),
                report: it.report,
            })
        });
        listed.collect()
    }

    /// Reads what a detached process wrote. Whether this job is one.
    pub(crate) fn advance_detached(&mut self, id: u64, token: Token) -> bool {
        let Some(it) = self.jobs.get_mut(&id).and_then(Job::outliving_mut) else { return false };
        let channel =
            if matches!(token, Token::Error(_)) { Channel::Error } else { Channel::Output };
        let Some(ring) = it.rings.iter_mut().find(|ring| ring.channel == channel) else {
            return true;
        };
        let mut step = Step::More;
        for _ in 0..TURN {
            let Some(fd) = &ring.fd else {
                step = Step::Waiting;
                break;
            };
            self.scratch.clear();
            match sys::read_onto(fd, &mut self.scratch, CHUNK) {
                Ok(count) if count > 0 => ring.push(&self.scratch),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    step = Step::Waiting;
                    break;
                }
                // The end, which a terminal tells as an error.
                _ => ring.fd = None,
            }
        }
        if step == Step::More {
            self.runnable.push_back(token);
        }
        self.wake_followers(id);
        self.finish_if_over(id);
        true
    }

    pub(crate) fn wake_followers(&mut self, id: u64) {
        if let Some(it) = self.jobs.get(&id).and_then(Job::outliving) {
            self.runnable.extend(it.attached.iter().map(|follower| Token::Output(*follower)));
        }
    }

    pub(crate) fn attach(&mut self, connection: u64, stream: u32, request: Attach) {
        let id = self.new_id();
        let Some(it) = self.jobs.get_mut(&request.id).and_then(Job::outliving_mut) else {
            return self.refuse_process(connection, stream, request.id);
        };
        let follower = Follower {
            process: request.id,
            output: Cursor::new(it.ring(Channel::Output), request.stdout_from),
            error: Cursor::new(it.ring(Channel::Error), request.stderr_from),
        };
        it.attached.push(id);
        let terminal = it.rings.len() == 1;
        let input = match it.input.as_ref().filter(|_| request.input).map(OwnedFd::try_clone) {
            Some(Ok(fd)) => Some(fd),
            _ => None,
        };
        let replay = Replay {
            stdout_from: follower.output.at(),
            stderr_from: follower.error.at(),
            terminal,
        };
        let sink = input.filter(|fd| self.watch(fd, Token::Input(id)).is_ok());
        let sink = sink.map(|fd| if terminal { Sink::terminal(fd) } else { Sink::new(fd, None) });
        let has_input = sink.is_some();
        let job = Job {
            connection: Some(connection),
            stream,
            work: Work::Attached(follower),
            sink,
            sources: Vec::new(),
            deadline: None,
        };
        let pid = self.jobs.get(&request.id).and_then(Job::pid);
        self.jobs.insert(id, job);
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.streams.insert(stream, id);
            let started = Started { pid, replay: Some(replay), ..Started::default() };
            connection.out.control(Kind::Started, stream, &started);
            if request.input && !has_input {
                connection.out.credit(stream, Channel::Input, 0, true);
            }
        }
        self.runnable.push_back(Token::Output(id));
    }

    /// Sends a follower what there is for it. Whether this job is one.
    pub(crate) fn advance_follower(&mut self, id: u64) -> bool {
        // Taken out, so that its process can be looked at beside it.
        let Some(job) = self.jobs.get_mut(&id) else { return false };
        let (connection, stream) = (job.connection, job.stream);
        let Work::Attached(follower) = &mut job.work else { return false };
        let nothing = Cursor::new(None, 0);
        let nothing_either = Cursor::new(None, 0);
        let mut output = std::mem::replace(&mut follower.output, nothing);
        let mut error = std::mem::replace(&mut follower.error, nothing_either);
        let process = follower.process;
        let connection = connection.and_then(|id| self.connections.get_mut(&id));
        let mut report = None;
        if let (Some(connection), Some(it)) =
            (connection, self.jobs.get(&process).and_then(Job::outliving))
        {
            for (cursor, channel) in [(&mut output, Channel::Output), (&mut error, Channel::Error)]
            {
                if let Some(ring) = it.ring(channel) {
                    cursor.pump(ring, &mut connection.out, stream);
                }
            }
            connection.pressed |= !connection.out.has_room();
            let over = output.has_ended() && error.has_ended();
            report = it.report.filter(|_| over).map(|report| ExecReport {
                stdout: OutputCount { dropped: output.lost(), ..report.stdout },
                stderr: OutputCount { dropped: error.lost(), ..report.stderr },
                ..report
            });
        }
        if let Some(Work::Attached(follower)) = self.jobs.get_mut(&id).map(|job| &mut job.work) {
            (follower.output, follower.error) = (output, error);
        }
        if let Some(report) = report {
            self.end_follower(id, &Outcome::Ok(Answer::Exec(report)));
        }
        true
    }

    pub(crate) fn end_follower(&mut self, id: u64, outcome: &Outcome) {
        let Some(job) = self.jobs.remove(&id) else { return };
        if let Work::Attached(follower) = &job.work
            && let Some(it) = self.jobs.get_mut(&follower.process).and_then(Job::outliving_mut)
        {
            it.attached.retain(|other| *other != id);
        }
        if let Some(connection) = job.connection {
            self.conclude(connection, job.stream, outcome);
        }
    }

    /// A client looks away; the process goes on.
    pub(crate) fn cancel_follower(&mut self, id: u64) {
        let failure = Failure {
            code: Code::Cancelled,
            errno: None,
            path: None,
            message: "no longer attached".into(),
        };
        self.end_follower(id, &Outcome::Failed(failure));
    }

    /// A detached process has ended and said all: remember how.
    pub(crate) fn conclude_detached(&mut self, id: u64, report: ExecReport) {
        self.set_deadline(Token::Job(id), None);
        let Some(it) = self.jobs.get_mut(&id).and_then(Job::outliving_mut) else { return };
        let total = |channel| OutputCount { total: it.kept(channel).to, dropped: 0 };
        let (stdout, stderr) = (total(Channel::Output), total(Channel::Error));
        it.report = Some(ExecReport { stdout, stderr, ..report });
        it.input = None;
        self.wake_followers(id);
    }

    /// A follower's client has ended the process's input: pipes end, a terminal only hears a key.
    pub(crate) fn follower_input_ended(&mut self, id: u64) {
        let Some(Work::Attached(follower)) = self.jobs.get(&id).map(|job| &job.work) else {
            return;
        };
        let process = follower.process;
        if let Some(it) = self.jobs.get_mut(&process).and_then(Job::outliving_mut)
            && it.rings.len() > 1
        {
            it.input = None;
        }
    }

    /// The process that a stream follows, or the job itself.
    pub(crate) fn followed(&self, id: u64) -> u64 {
        match self.jobs.get(&id).map(|job| &job.work) {
            Some(Work::Attached(follower)) => follower.process,
            _ => id,
        }
    }

    pub(crate) fn signal_process(&mut self, connection: u64, stream: u32, request: SignalProcess) {
        let job = self.jobs.get(&request.id).filter(|job| job.outliving().is_some());
        let Some(Work::Process(process)) = job.map(|job| &job.work) else {
            return self.refuse_process(connection, stream, request.id);
        };
        match request.scope {
            Scope::Process => process.signal_self(request.signal),
            Scope::Group => process.signal_group(request.signal),
            // Without a control group, a dead process's number may be another's by now.
            Scope::Tree if process.cgroup.is_some() || !matches!(process.phase, Phase::Dead(_)) => {
                process.signal_tree(request.signal);
            }
            Scope::Tree => {}
        }
        self.answer(connection, stream, Answer::Done {});
    }

    /// Kills what is left of a process and forgets it.
    pub(crate) fn forget_process(&mut self, connection: u64, stream: u32, id: u64) {
        let Some(Work::Process(process)) =
            self.jobs.get(&id).filter(|job| job.outliving().is_some()).map(|job| &job.work)
        else {
            return self.refuse_process(connection, stream, id);
        };
        if process.cgroup.is_some() || !matches!(process.phase, Phase::Dead(_)) {
            process.kill_tree();
        }
        self.forget_detached(id);
        self.answer(connection, stream, Answer::Done {});
    }

    fn forget_detached(&mut self, id: u64) {
        let Some(it) = self.jobs.get_mut(&id).and_then(Job::outliving_mut) else { return };
        for follower in std::mem::take(&mut it.attached) {
            self.end_follower(follower, &Outcome::Failed(no_such_process(id)));
        }
        let Some(Work::Process(process)) = self.jobs.get_mut(&id).map(|job| &mut job.work) else {
            return;
        };
        process.outliving = None;
        if matches!(process.phase, Phase::Dead(_)) {
            self.forget(id);
        } else {
            // Reaped, it is forgotten like any other whose client has gone.
            process.phase = Phase::Killed;
            self.set_deadline(Token::Job(id), None);
        }
    }

    fn refuse_process(&mut self, connection: u64, stream: u32, id: u64) {
        self.conclude(connection, stream, &Outcome::Failed(no_such_process(id)));
    }

    /// Tells the client of a detached exec where it is.
    pub(crate) fn announce_detached(&mut self, connection: u64, stream: u32, id: u64, pid: u32) {
        self.answer(connection, stream, Answer::Detached(Detached { id, pid }));
    }
}

fn no_such_process(id: u64) -> Failure {
    Failure {
        code: Code::Io,
        errno: Some(libc::ESRCH),
        path: None,
        message: format!("there is no process {id}"),
    }
}

impl Follower {
    pub fn cursor(&mut self, channel: Channel) -> Option<&mut Cursor> {
        match channel {
            Channel::Input => None,
            Channel::Output => Some(&mut self.output),
            Channel::Error => Some(&mut self.error),
        }
    }
}

impl Process {
    /// Whether it goes on without a client.
    pub fn outlives(&self) -> bool {
        self.outliving.is_some()
    }
}
