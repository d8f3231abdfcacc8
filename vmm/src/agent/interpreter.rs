//! Code in an interpreter session of the guest: open, run, close; outputs by MIME type as they come.
//! Sessions belong to the guest and not to a connection: their names are all a client has to keep.

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

/// What the guest and the way to it may take beyond a call's own limits.
const MARGIN: Duration = Duration::from_secs(30);
/// What `run_code` keeps of each of the two outputs, and of everything displayed.
const MAX_TEXT: usize = 8 << 20;
const MAX_SHOWN: usize = 64 << 20;

/// What session is wanted.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    pub language: Language,
    /// Its name; the guest finds one without.
    pub name: Option<String>,
    /// Take the session of that name if there is one.
    pub reuse: bool,
    /// Another program than `python3` or `node`, by path or along PATH.
    pub program: Option<String>,
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    pub cwd: Option<Vec<u8>>,
    pub user: Option<String>,
}

impl SessionOptions {
    pub fn new(language: Language) -> Self {
        let (name, program, cwd, user) = (None, None, None, None);
        Self { language, name, reuse: false, program, env: Vec::new(), cwd, user }
    }

    /// The session of that name, made if there is none.
    pub fn named(language: Language, name: &str) -> Self {
        Self { name: Some(name.to_owned()), reuse: true, ..Self::new(language) }
    }
}

/// Code to run in a session.
#[derive(Debug, Clone, Default)]
pub struct CodeRequest {
    pub code: String,
    /// Afterwards the code is interrupted; the session and its state go on.
    pub timeout: Option<Duration>,
    /// How long it may then take before the session is ended.
    pub grace: Option<Duration>,
    /// Of each output, how many bytes come; the rest is counted.
    pub output_limit: Option<u64>,
}

impl CodeRequest {
    pub fn new(code: impl Into<String>) -> Self {
        Self { code: code.into(), ..Self::default() }
    }

    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// One thing in several forms, by MIME type. What they hold was made in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MimeBundle {
    pub parts: Vec<(String, Vec<u8>)>,
}

impl MimeBundle {
    /// The form of that type, if it has one.
    pub fn get(&self, mime: &str) -> Option<&[u8]> {
        self.parts.iter().find(|(key, _)| key == mime).map(|(_, data)| &data[..])
    }

    /// The form of that type as text.
    pub fn text(&self, mime: &str) -> Option<String> {
        self.get(mime).map(|data| String::from_utf8_lossy(data).into_owned())
    }

    /// The memory that it takes, so that many empty ones are not free of charge.
    fn cost(&self) -> usize {
        let part = |(key, data): &(String, Vec<u8>)| {
            size_of::<(String, Vec<u8>)>() + key.len() + data.len()
        };
        size_of::<Self>() + self.parts.iter().map(part).sum::<usize>()
    }
}

/// What the code threw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CodeError {
    pub name: String,
    pub value: String,
    pub traceback: String,
}

/// Something that happened while code ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CodeEvent {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// The code displayed something.
    Display(MimeBundle),
    /// The value of its last expression.
    Result(MimeBundle),
    Error(CodeError),
    Ended(RunReport),
}

/// Everything a call gave, within caps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeOutput {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub displays: Vec<MimeBundle>,
    pub result: Option<MimeBundle>,
    pub error: Option<CodeError>,
    pub report: RunReport,
    /// Something was left out: see the report's counts for the two outputs.
    pub truncated: bool,
}

impl Agent {
    /// Starts an interpreter, or finds the one that is there.
    pub fn open_session(&self, options: &SessionOptions) -> Result<SessionInfo, AgentError> {
        let bytes = |text: &[u8]| ByteBuf::from(text);
        let request = Request::OpenSession(OpenSession {
            language: options.language,
            session: options.name.clone(),
            reuse: options.reuse,
            program: options.program.as_ref().map(|program| bytes(program.as_bytes())),
            env: options.env.iter().map(|(name, value)| (bytes(name), bytes(value))).collect(),
            cwd: options.cwd.as_deref().map(bytes),
            user: options.user.clone(),
        });
        match self.ask(&request, Instant::now() + SESSION_TIME + MARGIN)? {
            Answer::Session(info) => Ok(info),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Begins to run code; what it does comes as events.
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

    /// Runs code to its end and collects what it gave.
    pub fn run_code(&self, session: &str, request: &CodeRequest) -> Result<CodeOutput, AgentError> {
        let mut run = self.start_code(session, request)?;
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

    /// Ends a session and everything it started.
    pub fn close_session(&self, session: &str) -> Result<(), AgentError> {
        let request = Request::CloseSession(CloseSession { session: session.to_owned() });
        match self.ask(&request, Instant::now() + ANSWER_TIME)? {
            Answer::Done {} => Ok(()),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// The sessions there are, whoever opened them.
    pub fn sessions(&self) -> Result<Vec<SessionInfo>, AgentError> {
        match self.ask(&Request::ListSessions {}, Instant::now() + ANSWER_TIME)? {
            Answer::Sessions(sessions) => Ok(sessions),
            _ => Err(AgentError::WrongAnswer),
        }
    }
}

/// Keeps what fits; whether all did.
fn append(kept: &mut Vec<u8>, bytes: &[u8]) -> bool {
    let fits = bytes.len().min(MAX_TEXT - kept.len());
    kept.extend_from_slice(&bytes[..fits]);
    fits == bytes.len()
}

/// Code while it runs. Dropping it before its end interrupts it; its session goes on.
pub struct CodeRun {
    stream: StreamRef,
    late: Option<Instant>,
    /// What came, and how much of it was taken: a chunk of many small records is moved once, not
    /// once for each.
    bytes: Vec<u8>,
    taken: usize,
    ended: Option<RunReport>,
}

impl CodeRun {
    /// What happens next; `None` when the caller's deadline passes first. After `Ended` it is
    /// `Ended` again.
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

    /// A way to interrupt from another thread.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter { stream: self.stream.clone() }
    }

    /// The next whole record.
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

/// Interrupts code of another thread's.
#[derive(Clone)]
pub struct Interrupter {
    stream: StreamRef,
}

impl Interrupter {
    pub fn interrupt(&self) -> Result<(), AgentError> {
        self.stream.signal(&Signal { signal: libc::SIGINT, scope: Default::default() })
    }
}
