//! What the agent does with each frame a client sends.
//! Rules of the protocol that need state are enforced here; breaking one ends the connection.

use std::io;

use pvmm_guest_agent::frame::{Frame, Kind};
use pvmm_guest_agent::limits::{MAX_ARGS, MAX_PATH, VERSION};
use pvmm_guest_agent::message::{
    Answer, ByteBuf, Code, Exec, Failure, Hello, Info, Outcome, Request, Scope, Signal, Welcome,
    WindowSize,
};
use pvmm_guest_agent::{Channel, decode};

use crate::channel::Step;
use crate::interpreter;
use crate::job::Work;
use crate::server::{Ended, Server};
use crate::token::Token;
use crate::{files, refresh, sys, terminal};

/// Bytes read from a socket at once.
const READ_BYTES: usize = 256 << 10;

/// Why a connection is ended: the client's fault, in words for its log.
type Fault = (Code, String);

fn fault(message: impl Into<String>) -> Fault {
    (Code::Protocol, message.into())
}

impl Server {
    /// Reads once from a connection and acts on every whole frame.
    pub(crate) fn read_connection(&mut self, id: u64) -> Step {
        let Some(connection) = self.connections.get_mut(&id) else { return Step::Waiting };
        connection.pressed |= connection.out.is_clogged();
        if !connection.readable || connection.out.is_clogged() {
            return Step::Waiting;
        }
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        let read = sys::read_onto(&connection.socket, &mut bytes, READ_BYTES);
        let step = match read {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                connection.readable = false;
                Step::Waiting
            }
            Ok(0) | Err(_) => {
                self.drop_connection(id);
                Step::Waiting
            }
            Ok(count) => {
                // As with pipes: a short read has emptied the socket, but for an announced end.
                connection.readable = count == READ_BYTES || connection.hung_up;
                self.take_bytes(id, &bytes);
                match self.connections.get_mut(&id) {
                    Some(connection) => {
                        connection.await_rest();
                        if connection.readable { Step::More } else { Step::Waiting }
                    }
                    None => Step::Waiting,
                }
            }
        };
        if self.scratch.capacity() < bytes.capacity() {
            self.scratch = bytes;
        }
        step
    }

    fn take_bytes(&mut self, id: u64, mut bytes: &[u8]) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let mut decoder = std::mem::take(&mut connection.decoder);
        let mut progressed = false;
        let result = loop {
            match decoder.next(&mut bytes) {
                Ok(Some(frame)) => {
                    progressed = true;
                    let opened = frame.header.kind == Kind::Open;
                    if let Err(fault) = self.take_frame(id, frame) {
                        break Err(fault);
                    }
                    if opened {
                        // Starting a program takes a while; who sent a hundred must not be left
                        // without a sign of life until the last one runs.
                        self.flush(id);
                    }
                }
                Ok(None) => break Ok(()),
                Err(e) => break Err(fault(e.to_string())),
            }
        };
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.decoder = decoder;
        }
        match result {
            Ok(()) => self.time_frame(id, progressed),
            Err((code, why)) => self.expel(id, code, &why),
        }
    }

    fn take_frame(&mut self, id: u64, frame: Frame<'_>) -> Result<(), Fault> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let stream = frame.header.stream;
        match frame.header.kind {
            Kind::Extension(_) => return Ok(()),
            Kind::Hello if !connection.greeted => return self.greet(id, frame.payload),
            _ if !connection.greeted => return Err(fault("the first frame must be a hello")),
            Kind::Goodbye => return Err(fault("goodbye")),
            Kind::Open if stream > connection.last_stream => {
                connection.last_stream = stream;
                self.open(id, stream, frame.payload);
                return Ok(());
            }
            Kind::Data | Kind::Credit | Kind::Signal | Kind::Resize | Kind::Cancel => {}
            kind => return Err(fault(format!("{kind:?} is not allowed here"))),
        }
        if stream > connection.last_stream {
            return Err(fault(format!("stream {stream} was never opened")));
        }
        // A frame for a stream that has ended crossed its outcome on the way: nothing to do.
        let Some(job) = connection.streams.get(&stream).copied() else { return Ok(()) };
        match frame.header.kind {
            Kind::Data => self.take_data(id, job, frame),
            Kind::Credit => self.take_credit(job, frame),
            Kind::Signal => {
                let signal: Signal = decode(frame.payload).map_err(|e| fault(e.to_string()))?;
                self.take_signal(job, signal)
            }
            Kind::Resize => {
                let size = decode(frame.payload).map_err(|e| fault(e.to_string()))?;
                self.take_resize(job, size)
            }
            _ => {
                self.cancel(job);
                Ok(())
            }
        }
    }

    fn greet(&mut self, id: u64, payload: &[u8]) -> Result<(), Fault> {
        let hello: Hello = decode(payload).map_err(|e| fault(e.to_string()))?;
        if hello.min_version > VERSION || hello.max_version < VERSION {
            let why = format!("this agent speaks version {VERSION}");
            return Err((Code::Version, why));
        }
        let welcome = self.welcome();
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.greeted = true;
            connection.out.control(Kind::Welcome, 0, &welcome);
        }
        self.set_deadline(Token::Connection(id), None);
        Ok(())
    }

    pub fn welcome(&self) -> Welcome {
        let mut capabilities =
            vec!["exec", "files", "info", "connect", "pty", "detach", "code", "metrics", "tar"];
        if self.settings.control.is_some() {
            capabilities.push("refresh");
        }
        if self.settings.init {
            capabilities.push("shutdown");
        }
        if self.settings.cgroups.is_some() {
            capabilities.push("cgroups");
            capabilities.push("limits");
        }
        Welcome {
            version: VERSION,
            capabilities: capabilities.into_iter().map(str::to_owned).collect(),
            agent: env!("CARGO_PKG_VERSION").into(),
            kernel: sys::uname().0,
            init: self.settings.init,
            uptime_us: sys::uptime().as_micros() as u64,
        }
    }

    fn take_data(&mut self, id: u64, job: u64, frame: Frame<'_>) -> Result<(), Fault> {
        if frame.header.channel() != Channel::Input {
            return Err(fault("a client sends data only on the input channel"));
        }
        let stream = frame.header.stream;
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let sink = self.jobs.get_mut(&job).and_then(|job| job.sink.as_mut());
        let Some(sink) = sink else {
            return Err(fault(format!("stream {stream} has no input")));
        };
        if sink.has_ended() {
            return Err(fault(format!("data after the end of stream {stream}'s input")));
        }
        sink.accept(frame.payload, frame.header.ends(), &mut connection.out, stream)
            .map_err(|e| fault(e.to_string()))?;
        let over = sink.is_closed();
        if frame.header.ends() {
            self.follower_input_ended(job);
        }
        if over {
            self.finish_if_over(job);
        }
        Ok(())
    }

    fn take_credit(&mut self, job: u64, frame: Frame<'_>) -> Result<(), Fault> {
        if let Some(Work::Attached(follower)) = self.jobs.get_mut(&job).map(|it| &mut it.work) {
            let Some(cursor) = follower.cursor(frame.header.channel()) else {
                return Err(fault("credit for a channel the stream does not have"));
            };
            cursor.grant(frame.credit()).map_err(|e| fault(e.to_string()))?;
            self.wake_outputs(job);
            return Ok(());
        }
        let source = self.jobs.get_mut(&job).and_then(|it| it.source(frame.header.channel()));
        let Some(source) = source else {
            return Err(fault("credit for a channel the stream does not have"));
        };
        source.grant(frame.credit()).map_err(|e| fault(e.to_string()))?;
        self.wake_outputs(job);
        Ok(())
    }

    fn take_signal(&mut self, job: u64, signal: Signal) -> Result<(), Fault> {
        if !(1..=libc::SIGRTMAX()).contains(&signal.signal) {
            return Err(fault(format!("there is no signal {}", signal.signal)));
        }
        let job = self.followed(job);
        match self.jobs.get(&job).map(|job| &job.work) {
            Some(Work::Process(process)) => match signal.scope {
                Scope::Process => process.signal_self(signal.signal),
                Scope::Group => process.signal_group(signal.signal),
                Scope::Tree => process.signal_tree(signal.signal),
            },
            // Code can be interrupted; a session is ended by closing it.
            Some(Work::Code(session, _)) if signal.signal == libc::SIGINT => session.interrupt(),
            _ => {}
        }
        Ok(())
    }

    fn take_resize(&mut self, job: u64, size: WindowSize) -> Result<(), Fault> {
        let job = self.followed(job);
        let Some(Work::Process(process)) = self.jobs.get(&job).map(|job| &job.work) else {
            return Err(fault("only a process has a terminal"));
        };
        let Some(terminal) = &process.terminal else {
            return Err(fault("the process has no terminal"));
        };
        // One whose process has just gone needs no size.
        let _ = terminal::resize(terminal, size);
        Ok(())
    }

    fn open(&mut self, id: u64, stream: u32, payload: &[u8]) {
        let request = match decode::<Request>(payload) {
            Ok(request) => request,
            Err(e) => return self.refuse(id, stream, Code::BadRequest, &cause(&e)),
        };
        if let Err(why) = check(&request) {
            return self.refuse(id, stream, Code::BadRequest, why);
        }
        let control =
            matches!(request, Request::Freeze(_) | Request::Refresh(_) | Request::Thaw {});
        if control && !self.connections.get(&id).is_some_and(|it| it.control) {
            let why = "freeze, refresh and thaw are for the control port";
            return self.refuse(id, stream, Code::Unsupported, why);
        }
        let brief = control
            || matches!(request, Request::Ping {} | Request::Info {} | Request::Shutdown(_));
        let to_port = matches!(request, Request::Connect(_));
        if !brief && !self.has_stream_left(id, to_port) {
            let why = "the connection has all the streams it may have";
            return self.refuse(id, stream, Code::TooMany, why);
        }
        match request {
            Request::Exec(_) | Request::OpenSession(_) | Request::RunCode(_)
                if self.is_frozen() =>
            {
                self.refuse(id, stream, Code::Frozen, "the workload is frozen: thaw it first");
            }
            Request::Exec(exec) if exec.detach.is_some() && !self.room_for_detached() => {
                let why = "there are as many detached processes as there may be";
                self.refuse(id, stream, Code::TooMany, why);
            }
            Request::Exec(exec) => self.start_exec(id, stream, exec),
            Request::Processes {} => {
                let processes = self.processes();
                self.answer(id, stream, Answer::Processes(processes));
            }
            Request::Metrics {} => {
                let metrics = self.metrics();
                self.answer(id, stream, Answer::Metrics(metrics));
            }
            Request::Attach(attach) => self.attach(id, stream, attach),
            Request::SignalProcess(signal) => self.signal_process(id, stream, signal),
            Request::ForgetProcess(process) => self.forget_process(id, stream, process.id),
            Request::Freeze(freeze) => self.start_freeze(id, stream, freeze),
            Request::Refresh(refresh) => self.take_refresh(id, stream, &refresh),
            Request::Thaw {} => self.thaw(id, stream),
            Request::Connect(connect) => self.start_connect(id, stream, connect),
            Request::OpenSession(open) => self.open_session(id, stream, open),
            Request::RunCode(run) => self.run_code(id, stream, run),
            Request::CloseSession(close) => self.close_session(id, stream, &close),
            Request::ListSessions {} => self.list_sessions(id, stream),
            Request::Ping {} => self.answer(id, stream, Answer::Done {}),
            Request::Info {} => {
                let info = self.info();
                self.answer(id, stream, Answer::Info(info));
            }
            Request::Shutdown(shutdown) if self.settings.init => {
                self.answer(id, stream, Answer::Done {});
                self.ending = Some(Ended::Shutdown(shutdown));
            }
            Request::Shutdown(_) => {
                let why = "the agent is not the guest's init and cannot end it";
                self.refuse(id, stream, Code::Unsupported, why);
            }
            file => self.start_file_work(id, stream, file),
        }
    }

    fn info(&self) -> Info {
        let (kernel, hostname) = sys::uname();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_ascii_whitespace().next()?.parse().ok()
        };
        Info {
            agent: env!("CARGO_PKG_VERSION").into(),
            kernel,
            hostname,
            uptime_us: sys::uptime().as_micros() as u64,
            cpus: std::thread::available_parallelism().map_or(1, |count| count.get() as u32),
            memory_total_kib: kib("MemTotal:").unwrap_or(0),
            memory_available_kib: kib("MemAvailable:").unwrap_or(0),
            execs: self.pids.len() as u32,
            connections: self.connections.len() as u32,
            cgroups: self.settings.cgroups.is_some(),
            generation: self.identity.generation,
            frozen: self.is_frozen(),
        }
    }

    pub(crate) fn answer(&mut self, id: u64, stream: u32, answer: Answer) {
        self.conclude(id, stream, &Outcome::Ok(answer));
    }

    pub(crate) fn refuse(&mut self, id: u64, stream: u32, code: Code, why: &str) {
        let failure = Failure { code, errno: None, path: None, message: why.to_owned() };
        self.conclude(id, stream, &Outcome::Failed(failure));
    }

    /// Sends a stream's last frame and forgets the stream.
    pub(crate) fn conclude(&mut self, id: u64, stream: u32, outcome: &Outcome) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.streams.remove(&stream);
            connection.out.control(Kind::Done, stream, outcome);
        }
    }
}

