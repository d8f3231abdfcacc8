//! Waits for a new interpreter, on a thread of its own, and takes its greeting.

use std::io::ErrorKind;
use std::time::Instant;

use pvmm_guest_agent::limits::SESSION_TIME;
use pvmm_guest_agent::message::{Answer, Code, Outcome};
use pvmm_guest_agent::session::{RECORD_HEAD, RecordKind, parts, record_head};

use super::run::{CHUNK, gone};
use super::{Session, SessionEnds};
use crate::sys;
use crate::sys::session::{Interest, wait};

/// The most bytes of an interpreter's last output that go into an error.
const LAST_WORDS: usize = 300;

/// Gives a spare interpreter its settings and waits until it accepts code.
pub fn settle(session: &Session, settings: &[u8]) -> Outcome {
    let Some(ends) = session.take() else { return gone() };
    // A write that fails, or takes a part, is noticed by the wait: nobody greets then.
    let _ = sys::write_once(&ends.control, settings);
    greeted(session, ends)
}

/// Waits until a new interpreter accepts code.
pub fn wait_ready(session: &Session) -> Outcome {
    session.take().map_or_else(gone, |ends| greeted(session, ends))
}

fn greeted(session: &Session, ends: SessionEnds) -> Outcome {
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
        return Outcome::failed(
            Code::Io,
            None,
            format!("the interpreter did not start: {}", words.trim()),
        );
    };
    let version = ready.into_iter().find(|(key, _)| key == "version");
    let version =
        version.map(|(_, value)| String::from_utf8_lossy(&value).chars().take(32).collect());
    session.lock().version = version.unwrap_or_default();
    session.give_back(ends);
    Outcome::Ok(Answer::Session(session.info()))
}

/// Parses the first bytes of an interpreter: the length of its greeting's body (`None` if it is
/// something else), and the rest.
fn greeting(heard: &[u8]) -> Option<(Option<usize>, &[u8])> {
    let (head, body) = heard.split_first_chunk::<RECORD_HEAD>()?;
    let len = match record_head(*head) {
        Some((len, RecordKind::Ready)) if len <= CHUNK => Some(len),
        _ => None,
    };
    Some((len, body))
}
