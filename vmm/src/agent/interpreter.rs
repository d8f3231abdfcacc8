//! Runs code in an interpreter session of the guest: open, run, close. Outputs arrive by MIME type
//! as they are made.
//!
//! Sessions belong to the guest and not to a connection: a client keeps only their names.

use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{INTERRUPT_GRACE, MAX_CODE, MAX_TIMEOUT, SESSION_TIME};
use pvmm_guest_agent::message::{
    Answer, ByteBuf, CloseSession, OpenSession, Outcome, Request, RunCode, Signal,
};
use pvmm_guest_agent::session::{RECORD_HEAD, RecordKind, parts, record_head};

pub use pvmm_guest_agent::message::{Language, RunReport, RunStatus, SessionInfo};

use super::error::{AgentError, Lost};
use super::stream::{Event, StreamRef};
use super::{ANSWER_TIME, Agent};

/// Time that the guest and the connection may take beyond a call's own limits.
const MARGIN: Duration = Duration::from_secs(30);
/// The most that `run_code` keeps of each text output, and of everything displayed.
const MAX_TEXT: usize = 8 << 20;
const MAX_SHOWN: usize = 64 << 20;

/// The configuration of a session.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// The language of the interpreter.
    pub language: Language,
    /// The session's name; the guest chooses one by default.
    pub name: Option<String>,
    /// Use an existing session of that name.
    pub reuse: bool,
    /// A program other than `python3` or `node`, by path or found in PATH.
    pub program: Option<String>,
    /// Names and values that are added to the interpreter's environment.
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    /// The working directory; `/` by default.
    pub cwd: Option<Vec<u8>>,
    /// The user: `name`, `uid`, `name:group` or `uid:gid`; root by default.
    pub user: Option<String>,
}

impl SessionOptions {
    /// Configures a new session of `language` with the defaults.
    pub fn new(language: Language) -> Self {
        let (name, program, cwd, user) = (None, None, None, None);
        Self { language, name, reuse: false, program, env: Vec::new(), cwd, user }
    }

    /// Configures the session of that name, which is created if it does not exist.
    pub fn named(language: Language, name: &str) -> Self {
        Self { name: Some(name.to_owned()), reuse: true, ..Self::new(language) }
    }
}

/// Code to run in a session.
#[derive(Debug, Clone, Default)]
pub struct CodeRequest {
    /// The source code, at most 900 KiB.
    pub code: String,
    /// Time after which the code is interrupted; the session and its state stay.
    pub timeout: Option<Duration>,
    /// Time between the interrupt and the end of the session.
    pub grace: Option<Duration>,
    /// The most bytes of each output that are sent; the rest is only counted.
    pub output_limit: Option<u64>,
}

impl CodeRequest {
    /// Creates a request without limits.
    pub fn new(code: impl Into<String>) -> Self {
        Self { code: code.into(), ..Self::default() }
    }

    /// Sets the time after which the code is interrupted.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// One value in several representations, by MIME type. Their contents are made in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MimeBundle {
    /// MIME types and contents, in the order in which the guest sent them.
    pub parts: Vec<(String, Vec<u8>)>,
}

impl MimeBundle {
    /// Returns the representation of that type, if there is one.
    pub fn get(&self, mime: &str) -> Option<&[u8]> {
        self.parts.iter().find(|(key, _)| key == mime).map(|(_, data)| &data[..])
    }

    /// Returns the representation of that type as text.
    pub fn text(&self, mime: &str) -> Option<String> {
        self.get(mime).map(|data| String::from_utf8_lossy(data).into_owned())
    }

    /// Returns the memory that the bundle takes, so that many empty bundles are charged, too.
    fn cost(&self) -> usize {
        let part = |(key, data): &(String, Vec<u8>)| {
            size_of::<(String, Vec<u8>)>() + key.len() + data.len()
        };
        size_of::<Self>() + self.parts.iter().map(part).sum::<usize>()
    }
}

/// An exception of the code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CodeError {
    /// The name of the exception.
    pub name: String,
    /// The message of the exception.
    pub value: String,
    /// The stack trace as text.
    pub traceback: String,
}

/// An event of running code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CodeEvent {
    /// The code wrote these bytes to its standard output.
    Stdout(Vec<u8>),
    /// The code wrote these bytes to its standard error.
    Stderr(Vec<u8>),
    /// The code displayed something.
    Display(MimeBundle),
    /// The value of the last expression.
    Result(MimeBundle),
    /// The code raised an exception that nothing caught.
    Error(CodeError),
    /// The call has ended. No other event follows.
    Ended(RunReport),
}

