//! The life of an exec: prepared, started, signalled, timed out, drained, reported.
//! Whatever the process does, its stream ends with exactly one outcome.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{DEFAULT_GRACE, DRAIN_TIME, MAX_TIMEOUT};
use pvmm_guest_agent::message::{
    Answer, Command, Exec, ExecReport, ExecStatus, Limits, OutputCount, Stage, Started, Usage,
};
use pvmm_guest_agent::{Channel, Kind};

use crate::cgroup::{self, Cgroup, Cgroups};
use crate::channel::{Sink, Source};
use crate::detached::Outliving;
use crate::forward;
use crate::job::{Death, Job, Phase, Process, Work};
use crate::refresh::Identity;
use crate::server::Server;
use crate::spawn::{Plan, SpawnError};
use crate::stdio::Stdio;
use crate::sys::{self, Reaped};
use crate::token::Token;
use crate::users::{self, User};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl Server {
    pub(crate) fn start_exec(&mut self, connection: u64, stream: u32, exec: Exec) {
        let begun = Instant::now();
        if let Err(SpawnError { stage, errno }) = self.try_exec(connection, stream, exec, begun) {
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
            self.answer(connection, stream, Answer::Exec(report));
        }
    }

    fn try_exec(
        &mut self,
        connection: u64,
        stream: u32,
        exec: Exec,
        begun: Instant,
    ) -> Result<(), SpawnError> {
        let id = self.new_id();
        let user = find_user(exec.user.as_deref())?;
        let owner = exec.user.as_ref().and(user.as_ref()).map(|user| user.credentials.uid);
        let stdio = Stdio::of(&exec, owner).map_err(prepare)?;
        self.watch_stdio(id, &stdio).map_err(prepare)?;
        let cgroup = match &mut self.settings.cgroups {
            Some(cgroups) => Some(cgroups.create().map_err(prepare)?),
            None => None,
        };
        if let Some(limits) = &exec.limits
            && let Err(e) = self.limit(cgroup.as_ref(), limits)
        {
            self.retire(cgroup);
            let errno = e.raw_os_error().unwrap_or(libc::ENOTSUP);
            return Err(SpawnError { stage: Stage::Limits, errno });
        }
        let plan = self.plan(&exec, user, &stdio, cgroup.as_ref())?;
        let pid = match self.spawner.spawn(&plan) {
            Ok(pid) => pid,
            Err(e) => {
                self.retire(cgroup);
                return Err(e);
            }
        };
        let limit = exec.output_limit;
        let grace = duration(exec.grace_ms).unwrap_or(DEFAULT_GRACE);
        let phase = Phase::Running;
        let (timed_out, background) = (false, false);
        let deadline = duration(exec.timeout_ms).map(|timeout| begun + timeout);
        self.pids.insert(pid, id);
        if exec.detach.is_some() {
            let terminal = stdio.terminal.as_ref().and_then(|fd| fd.try_clone().ok());
            let outliving = Some(Box::new(Outliving::new(&exec, stdio)));
            #[rustfmt::skip]
            let process = Process {
                pid, cgroup, terminal, begun, grace, phase, timed_out, background, outliving,
            };
            let work = Work::Process(process);
            let (sink, sources) = (None, Vec::new());
            let job = Job { connection: None, stream, work, sink, sources, deadline: None };
            self.jobs.insert(id, job);
            self.set_deadline(Token::Job(id), deadline);
            self.announce_detached(connection, stream, id, pid as u32);
            return Ok(());
        }
        let Stdio { input, output, error, terminal } = stdio;
        let mut sources = vec![Source::of_process(Channel::Output, output.ours, limit)];
        sources.extend(error.map(|ends| Source::of_process(Channel::Error, ends.ours, limit)));
        let sink = input.map(|ends| match terminal {
            Some(_) => Sink::terminal(ends.ours),
            None => Sink::new(ends.ours, None),
        });
        let job = Job {
            connection: Some(connection),
            stream,
            work: Work::Process(Process {
                pid,
                cgroup,
                terminal,
                begun,
                grace,
                phase,
                timed_out,
                background,
                outliving: None,
            }),
            sink,
            sources,
            deadline: None,
        };
        self.jobs.insert(id, job);
        self.set_deadline(Token::Job(id), deadline);
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.streams.insert(stream, id);
            let started = Started { pid: Some(pid as u32), ..Started::default() };
            connection.out.control_unhurried(Kind::Started, stream, &started);
        }
        Ok(())
    }

    fn watch_stdio(&self, id: u64, stdio: &Stdio) -> std::io::Result<()> {
        self.watch(&stdio.output.ours, Token::Output(id))?;
        if let Some(ends) = &stdio.error {
            self.watch(&ends.ours, Token::Error(id))?;
        }
        match &stdio.input {
            Some(ends) => self.watch(&ends.ours, Token::Input(id)),
            None => Ok(()),
        }
    }

    pub(crate) fn plan(
        &self,
        exec: &Exec,
        user: Option<User>,
        stdio: &Stdio,
        cgroup: Option<&Cgroup>,
    ) -> Result<Plan, SpawnError> {
        let argv: Vec<Vec<u8>> = match &exec.command {
            Command::Argv(argv) => argv.iter().map(|arg| arg.to_vec()).collect(),
            Command::Shell(line) => vec![b"/bin/sh".into(), b"-c".into(), line.to_vec()],
        };
        let env = environment(exec, user.as_ref(), &self.identity);
        let path = env.get(&b"PATH"[..]).map_or(DEFAULT_PATH.as_bytes(), |path| path);
        let programs = candidates(&argv[0], path);
        let entries = env.iter().map(|(name, value)| [name, &b"="[..], value].concat());
        let cwd = exec.cwd.as_ref().map_or(&b"/"[..], |cwd| cwd);
        Ok(Plan {
            programs: c_strings(programs)?,
            argv: c_strings(argv)?,
            env: c_strings(entries)?,
            cwd: c_string(cwd.to_vec())?,
            credentials: exec.user.as_ref().and(user).map(|user| user.credentials),
            stdio: stdio.theirs(&self.null),
            terminal: stdio.terminal.is_some(),
            control: None,
            open_files: self.settings.open_files,
            cgroup: cgroup.map(Cgroup::fd),
        })
    }

    /// An exec that cannot be limited as it was asked is not started.
    fn limit(&mut self, cgroup: Option<&Cgroup>, limits: &Limits) -> std::io::Result<()> {
        let (Some(cgroups), Some(cgroup)) = (&mut self.settings.cgroups, cgroup) else {
            return Err(std::io::Error::from_raw_os_error(libc::ENOTSUP));
        };
        cgroups.enable_limits()?;
        cgroup.limit(limits)
    }

    pub(crate) fn retire(&mut self, cgroup: Option<Cgroup>) {
        if let (Some(cgroups), Some(cgroup)) = (&mut self.settings.cgroups, cgroup) {
            cgroups.retire(cgroup);
        }
    }

    pub(crate) fn process_died(&mut self, id: u64, dead: &Reaped) {
        let limited = self.settings.cgroups.as_ref().is_some_and(Cgroups::has_limits);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Work::Process(process) = &mut job.work else { return };
        self.oom.catch_up();
        let oom = self.oom.names(dead.pid as u32)
            || process.cgroup.as_ref().is_some_and(|cgroup| limited && cgroup.oom_kills() > 0);
        process.phase = Phase::Dead(Death {
            oom,
            status: status(dead.status),
            usage: usage(&dead.usage),
            after: process.begun.elapsed(),
        });
        let abandoned = job.connection.is_none() && !process.outlives();
        if process.timed_out || abandoned {
            process.kill_tree();
        }
        if abandoned {
            self.forget(id);
            return;
        }
        self.set_deadline(Token::Job(id), Some(Instant::now() + DRAIN_TIME));
        self.finish_if_over(id);
    }

    pub(crate) fn job_deadline(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.deadline = None;
        let Work::Process(process) = &mut job.work else { return self.connect_deadline(id) };
        match process.phase {
            Phase::Running => {
                process.timed_out = true;
                process.phase = Phase::Terminating;
                let grace = process.grace;
                if grace.is_zero() {
                    return self.job_deadline(id);
                }
                process.signal_tree(libc::SIGTERM);
                // A stopped process cannot act on the TERM before it is continued.
                process.signal_tree(libc::SIGCONT);
                self.set_deadline(Token::Job(id), Some(Instant::now() + grace));
            }
            Phase::Terminating => {
                process.kill_tree();
                process.phase = Phase::Killed;
            }
            Phase::Killed => {}
            Phase::Dead(_) if process.outlives() => {
                if let Some(it) = &mut process.outliving {
                    process.background |= it.stop();
                }
                self.finish_if_over(id);
            }
            Phase::Dead(_) => {
                for source in &mut job.sources {
                    process.background |= source.stop_soon();
                }
                self.wake_outputs(id);
            }
        }
    }

    /// Reports a job that has nothing left to say.
    pub(crate) fn finish_if_over(&mut self, id: u64) {
        let Some(job) = self.jobs.get(&id).filter(|job| job.outputs_ended()) else { return };
        let outcome = match &job.work {
            // It ends with its process.
            Work::Attached(_) => return,
            Work::Tcp(tcp) => match forward::outcome(tcp, job) {
                Some(outcome) => outcome,
                None => return,
            },
            Work::File(None) | Work::Code(_, None) => return,
            Work::File(Some(outcome)) | Work::Code(_, Some(outcome)) => outcome.clone(),
            Work::Process(process) => {
                let Phase::Dead(death) = process.phase else { return };
                let count = |index: usize| job.sources.get(index).map(Source::count);
                let report = ExecReport {
                    status: death.status,
                    timed_out: process.timed_out,
                    background: process.background,
                    oom: death.oom,
                    stdout: count(0).unwrap_or_default(),
                    stderr: count(1).unwrap_or_default(),
                    duration_us: death.after.as_micros() as u64,
                    usage: death.usage,
                };
                if process.outlives() {
                    return self.conclude_detached(id, report);
                }
                pvmm_guest_agent::message::Outcome::Ok(Answer::Exec(report))
            }
        };
        let (connection, stream) = (job.connection, job.stream);
        self.forget(id);
        if let Some(connection) = connection {
            self.conclude(connection, stream, &outcome);
        }
    }

    pub(crate) fn forget(&mut self, id: u64) {
        self.set_deadline(Token::Job(id), None);
        if let Some(Job { work: Work::Process(process), .. }) = self.jobs.remove(&id) {
            self.retire(process.cgroup);
        }
    }

    /// The client wants it to end: the outcome still comes, and says how.
    pub(crate) fn cancel(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        match &mut job.work {
            Work::Process(process) => {
                process.kill_tree();
                if !matches!(process.phase, Phase::Dead(_)) {
                    process.phase = Phase::Killed;
                    self.set_deadline(Token::Job(id), None);
                }
            }
            Work::File(_) | Work::Code(..) => self.cancel_file_work(id),
            Work::Tcp(_) => self.cancel_tcp(id),
            Work::Attached(_) => self.cancel_follower(id),
        }
    }

    /// The client has gone: end the work, and remember it only until it is reaped.
    pub(crate) fn abandon(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.connection = None;
        job.sink = None;
        job.sources.clear();
        match &mut job.work {
            Work::Process(process) => {
                process.kill_tree();
                let dead = matches!(process.phase, Phase::Dead(_));
                process.phase = if dead { process.phase } else { Phase::Killed };
                self.set_deadline(Token::Job(id), None);
                if dead {
                    self.forget(id);
                }
            }
            // The worker sees its pipe break; its report finds nobody.
            Work::File(_) | Work::Code(..) | Work::Tcp(_) => self.forget(id),
            Work::Attached(_) => self.cancel_follower(id),
        }
    }
}

