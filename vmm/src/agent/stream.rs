//! The stream of one request: received data that was not taken yet, and both windows.
//!
//! Its buffer is bounded by the credit that the host granted; an agent that sends more loses the
//! connection.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use pvmm_guest_agent::frame::{END, Frame, Header, credit_frame};
use pvmm_guest_agent::limits::{FILE_WINDOW, INPUT_WINDOW, MAX_DATA, OUTPUT_WINDOW};
use pvmm_guest_agent::message::{Outcome, Request, Signal, Started, WindowSize};
use pvmm_guest_agent::window::{ReceiveWindow, SendWindow};
use pvmm_guest_agent::{Channel, Kind, decode, encode};

use super::connection::{Connection, lock};
use super::error::{AgentError, Lost};

/// The most bytes sent at once: a few frames, so that the receiver wakes up for more than one.
const SEND_BYTES: usize = 4 * MAX_DATA;

/// An event of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Data(Channel, Vec<u8>),
    Done(Outcome),
}

/// The result of waiting for the output channel alone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    Bytes(Vec<u8>),
    /// The channel has ended; the stream may go on.
    Ended,
    Done(Outcome),
}

/// The result of waiting while there is input to send.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Exchange {
    Event(Event),
    /// This many bytes of the input were sent.
    Sent(usize),
    /// The agent accepts no more input.
    InputRefused,
}

/// A stream as the reader thread and its user share it.
pub struct Stream {
    number: u32,
    state: Mutex<StreamState>,
    changed: Condvar,
}

struct StreamState {
    /// Consecutive bytes of one channel form one chunk, whatever frames they came in.
    chunks: VecDeque<(Channel, Vec<u8>)>,
    output: Incoming,
    error: Incoming,
    input: SendWindow,
    /// The agent accepts no more input.
    input_refused: bool,
    input_ended: bool,
    started: Option<Started>,
    outcome: Option<Outcome>,
    /// The outcome has been received; a second one is ignored.
    over: bool,
    lost: Option<Lost>,
}

struct Incoming {
    window: ReceiveWindow,
    ended: bool,
}

impl Incoming {
    fn new() -> Self {
        Self { window: ReceiveWindow::new(OUTPUT_WINDOW), ended: false }
    }
}

impl StreamState {
    fn incoming(&mut self, channel: Channel) -> Option<&mut Incoming> {
        match channel {
            Channel::Input => None,
            Channel::Output => Some(&mut self.output),
            Channel::Error => Some(&mut self.error),
        }
    }

    /// Takes the next event and the credit that it frees.
    fn take_event(&mut self) -> Option<(Event, Option<u32>)> {
        if let Some((channel, bytes)) = self.chunks.pop_front() {
            let grant = self.incoming(channel).and_then(|it| it.window.consumed(bytes.len()));
            return Some((Event::Data(channel, bytes), grant));
        }
        self.outcome.take().map(|outcome| (Event::Done(outcome), None))
    }

    /// Reserves how many of `len` bytes of input to send now: zero when no more is accepted, `None`
    /// when there is no credit.
    fn reserve_input(&mut self, len: usize) -> Option<usize> {
        if self.input_refused || self.input_ended || self.over {
            return Some(0);
        }
        let count = self.input.left().min(len).min(SEND_BYTES);
        self.input.sent(count);
        (count > 0).then_some(count)
    }

    fn push(&mut self, channel: Channel, bytes: &[u8]) {
        match self.chunks.back_mut() {
            Some((last, chunk)) if *last == channel && chunk.len() + bytes.len() <= MAX_DATA => {
                chunk.extend_from_slice(bytes);
            }
            _ => self.chunks.push_back((channel, bytes.to_vec())),
        }
    }
}