/// The innermost reason, bounded, for a client's log.
fn cause(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    if let Some(source) = error.source() {
        text = format!("{text}: {source}");
    }
    text.chars().take(200).collect()
}

/// Refuses what can never work, before anything is made for it.
fn check(request: &Request) -> Result<(), &'static str> {
    match request {
        Request::Exec(exec) => check_exec(exec),
        Request::Refresh(request) => {
            refresh::check(request)?;
            check_env(&request.env)?;
            let total = |(name, value): &(ByteBuf, ByteBuf)| name.len() + value.len() + 2;
            let total: usize = request.env.iter().map(total).sum();
            if total > MAX_ARGS / 2 { Err("env is too long") } else { Ok(()) }
        }
        Request::Connect(connect) if connect.port == 0 => Err("port is 0"),
        Request::Connect(_) | Request::ListSessions {} => Ok(()),
        Request::OpenSession(open) => interpreter::check_open(open).and(check_env(&open.env)),
        Request::RunCode(run) => {
            interpreter::check_name(&run.session).and(interpreter::check_code(&run.code))
        }
        Request::CloseSession(close) => interpreter::check_name(&close.session),
        Request::WriteFile(it) if it.sparse && it.in_place => {
            Err("sparse does not go with in_place")
        }
        Request::Symlink(it) if it.target.is_empty() || it.target.contains(&0) => {
            Err("a link's target is empty or contains NUL")
        }
        Request::Info {} | Request::Ping {} | Request::Shutdown(_) => Ok(()),
        Request::Freeze(_) | Request::Thaw {} => Ok(()),
        Request::SignalProcess(it) if !(1..=libc::SIGRTMAX()).contains(&it.signal) => {
            Err("there is no such signal")
        }
        Request::Processes {} | Request::Attach(_) | Request::Metrics {} => Ok(()),
        Request::SignalProcess(_) | Request::ForgetProcess(_) => Ok(()),
        file => files::paths(file).into_iter().try_for_each(|path| match path {
            [] => Err("a path is empty"),
            path if path.len() > MAX_PATH => Err("a path is too long"),
            path if path.contains(&0) => Err("a path contains NUL"),
            [b'/', ..] => Ok(()),
            _ => Err("a path is not absolute"),
        }),
    }
}