impl Process {
    pub fn is_reaped(&self) -> bool {
        matches!(self.phase, Phase::Dead(_))
    }

    pub fn signal_self(&self, signal: libc::c_int) {
        if !self.is_reaped() {
            let _ = sys::kill(self.pid, signal);
        }
    }

    pub fn signal_group(&self, signal: libc::c_int) {
        if !self.is_reaped() {
            let _ = sys::kill(-self.pid, signal);
        }
    }

    pub fn signal_tree(&self, signal: libc::c_int) {
        match &self.cgroup {
            _ if signal == libc::SIGKILL => self.kill_tree(),
            Some(cgroup) => cgroup.signal(signal),
            None => cgroup::signal_relatives(self.pid, signal),
        }
    }

    pub fn kill_tree(&self) {
        match &self.cgroup {
            Some(cgroup) => cgroup.kill(),
            None => cgroup::kill_relatives(self.pid),
        }
    }
}

pub fn prepare(error: std::io::Error) -> SpawnError {
    SpawnError { stage: Stage::Prepare, errno: error.raw_os_error().unwrap_or(libc::EIO) }
}

pub fn find_user(spec: Option<&str>) -> Result<Option<User>, SpawnError> {
    match spec {
        Some(spec) => users::find(spec)
            .map(Some)
            .ok_or(SpawnError { stage: Stage::User, errno: libc::ENOENT }),
        None => Ok(users::find_own()),
    }
}