/// The collected output of a call, within limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeOutput {
    /// The standard output, at most the first 8 MiB.
    pub stdout: Vec<u8>,
    /// The standard error, at most the first 8 MiB.
    pub stderr: Vec<u8>,
    /// The displays of the code, in order; at most 64 MiB together with the result.
    pub displays: Vec<MimeBundle>,
    /// The value of the last expression; `None` if it had none, or if it was left out.
    pub result: Option<MimeBundle>,
    /// The exception that ended the code, if one did.
    pub error: Option<CodeError>,
    /// How the call ended.
    pub report: RunReport,
    /// Some output was left out; the report has the counts of the two text outputs.
    pub truncated: bool,
}

impl Agent {
    /// Starts an interpreter, or finds an existing session.
    pub fn open_session(&self, options: &SessionOptions) -> Result<SessionInfo, AgentError> {
        self.ask_session(options, false)
    }

    /// Starts an interpreter for a later [`open_session`](Self::open_session), which takes it if
    /// only its name, environment and working directory differ from the defaults.
    ///
    /// A guest is given one before it is frozen, so that its copies need not start theirs.
    pub fn open_spare_session(&self, language: Language) -> Result<(), AgentError> {
        self.ask_session(&SessionOptions::new(language), true).map(drop)
    }

