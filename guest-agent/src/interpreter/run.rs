//! One call in a session, on a thread of its own: code in, records out, an interrupt when it is time.
//! The thread copies and never keeps: what is not sent stays in the pipes and holds the code up.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{INTERRUPT_GRACE, MAX_TIMEOUT, SESSION_TIME};
use pvmm_guest_agent::message::{
    Answer, Code, Outcome, OutputCount, RunCode, RunReport, RunStatus,
};
use pvmm_guest_agent::session::{ACK, RECORD_HEAD, RecordKind, TAKEN, head_of, parts, record_head};

use super::{Ends, Session, failed};
use crate::sys;
use crate::sys::session::{Interest, wait};

const CHUNK: usize = 32 << 10;
/// Records waiting for the client, beyond which nothing more is read.
const MARK: usize = 64 << 10;
/// How long a killed interpreter may take to be gone.
const KILL_TIME: Duration = Duration::from_secs(5);
/// How often to look whether a frozen workload goes on.
const FROZEN_STEP: Duration = Duration::from_millis(100);
/// How much of an interpreter's last words goes into an error.
const LAST_WORDS: usize = 300;

/// Waits until a new interpreter takes code.
pub fn wait_ready(session: &Session) -> Outcome {
    let Some(ends) = session.take() else { return gone() };
    let deadline = Instant::now() + SESSION_TIME;
    let mut heard = Vec::new();
    let ready = loop {
        let interest = [Interest::read(&ends.control), Interest::read(&ends.process)];
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(ready) = wait(&interest, Some(left)) else { break None };
        if ready[0] {
            match sys::read_onto(&ends.control, &mut heard, CHUNK) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => break None,
                Ok(_) => {}
            }
            if let Some((len, body)) = greeting(&heard) {
                match len {
                    Some(len) if body.len() < len => {}
                    Some(len) => break parts(&body[..len]),
                    None => break None,
                }
            }
        } else if ready[1] || left.is_zero() {
            break None;
        }
    };
    let Some(ready) = ready else {
        session.kill();
        let mut words = Vec::new();
        let _ = sys::read_onto(&ends.stderr, &mut words, LAST_WORDS);
        let words = String::from_utf8_lossy(&words);
        return failed(Code::Io, None, &format!("the interpreter did not start: {}", words.trim()));
    };
    let version = ready.into_iter().find(|(key, _)| key == "version");
    let version =
        version.map(|(_, value)| String::from_utf8_lossy(&value).chars().take(32).collect());
    session.lock().version = version.unwrap_or_default();
    session.give_back(ends);
    Outcome::Ok(Answer::Session(session.info()))
}

/// Of what came first: the length of a greeting's body (`None` if it is something else) and the rest.
fn greeting(heard: &[u8]) -> Option<(Option<usize>, &[u8])> {
    let (head, body) = heard.split_first_chunk::<RECORD_HEAD>()?;
    let len = match record_head(*head) {
        Some((len, RecordKind::Ready)) if len <= CHUNK => Some(len),
        _ => None,
    };
    Some((len, body))
}

/// Runs code to its end.
pub fn run(session: &Session, request: &RunCode, client: OwnedFd) -> Outcome {
    let Some(ends) = session.take() else {
        return match session.lock().ended {
            Some(_) => gone(),
            None => failed(Code::Busy, None, "other code is running in the session"),
        };
    };
    let run = session.runs.fetch_add(1, Ordering::Relaxed) + 1;
    let begun = Instant::now();
    let limit = |millis| Duration::from_millis(millis).min(MAX_TIMEOUT);
    let mut call = Call {
        session,
        ends: &ends,
        code: [&(request.code.len() as u32).to_le_bytes()[..], &request.code].concat(),
        client: Some(client),
        out: Vec::new(),
        record_left: 0,
        record_head: Vec::new(),
        record_asks: false,
        record_dropped: false,
        dropped: 0,
        limit: request.output_limit.unwrap_or(u64::MAX),
        closed: [false; 2],
        stdout: OutputCount::default(),
        stderr: OutputCount::default(),
        threw: false,
        phase: Phase::Running(request.timeout_ms.map(|millis| begun + limit(millis))),
        grace: request.grace_ms.map_or(INTERRUPT_GRACE, limit),
        timed_out: false,
    };
    let end = call.run();
    let report = RunReport {
        status: match end {
            End::Done if call.threw => RunStatus::Error {},
            End::Done => RunStatus::Ok {},
            End::Died => RunStatus::Died { status: None },
        },
        timed_out: call.timed_out,
        dropped: call.dropped,
        stdout: call.stdout,
        stderr: call.stderr,
        duration_us: begun.elapsed().as_micros() as u64,
        run,
    };
    let (out, client) = (std::mem::take(&mut call.out), call.client.take());
    // The session is free before the client has read the last of it.
    let report = match end {
        End::Done => {
            session.give_back(ends);
            report
        }
        End::Died => {
            session.kill();
            let status = session.wait_ended(KILL_TIME);
            RunReport { status: RunStatus::Died { status }, ..report }
        }
    };
    send_rest(client, &out);
    Outcome::Ok(Answer::Run(report))
}