impl Stream {
    pub fn new(number: u32) -> Self {
        let state = StreamState {
            chunks: VecDeque::new(),
            output: Incoming::new(),
            error: Incoming::new(),
            input: SendWindow::new(INPUT_WINDOW),
            input_refused: false,
            input_ended: false,
            started: None,
            outcome: None,
            over: false,
            lost: None,
        };
        Self { number, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Takes in a frame and returns whether it was used.
    pub(super) fn take(&self, frame: Frame<'_>) -> Result<bool, Lost> {
        let mut state = lock(&self.state);
        if state.over {
            return Ok(false);
        }
        match frame.header.kind {
            Kind::Started => {
                let started = decode(frame.payload)
                    .map_err(|_| Lost::Protocol("a malformed started message"))?;
                if state.started.is_some() {
                    return Ok(false);
                }
                state.started = Some(started);
            }
            Kind::Data => {
                let channel = frame.header.channel();
                let Some(incoming) = state.incoming(channel) else {
                    return Err(Lost::Protocol("data on a channel that is ours"));
                };
                if incoming.ended {
                    return Ok(false);
                }
                incoming
                    .window
                    .received(frame.payload.len())
                    .map_err(|_| Lost::Protocol("more data than it had credit for"))?;
                incoming.ended = frame.header.ends();
                if !frame.payload.is_empty() {
                    state.push(channel, frame.payload);
                }
            }
            Kind::Credit => {
                if frame.header.channel() != Channel::Input {
                    return Err(Lost::Protocol("credit for a channel of its own"));
                }
                state
                    .input
                    .grant(frame.credit())
                    .map_err(|_| Lost::Protocol("credit beyond all bounds"))?;
                state.input_refused |= frame.header.ends();
            }
            _ => {
                let outcome =
                    decode(frame.payload).map_err(|_| Lost::Protocol("a malformed outcome"))?;
                state.outcome = Some(outcome);
                state.over = true;
            }
        }
        drop(state);
        self.changed.notify_all();
        Ok(true)
    }

    pub(super) fn lose(&self, why: Lost) {
        lock(&self.state).lost.get_or_insert(why);
        self.changed.notify_all();
    }
}

/// A user's reference to a stream.
#[derive(Clone)]
pub(crate) struct StreamRef {
    connection: Arc<Connection>,
    stream: Arc<Stream>,
}

impl StreamRef {
    pub fn open(connection: &Arc<Connection>, request: &Request) -> Result<Self, AgentError> {
        let stream = connection.open(request)?;
        Ok(Self { connection: Arc::clone(connection), stream })
    }

    /// Returns the stream whose request was sent together with the hello.
    pub fn opened_before(connection: &Arc<Connection>) -> Result<Self, AgentError> {
        let stream = connection.first_stream()?;
        Ok(Self { connection: Arc::clone(connection), stream })
    }

    /// Waits for the next event; returns `None` when the deadline passes first.
    pub fn next(&self, deadline: Option<Instant>) -> Result<Option<Event>, AgentError> {
        let taken = self.wait(deadline, StreamState::take_event)?;
        Ok(taken.map(|taken| self.settle(taken)))
    }

    /// Waits for the next bytes of the output channel, or its end; returns `None` when the deadline
    /// passes first.
    pub fn next_output(&self, deadline: Option<Instant>) -> Result<Option<Received>, AgentError> {
        let taken = self.wait(deadline, |state| match state.take_event() {
            Some(taken) => Some(Some(taken)),
            None => state.output.ended.then_some(None),
        })?;
        Ok(taken.map(|taken| match taken.map(|taken| self.settle(taken)) {
            Some(Event::Data(_, bytes)) => Received::Bytes(bytes),
            Some(Event::Done(outcome)) => Received::Done(outcome),
            None => Received::Ended,
        }))
    }

    /// Waits for an event, or until some of `input` can be sent, whichever is first.
    pub fn exchange(
        &self,
        input: &[u8],
        deadline: Option<Instant>,
    ) -> Result<Option<Exchange>, AgentError> {
        let step = self.wait(deadline, |state| {
            if let Some(taken) = state.take_event() {
                return Some(Ok(taken));
            }
            match state.reserve_input(input.len()) {
                Some(0) if input.is_empty() => None,
                other => other.map(Err),
            }
        })?;
        Ok(match step {
            None => None,
            Some(Ok(taken)) => Some(Exchange::Event(self.settle(taken))),
            Some(Err(0)) => Some(Exchange::InputRefused),
            Some(Err(count)) => {
                self.send_data(&input[..count])?;
                Some(Exchange::Sent(count))
            }
        })
    }

    fn settle(&self, (event, grant): (Event, Option<u32>)) -> Event {
        if let (Event::Data(channel, _), Some(grant)) = (&event, grant) {
            // A finished stream needs no credit; a lost connection is reported at the next wait.
            let _ = self.connection.send(&[&credit_frame(self.number(), *channel, grant, false)]);
        }
        event
    }

    /// Waits for the started message; returns `None` if the stream ends without one or the deadline
    /// passes.
    pub fn started(&self, deadline: Option<Instant>) -> Result<Option<Started>, AgentError> {
        let found = self.wait(deadline, |state| {
            let over = state.over.then_some(None);
            state.started.clone().map(Some).or(over)
        })?;
        Ok(found.flatten())
    }

    /// Returns the started message, if it has been received.
    pub fn started_now(&self) -> Option<Started> {
        lock(&self.stream.state).started.clone()
    }

    /// Sends some of `bytes`, which must not be empty, as input once there is credit. Returns how
    /// many, zero when the agent accepts no more, `None` at the deadline.
    pub fn send_input(
        &self,
        bytes: &[u8],
        deadline: Option<Instant>,
    ) -> Result<Option<usize>, AgentError> {
        let count = self.wait(deadline, |state| state.reserve_input(bytes.len()))?;
        if let Some(count) = count.filter(|count| *count > 0) {
            self.send_data(&bytes[..count])?;
        }
        Ok(count)
    }

    /// Ends the input of the stream.
    pub fn end_input(&self) -> Result<(), AgentError> {
        let mut state = lock(&self.stream.state);
        let pointless = state.over || std::mem::replace(&mut state.input_ended, true);
        drop(state);
        if pointless {
            return Ok(());
        }
        let header = Header::new(Kind::Data, self.number(), Channel::Input.bits() | END, 0);
        self.connection.send(&[&header.to_bytes()]).map_err(AgentError::Lost)
    }

    fn send_data(&self, bytes: &[u8]) -> Result<(), AgentError> {
        let header = |chunk: &[u8]| {
            Header::new(Kind::Data, self.number(), Channel::Input.bits(), chunk.len()).to_bytes()
        };
        let frames: Vec<_> = bytes.chunks(MAX_DATA).map(|chunk| (header(chunk), chunk)).collect();
        let parts: Vec<&[u8]> =
            frames.iter().flat_map(|(head, chunk)| [&head[..], chunk]).collect();
        self.connection.send(&parts).map_err(AgentError::Lost)
    }

    /// Enlarges the window of the output channel, for a file or an archive.
    pub fn expect_much(&self) {
        lock(&self.stream.state).output.window.grow_to(FILE_WINDOW);
    }

    pub fn signal(&self, signal: &Signal) -> Result<(), AgentError> {
        self.send_message(Kind::Signal, signal)
    }

    pub fn resize(&self, size: &WindowSize) -> Result<(), AgentError> {
        self.send_message(Kind::Resize, size)
    }

    fn send_message<T: serde::Serialize>(&self, kind: Kind, message: &T) -> Result<(), AgentError> {
        let mut frame = Vec::new();
        encode(&mut frame, kind, self.number(), message).map_err(AgentError::Encode)?;
        if lock(&self.stream.state).over {
            return Ok(());
        }
        self.connection.send(&[&frame]).map_err(AgentError::Lost)
    }

    /// Cancels the work of the stream, if it is not over, and forgets the stream.
    pub fn cancel(&self) {
        if !self.is_over() {
            let header = Header::new(Kind::Cancel, self.number(), 0, 0);
            let _ = self.connection.send(&[&header.to_bytes()]);
            self.connection.forget(self.number());
            // Other waiters must not wait for an answer that would be ignored.
            self.stream.lose(Lost::Dropped);
        }
    }

    pub fn is_over(&self) -> bool {
        let state = lock(&self.stream.state);
        state.over || state.lost.is_some()
    }

    fn number(&self) -> u32 {
        self.stream.number
    }

    /// Waits until `ready` returns a value. Meanwhile the agent's liveness is checked, so that no
    /// wait outlasts the agent.
    fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut(&mut StreamState) -> Option<T>,
    ) -> Result<Option<T>, AgentError> {
        loop {
            let nap = self.connection.look_after();
            let mut state = lock(&self.stream.state);
            if let Some(found) = ready(&mut state) {
                return Ok(Some(found));
            }
            if let Some(lost) = state.lost {
                return Err(AgentError::Lost(lost));
            }
            if state.over && state.outcome.is_none() {
                // The outcome was taken, and nothing follows it.
                return Err(AgentError::Lost(Lost::Ended));
            }
            let nap = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(left) if left.is_zero() => return Ok(None),
                Some(left) => left.min(nap),
                None => nap,
            };
            drop(self.stream.changed.wait_timeout(state, nap));
        }
    }
}