/// The default environment, over it what the last refresh gave, over it the request's entries.
fn environment(
    exec: &Exec,
    user: Option<&User>,
    identity: &Identity,
) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut env: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    if !exec.clear_env {
        let (name, home) = user.map_or(("root", "/"), |user| (&user.name, &user.home));
        let defaults = [
            ("PATH", DEFAULT_PATH),
            ("HOME", home),
            ("USER", name),
            ("TERM", "xterm"),
            ("LANG", "C.UTF-8"),
        ];
        env.extend(defaults.map(|(name, value)| (name.into(), value.into())));
        if identity.generation > 0 {
            let generation = identity.generation.to_string();
            env.insert(b"PVMM_GENERATION".into(), generation.into());
        }
        let refreshed = identity.env.iter();
        env.extend(refreshed.map(|(name, value)| (name.to_vec(), value.to_vec())));
    }
    env.extend(exec.env.iter().map(|(name, value)| (name.to_vec(), value.to_vec())));
    env
}

/// Where a program may be: itself if it has a slash, else in each directory of PATH.
fn candidates(program: &[u8], path: &[u8]) -> Vec<Vec<u8>> {
    if program.contains(&b'/') {
        return vec![program.to_vec()];
    }
    let directories = path.split(|byte| *byte == b':');
    let directories = directories.map(|dir| if dir.is_empty() { &b"."[..] } else { dir });
    directories.map(|dir| [dir, &b"/"[..], program].concat()).collect()
}

fn c_strings(words: impl IntoIterator<Item = Vec<u8>>) -> Result<Vec<CString>, SpawnError> {
    words.into_iter().map(c_string).collect()
}

fn c_string(word: Vec<u8>) -> Result<CString, SpawnError> {
    CString::new(word).map_err(|_| SpawnError { stage: Stage::Prepare, errno: libc::EINVAL })
}

fn duration(millis: Option<u64>) -> Option<Duration> {
    millis.map(|millis| Duration::from_millis(millis).min(MAX_TIMEOUT))
}

pub fn status(raw: libc::c_int) -> ExecStatus {
    if libc::WIFSIGNALED(raw) {
        ExecStatus::Signaled { signal: libc::WTERMSIG(raw), core_dumped: libc::WCOREDUMP(raw) }
    } else {
        ExecStatus::Exited { code: libc::WEXITSTATUS(raw) }
    }
}

fn usage(raw: &libc::rusage) -> Usage {
    let micros = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    Usage {
        user_us: micros(raw.ru_utime),
        system_us: micros(raw.ru_stime),
        max_rss_kib: raw.ru_maxrss as u64,
    }
}