    fn ask_session(
        &self,
        options: &SessionOptions,
        spare: bool,
    ) -> Result<SessionInfo, AgentError> {
        let bytes = |text: &[u8]| ByteBuf::from(text);
        let request = Request::OpenSession(OpenSession {
            language: options.language,
            session: options.name.clone(),
            reuse: options.reuse,
            program: options.program.as_ref().map(|program| bytes(program.as_bytes())),
            env: options.env.iter().map(|(name, value)| (bytes(name), bytes(value))).collect(),
            cwd: options.cwd.as_deref().map(bytes),
            user: options.user.clone(),
            spare,
        });
        match self.ask(&request, Instant::now() + SESSION_TIME + MARGIN)? {
            Answer::Session(info) => Ok(info),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Starts to run code, which is followed by events.
    pub fn start_code(&self, session: &str, request: &CodeRequest) -> Result<CodeRun, AgentError> {
        if request.code.len() > MAX_CODE {
            return Err(AgentError::InvalidRequest {
                field: "code",
                why: "is longer than 900 KiB",
            });
        }
        let millis = |time: Duration| time.min(MAX_TIMEOUT).as_millis() as u64;
        let stream = self.open(&Request::RunCode(RunCode {
            session: session.to_owned(),
            code: ByteBuf::from(request.code.as_bytes()),
            timeout_ms: request.timeout.map(millis),
            grace_ms: request.grace.map(millis),
            output_limit: request.output_limit,
        }))?;
        let grace = request.grace.unwrap_or(INTERRUPT_GRACE).min(MAX_TIMEOUT);
        let late =
            request.timeout.map(|time| Instant::now() + time.min(MAX_TIMEOUT) + grace + MARGIN);
        Ok(CodeRun { stream, late, bytes: Vec::new(), taken: 0, ended: None })
    }

    /// Runs code to its end and collects its output.
    pub fn run_code(&self, session: &str, request: &CodeRequest) -> Result<CodeOutput, AgentError> {
        self.run_code_with(session, request, |_| {})
    }

    /// Runs code like [`Self::run_code`], and gives `begun` a handle that interrupts it from
    /// another thread.
    pub fn run_code_with(
        &self,
        session: &str,
        request: &CodeRequest,
        begun: impl FnOnce(Interrupter),
    ) -> Result<CodeOutput, AgentError> {
        let mut run = self.start_code(session, request)?;
        begun(run.interrupter());
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let (mut displays, mut result, mut error) = (Vec::new(), None, None);
        let (mut shown, mut truncated) = (0usize, false);
        let mut fits = |bundle: &MimeBundle| {
            let cost = bundle.cost();
            let room = shown + cost <= MAX_SHOWN;
            shown += if room { cost } else { 0 };
            room
        };
        loop {
            match run.next_event(None)? {
                Some(CodeEvent::Stdout(bytes)) => truncated |= !append(&mut stdout, &bytes),
                Some(CodeEvent::Stderr(bytes)) => truncated |= !append(&mut stderr, &bytes),
                Some(CodeEvent::Display(bundle)) if fits(&bundle) => displays.push(bundle),
                Some(CodeEvent::Result(bundle)) if fits(&bundle) => result = Some(bundle),
                Some(CodeEvent::Display(_) | CodeEvent::Result(_)) => truncated = true,
                Some(CodeEvent::Error(thrown)) => error = Some(thrown),
                Some(CodeEvent::Ended(report)) => {
                    truncated |= report.stdout.dropped > 0 || report.stderr.dropped > 0;
                    truncated |= report.dropped > 0;
                    return Ok(CodeOutput {
                        stdout,
                        stderr,
                        displays,
                        result,
                        error,
                        report,
                        truncated,
                    });
                }
                None => return Err(AgentError::Overdue),
            }
        }
    }

    /// Ends a session and all processes it started.
    pub fn close_session(&self, session: &str) -> Result<(), AgentError> {
        let request = Request::CloseSession(CloseSession { session: session.to_owned() });
        match self.ask(&request, Instant::now() + ANSWER_TIME)? {
            Answer::Done {} => Ok(()),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Returns all sessions of the guest.
    pub fn sessions(&self) -> Result<Vec<SessionInfo>, AgentError> {
        match self.ask(&Request::ListSessions {}, Instant::now() + ANSWER_TIME)? {
            Answer::Sessions(sessions) => Ok(sessions),
            _ => Err(AgentError::WrongAnswer),
        }
    }
}

/// Appends the bytes that fit and returns whether all did.
fn append(kept: &mut Vec<u8>, bytes: &[u8]) -> bool {
    let fits = bytes.len().min(MAX_TEXT - kept.len());
    kept.extend_from_slice(&bytes[..fits]);
    fits == bytes.len()
}

/// Running code. Dropping it before the end interrupts the code; its session stays.
pub struct CodeRun {
    stream: StreamRef,
    late: Option<Instant>,
    /// The bytes received, and how many of them were consumed: a chunk of many small records is
    /// moved once, not once for each record.
    bytes: Vec<u8>,
    taken: usize,
    ended: Option<RunReport>,
}

impl CodeRun {
    /// Waits for the next event; returns `None` when the deadline passes first. After `Ended`,
    /// every call returns `Ended` again.
    pub fn next_event(
        &mut self,
        deadline: Option<Instant>,
    ) -> Result<Option<CodeEvent>, AgentError> {
        loop {
            if let Some(report) = self.ended {
                return Ok(Some(CodeEvent::Ended(report)));
            }
            if let Some(event) = self.take_record()? {
                return Ok(Some(event));
            }
            let until = [deadline, self.late].into_iter().flatten().min();
            match self.stream.next(until)? {
                Some(Event::Data(_, bytes)) => {
                    self.bytes.drain(..std::mem::take(&mut self.taken));
                    self.bytes.extend_from_slice(&bytes);
                }
                Some(Event::Done(Outcome::Ok(Answer::Run(report))))
                    if self.taken == self.bytes.len() =>
                {
                    self.ended = Some(report);
                }
                Some(Event::Done(Outcome::Ok(_))) => return Err(AgentError::WrongAnswer),
                Some(Event::Done(Outcome::Failed(failure))) => return Err(failure.into()),
                None if self.late.is_some_and(|late| late <= Instant::now()) => {
                    self.stream.cancel();
                    return Err(AgentError::Overdue);
                }
                None => return Ok(None),
            }
        }
    }

    /// Interrupts the code, as Ctrl-C would.
    pub fn interrupt(&self) -> Result<(), AgentError> {
        self.interrupter().interrupt()
    }

    /// Returns a handle that interrupts the code from another thread.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter { stream: self.stream.clone() }
    }

    /// Decodes the next whole record.
    fn take_record(&mut self) -> Result<Option<CodeEvent>, AgentError> {
        const BAD: AgentError = AgentError::Lost(Lost::Protocol("a malformed record"));
        let Some((head, body)) = self.bytes[self.taken..].split_first_chunk::<RECORD_HEAD>() else {
            return Ok(None);
        };
        let (len, kind) = record_head(*head).ok_or(BAD)?;
        if body.len() < len {
            return Ok(None);
        }
        let body = &body[..len];
        let bundle = |body| parts(body).map(|parts| MimeBundle { parts }).ok_or(BAD);
        let event = match kind {
            RecordKind::Stdout => CodeEvent::Stdout(body.to_vec()),
            RecordKind::Stderr => CodeEvent::Stderr(body.to_vec()),
            RecordKind::Display => CodeEvent::Display(bundle(body)?),
            RecordKind::Result => CodeEvent::Result(bundle(body)?),
            RecordKind::Error => {
                let told = bundle(body)?;
                let text = |key| told.text(key).unwrap_or_default();
                let (name, value) = (text("name"), text("value"));
                CodeEvent::Error(CodeError { name, value, traceback: text("traceback") })
            }
            RecordKind::Done | RecordKind::Ready => return Err(BAD),
        };
        self.taken += RECORD_HEAD + len;
        Ok(Some(event))
    }
}

impl Drop for CodeRun {
    fn drop(&mut self) {
        self.stream.cancel();
    }
}

/// A handle that interrupts code from another thread.
#[derive(Clone)]
pub struct Interrupter {
    stream: StreamRef,
}

impl Interrupter {
    /// Interrupts the code, as Ctrl-C would.
    pub fn interrupt(&self) -> Result<(), AgentError> {
        self.stream.signal(&Signal { signal: libc::SIGINT, scope: Default::default() })
    }
}
