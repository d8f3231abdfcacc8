//! Reports changes in a directory of the guest as they happen.
//!
//! Paths come from the guest: one that is not below the watched directory ends the watch.

use std::path::Path;
use std::time::Instant;

use pvmm_guest_agent::decode;
use pvmm_guest_agent::limits::MAX_ENTRY;
use pvmm_guest_agent::message::{self, Outcome, Request};

pub use pvmm_guest_agent::message::{Change, WatchEvent};

use super::error::{AgentError, Lost};
use super::files::guest_path;
use super::stream::{Event, StreamRef};
use super::{ANSWER_TIME, Agent};

impl Agent {
    /// Watches a directory, with `recursive` the whole tree below it. Changes after this returns
    /// are reported.
    pub fn watch(&self, path: impl AsRef<Path>, recursive: bool) -> Result<Watch, AgentError> {
        let path = guest_path("path", path.as_ref())?;
        let stream = self.open(&Request::Watch(message::Watch { path, recursive }))?;
        if stream.started(Some(Instant::now() + ANSWER_TIME))?.is_some() {
            return Ok(Watch { stream, bytes: Vec::new() });
        }
        match stream.next(Some(Instant::now()))? {
            Some(Event::Done(Outcome::Failed(failure))) => Err(failure.into()),
            Some(_) => Err(AgentError::WrongAnswer),
            None => {
                stream.cancel();
                Err(AgentError::Overdue)
            }
        }
    }
}

/// A watch on a directory. Dropping it ends the watch.
pub struct Watch {
    stream: StreamRef,
    bytes: Vec<u8>,
}

impl Watch {
    /// Waits for the next change; returns `None` when the deadline passes first. After `Gone` comes
    /// an error.
    pub fn next(&mut self, deadline: Option<Instant>) -> Result<Option<WatchEvent>, AgentError> {
        loop {
            if let Some(event) = self.take()? {
                return Ok(Some(event));
            }
            match self.stream.next(deadline)? {
                Some(Event::Data(_, bytes)) => self.bytes.extend_from_slice(&bytes),
                Some(Event::Done(Outcome::Failed(failure))) => return Err(failure.into()),
                Some(Event::Done(Outcome::Ok(_))) => return Err(AgentError::WatchEnded),
                None => return Ok(None),
            }
        }
    }

    fn take(&mut self) -> Result<Option<WatchEvent>, AgentError> {
        const BAD: AgentError = AgentError::Lost(Lost::Protocol("a malformed watch event"));
        let Some((len, rest)) = self.bytes.split_first_chunk() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > MAX_ENTRY {
            return Err(BAD);
        }
        let Some(event) = rest.get(..len) else { return Ok(None) };
        let event: WatchEvent = decode(event).map_err(|_| BAD)?;
        let below = |part: &[u8]| !matches!(part, b"" | b"." | b"..") && !part.contains(&0);
        if !event.path.is_empty() && !event.path.split(|byte| *byte == b'/').all(below) {
            return Err(BAD);
        }
        self.bytes.drain(..4 + len);
        Ok(Some(event))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stream.cancel();
    }
}