fn gone() -> Outcome {
    failed(Code::Io, Some(libc::ESRCH), "the interpreter has ended")
}

/// Sends the last records, for as long as there is somebody to read them.
fn send_rest(client: Option<OwnedFd>, mut out: &[u8]) {
    let Some(client) = client else { return };
    while !out.is_empty() {
        match sys::write_once(&client, out) {
            Ok(count) => out = &out[count..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                if wait(&[Interest::write(&client)], None).is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

enum End {
    Done,
    Died,
}

/// How patient the call still is.
#[derive(Clone, Copy)]
enum Phase {
    Running(Option<Instant>),
    /// Interrupted; killed at the given time.
    Interrupted(Instant),
    Killed(Instant),
}

struct Call<'a> {
    session: &'a Session,
    ends: &'a Ends,
    /// What is left to send of it.
    code: Vec<u8>,
    /// `None` once the client has gone.
    client: Option<OwnedFd>,
    out: Vec<u8>,
    /// Of a record that is being passed on, the bytes still to come; no other may come between.
    record_left: usize,
    record_head: Vec<u8>,
    record_asks: bool,
    record_dropped: bool,
    /// Records that were left out because nobody took them.
    dropped: u64,
    limit: u64,
    /// Outputs that the interpreter has closed.
    closed: [bool; 2],
    stdout: OutputCount,
    stderr: OutputCount,
    threw: bool,
    phase: Phase,
    grace: Duration,
    timed_out: bool,
}

impl Call<'_> {
    fn run(&mut self) -> End {
        loop {
            self.flush();
            match self.wait() {
                Ok(dead) => {
                    // The outputs first: the driver flushes them before it says anything itself.
                    let quiet = !self.read_outputs();
                    if quiet && let Some(end) = self.read_control(dead) {
                        return end;
                    }
                }
                Err(_) => return End::Died,
            }
            if let Some(end) = self.check_time() {
                return end;
            }
        }
    }

    fn is_full(&self) -> bool {
        self.client.is_some() && self.out.len() >= MARK
    }

    /// Waits until something can be done; whether the interpreter is dead.
    fn wait(&mut self) -> std::io::Result<bool> {
        let until = match self.phase {
            Phase::Running(until) => until,
            Phase::Interrupted(until) | Phase::Killed(until) => Some(until),
        };
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = if self.session.is_frozen() { Some(FROZEN_STEP) } else { left };
        // A descriptor that nobody reads from must not be polled: its end would be told for ever.
        let mut interest = Vec::new();
        let held = self.holds_control();
        if !held {
            interest.push(Interest::read(&self.ends.process));
        }
        if !held || !self.code.is_empty() {
            let write = !self.code.is_empty();
            interest.push(Interest { fd: &self.ends.control, read: !held, write });
        }
        if self.reads_outputs() {
            let open = [(&self.ends.stdout, self.closed[0]), (&self.ends.stderr, self.closed[1])];
            let open = open.into_iter().filter(|(_, closed)| !closed);
            interest.extend(open.map(|(fd, _)| Interest::read(fd)));
        }
        if let Some(client) = &self.client {
            // Without interest it still tells of a client that has gone.
            interest.push(Interest { fd: client, read: false, write: !self.out.is_empty() });
        }
        let ready = wait(&interest, left)?;
        if self.client.is_some() && self.out.is_empty() && ready[ready.len() - 1] {
            self.lose_client();
        }
        self.send_code();
        Ok(!held && ready[0])
    }

    /// The driver has to wait: for its client while the code may run, and in mid-record always.
    fn holds_control(&self) -> bool {
        let forwarding = self.record_left > 0 && !self.record_dropped;
        self.is_full() && (forwarding || matches!(self.phase, Phase::Running(_)))
    }

    /// An interrupted call throws output away rather than wait for its client.
    fn reads_outputs(&self) -> bool {
        self.record_left == 0 && (!self.is_full() || !matches!(self.phase, Phase::Running(_)))
    }

    fn send_code(&mut self) {
        if !self.code.is_empty()
            && let Ok(count) = sys::write_once(&self.ends.control, &self.code)
        {
            self.code.drain(..count);
        }
    }

    /// Passes output on; whether there was some.
    fn read_outputs(&mut self) -> bool {
        if !self.reads_outputs() {
            return false;
        }
        let mut some = false;
        for (index, kind) in [RecordKind::Stdout, RecordKind::Stderr].into_iter().enumerate() {
            let (fd, count) = match kind {
                RecordKind::Stdout => (&self.ends.stdout, &mut self.stdout),
                _ => (&self.ends.stderr, &mut self.stderr),
            };
            let mut bytes = Vec::new();
            match sys::read_onto(fd, &mut bytes, CHUNK) {
                Ok(1..) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                _ => {
                    self.closed[index] = true;
                    continue;
                }
            }
            some = true;
            let sent = count.total - count.dropped;
            let mut keep = self.limit.saturating_sub(sent).min(bytes.len() as u64) as usize;
            if self.client.is_none() || self.out.len() >= MARK {
                keep = 0;
            }
            count.total += bytes.len() as u64;
            count.dropped += (bytes.len() - keep) as u64;
            if keep > 0 {
                self.out.extend_from_slice(&head_of(kind, keep));
                self.out.extend_from_slice(&bytes[..keep]);
            }
        }
        some
    }

    /// Passes the driver's records on, until it says that the code has ended.
    fn read_control(&mut self, dead: bool) -> Option<End> {
        if self.holds_control() {
            return None;
        }
        let wanted = if self.record_left > 0 {
            self.record_left.min(CHUNK)
        } else {
            RECORD_HEAD - self.record_head.len()
        };
        let mut bytes = Vec::new();
        match sys::read_onto(&self.ends.control, &mut bytes, wanted) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => return dead.then_some(End::Died),
            Ok(0) | Err(_) => return Some(End::Died),
            Ok(_) => {}
        }
        if self.record_left > 0 {
            self.record_left -= bytes.len();
            if !self.record_dropped && self.client.is_some() {
                self.out.extend_from_slice(&bytes);
            }
            self.end_record();
            return None;
        }
        self.record_head.extend_from_slice(&bytes);
        let mut head = *self.record_head.first_chunk::<RECORD_HEAD>()?;
        self.record_head.clear();
        self.record_asks = head[4] & ACK != 0;
        head[4] &= !ACK;
        match record_head(head) {
            Some((0, RecordKind::Done)) => Some(End::Done),
            Some((len, kind @ (RecordKind::Display | RecordKind::Result | RecordKind::Error))) => {
                self.threw |= kind == RecordKind::Error;
                self.record_left = len;
                self.record_dropped = self.client.is_none() || self.is_full();
                self.dropped += u64::from(self.record_dropped);
                if !self.record_dropped {
                    self.out.extend_from_slice(&head);
                }
                self.end_record();
                None
            }
            // The code has found the driver's descriptor and spoken on it.
            _ => Some(End::Died),
        }
    }

    /// Tells a driver that waits for it that its record was taken whole.
    fn end_record(&mut self) {
        if self.record_left == 0 && std::mem::take(&mut self.record_asks) {
            self.code.push(TAKEN);
        }
    }

    fn flush(&mut self) {
        while let Some(client) = self.client.as_ref().filter(|_| !self.out.is_empty()) {
            match sys::write_once(client, &self.out) {
                Ok(count) => drop(self.out.drain(..count)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.lose_client(),
            }
        }
    }

    /// Nobody waits for the code any more: it is interrupted, and its session goes on.
    fn lose_client(&mut self) {
        self.client = None;
        self.out.clear();
        self.session.abandoned.store(true, Ordering::Release);
        if matches!(self.phase, Phase::Running(_)) {
            self.interrupt();
        }
    }

    fn interrupt(&mut self) {
        self.session.interrupt();
        self.phase = Phase::Interrupted(Instant::now() + self.grace);
    }

    fn check_time(&mut self) -> Option<End> {
        let now = Instant::now();
        if self.session.is_frozen() {
            return None;
        }
        match self.phase {
            Phase::Running(Some(until)) if until <= now => {
                self.timed_out = true;
                self.interrupt();
            }
            Phase::Interrupted(until) if until <= now => {
                self.session.kill();
                self.phase = Phase::Killed(now + KILL_TIME);
            }
            Phase::Killed(until) if until <= now => return Some(End::Died),
            _ => {}
        }
        None
    }
}