fn check_exec(exec: &Exec) -> Result<(), &'static str> {
    use pvmm_guest_agent::limits::{MAX_TAIL, MIN_MEMORY};
    use pvmm_guest_agent::message::Command;

    let words: Vec<&[u8]> = match &exec.command {
        Command::Argv(argv) if argv.is_empty() => return Err("argv is empty"),
        Command::Argv(argv) if argv[0].is_empty() => return Err("argv[0] is empty"),
        Command::Argv(argv) => argv.iter().map(|arg| &arg[..]).collect(),
        Command::Shell(line) => vec![line],
    };
    let names = exec.env.iter().flat_map(|(name, value)| [&name[..], &value[..]]);
    let total: usize = words.iter().copied().chain(names).map(|word| word.len() + 1).sum();
    if total > MAX_ARGS {
        return Err("arguments and environment are too long together");
    }
    if words.iter().any(|word| word.contains(&0)) {
        return Err("an argument contains NUL");
    }
    check_env(&exec.env)?;
    if exec.cwd.as_ref().is_some_and(|cwd| cwd.is_empty() || cwd.contains(&0)) {
        return Err("cwd is empty or contains NUL");
    }
    if let Some(limits) = &exec.limits {
        if limits.memory.is_some_and(|bytes| bytes < MIN_MEMORY) {
            return Err("limits.memory is too little for any program");
        }
        if limits.pids == Some(0) || limits.cpu_milli == Some(0) {
            return Err("a limit of nothing at all lets nothing run");
        }
    }
    if exec.output_limit.is_some_and(|limit| limit.tail > MAX_TAIL) {
        return Err("output_limit.tail is too large");
    }
    Ok(())
}

fn check_env(env: &[(ByteBuf, ByteBuf)]) -> Result<(), &'static str> {
    if env.iter().any(|(name, value)| name.contains(&0) || value.contains(&0)) {
        return Err("an environment entry contains NUL");
    }
    if env.iter().any(|(name, _)| name.is_empty() || name.contains(&b'=')) {
        return Err("an environment name is empty or contains '='");
    }
    Ok(())
}
