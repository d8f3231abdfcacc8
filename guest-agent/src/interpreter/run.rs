//! Runs one call in a session, on a thread of its own: sends code, forwards records, and interrupts
//! the code when its time is over.
//!
//! The thread keeps only a small buffer: output that cannot be sent stays in the pipes and blocks
//! the code.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{INTERRUPT_GRACE, MAX_TIMEOUT};
use pvmm_guest_agent::message::{
    Answer, Code, Outcome, OutputCount, RunCode, RunReport, RunStatus,
};
use pvmm_guest_agent::session::{ACK, RECORD_HEAD, RecordKind, TAKEN, head_of, record_head};

use super::{Session, SessionEnds};
use crate::sys;
use crate::sys::session::{Interest, wait};

pub(super) const CHUNK: usize = 32 << 10;
/// The limit of records waiting for the client, above which nothing more is read.
const MARK: usize = 64 << 10;
/// The time limit for a killed interpreter to end.
const KILL_TIME: Duration = Duration::from_secs(5);
/// How often to check whether a frozen workload was thawed.
const FROZEN_STEP: Duration = Duration::from_millis(100);

/// Runs code to its end.
pub fn run(session: &Session, request: &RunCode, client: OwnedFd) -> Outcome {
    let Some(ends) = session.take() else {
        return match session.lock().ended {
            Some(_) => gone(),
            None => Outcome::failed(Code::Busy, None, "other code is running in the session"),
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
        phase: CallPhase::Running(request.timeout_ms.map(|millis| begun + limit(millis))),
        grace: request.grace_ms.map_or(INTERRUPT_GRACE, limit),
        timed_out: false,
    };
    let end = call.run();
    let report = RunReport {
        status: match end {
            CallEnd::Done if call.threw => RunStatus::Error {},
            CallEnd::Done => RunStatus::Ok {},
            CallEnd::Died => RunStatus::Died { status: None },
        },
        timed_out: call.timed_out,
        dropped: call.dropped,
        stdout: call.stdout,
        stderr: call.stderr,
        duration_us: begun.elapsed().as_micros() as u64,
        run,
    };
    let (out, client) = (std::mem::take(&mut call.out), call.client.take());
    // The session is free before the client has read the last records.
    let report = match end {
        CallEnd::Done => {
            session.give_back(ends);
            report
        }
        CallEnd::Died => {
            session.kill();
            let status = session.wait_ended(KILL_TIME);
            RunReport { status: RunStatus::Died { status }, ..report }
        }
    };
    send_rest(client, &out);
    Outcome::Ok(Answer::Run(report))
}

pub(super) fn gone() -> Outcome {
    Outcome::failed(Code::Io, Some(libc::ESRCH), "the interpreter has ended")
}

/// Sends the last records, as long as the client reads them.
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

enum CallEnd {
    Done,
    Died,
}

/// The stage of a call's time limit.
#[derive(Clone, Copy)]
enum CallPhase {
    Running(Option<Instant>),
    /// The code was interrupted and is killed at the given time.
    Interrupted(Instant),
    Killed(Instant),
}

struct Call<'a> {
    session: &'a Session,
    ends: &'a SessionEnds,
    /// The rest of the code that is still to be sent.
    code: Vec<u8>,
    /// `None` once the client has gone.
    client: Option<OwnedFd>,
    out: Vec<u8>,
    /// The bytes still to come of a record that is being forwarded; no other record may interrupt
    /// it.
    record_left: usize,
    record_head: Vec<u8>,
    record_asks: bool,
    record_dropped: bool,
    /// Records that were dropped because the client did not read them.
    dropped: u64,
    limit: u64,
    /// Outputs that the interpreter has closed.
    closed: [bool; 2],
    stdout: OutputCount,
    stderr: OutputCount,
    threw: bool,
    phase: CallPhase,
    grace: Duration,
    timed_out: bool,
}

impl Call<'_> {
    fn run(&mut self) -> CallEnd {
        loop {
            self.flush();
            match self.wait() {
                Ok(dead) => {
                    // Outputs first: the driver flushes them before it sends a record.
                    let quiet = !self.read_outputs();
                    if quiet && let Some(end) = self.read_control(dead) {
                        return end;
                    }
                }
                Err(_) => return CallEnd::Died,
            }
            if let Some(end) = self.check_time() {
                return end;
            }
        }
    }

    fn is_full(&self) -> bool {
        self.client.is_some() && self.out.len() >= MARK
    }

    /// Waits until something can be done, and returns whether the interpreter is dead.
    fn wait(&mut self) -> std::io::Result<bool> {
        let until = match self.phase {
            CallPhase::Running(until) => until,
            CallPhase::Interrupted(until) | CallPhase::Killed(until) => Some(until),
        };
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = if self.session.is_frozen() { Some(FROZEN_STEP) } else { left };
        // A descriptor that is not read must not be polled: its end would be reported forever.
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
            // Even without read or write interest, poll reports a client that has gone.
            interest.push(Interest { fd: client, read: false, write: !self.out.is_empty() });
        }
        let ready = wait(&interest, left)?;
        if self.client.is_some() && self.out.is_empty() && ready[ready.len() - 1] {
            self.lose_client();
        }
        self.send_code();
        Ok(!held && ready[0])
    }

    /// Returns whether the driver has to wait: for its client while the code may run, and always in
    /// the middle of a record.
    fn holds_control(&self) -> bool {
        let forwarding = self.record_left > 0 && !self.record_dropped;
        self.is_full() && (forwarding || matches!(self.phase, CallPhase::Running(_)))
    }

    /// Returns whether outputs are read. An interrupted call drops output rather than wait for its
    /// client.
    fn reads_outputs(&self) -> bool {
        self.record_left == 0 && (!self.is_full() || !matches!(self.phase, CallPhase::Running(_)))
    }

    fn send_code(&mut self) {
        if !self.code.is_empty()
            && let Ok(count) = sys::write_once(&self.ends.control, &self.code)
        {
            self.code.drain(..count);
        }
    }

    /// Forwards output, and returns whether there was some.
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

    /// Forwards the driver's records, until one says that the code has ended.
    fn read_control(&mut self, dead: bool) -> Option<CallEnd> {
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
            Err(e) if e.kind() == ErrorKind::WouldBlock => return dead.then_some(CallEnd::Died),
            Ok(0) | Err(_) => return Some(CallEnd::Died),
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
            Some((0, RecordKind::Done)) => Some(CallEnd::Done),
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
            // The code has found the driver's descriptor and written to it.
            _ => Some(CallEnd::Died),
        }
    }

    /// Acknowledges a whole record to a driver that waits for it.
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

    /// Handles the loss of the client: the code is interrupted, and its session stays.
    fn lose_client(&mut self) {
        self.client = None;
        self.out.clear();
        self.session.abandoned.store(true, Ordering::Release);
        if matches!(self.phase, CallPhase::Running(_)) {
            self.interrupt();
        }
    }

    fn interrupt(&mut self) {
        self.session.interrupt();
        self.phase = CallPhase::Interrupted(Instant::now() + self.grace);
    }

    fn check_time(&mut self) -> Option<CallEnd> {
        let now = Instant::now();
        if self.session.is_frozen() {
            return None;
        }
        match self.phase {
            CallPhase::Running(Some(until)) if until <= now => {
                self.timed_out = true;
                self.interrupt();
            }
            CallPhase::Interrupted(until) if until <= now => {
                self.session.kill();
                self.phase = CallPhase::Killed(now + KILL_TIME);
            }
            CallPhase::Killed(until) if until <= now => return Some(CallEnd::Died),
            _ => {}
        }
        None
    }
}
