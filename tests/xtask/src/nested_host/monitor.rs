//! Tells QEMU to stop and continue the clock and CPU of the nested host.
//!
//! An idle host polls, which takes a whole core of the outer machine. A host that is not used is
//! therefore paused.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long QEMU may take to answer. It normally answers at once.
const ANSWER_DEADLINE: Duration = Duration::from_secs(20);

/// A connection to QEMU's monitor, which speaks JSON.
pub struct Monitor {
    to: UnixStream,
    from: BufReader<UnixStream>,
    greeted: bool,
}

impl Monitor {
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(ANSWER_DEADLINE))?;
        Ok(Monitor { to: stream.try_clone()?, from: BufReader::new(stream), greeted: false })
    }

    /// Stops the nested host. No time passes in it until [`Monitor::resume`].
    pub fn pause(&mut self) -> io::Result<()> {
        self.execute("stop")
    }

    pub fn resume(&mut self) -> io::Result<()> {
        self.execute("cont")
    }

    fn execute(&mut self, command: &str) -> io::Result<()> {
        if !self.greeted {
            self.exchange("qmp_capabilities")?;
            self.greeted = true;
        }
        self.exchange(command)
    }

    fn exchange(&mut self, command: &str) -> io::Result<()> {
        writeln!(self.to, "{{\"execute\":\"{command}\"}}")?;
        // The greeting and events may come before the answer.
        loop {
            let mut line = String::new();
            if self.from.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let answer: serde_json::Value = serde_json::from_str(&line)?;
            if answer.get("return").is_some() {
                return Ok(());
            }
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(format!("QEMU refuses {command}: {error}")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_with_an_event_in_between_waits_for_the_answer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs
            .write_all(b"{\"QMP\":{}}\n{\"return\":{}}\n{\"event\":\"STOP\"}\n{\"return\":{}}\n")
            .unwrap();
        Monitor::new(ours).unwrap().pause().unwrap();
        let mut said = BufReader::new(theirs).lines();
        assert_eq!(said.next().unwrap().unwrap(), "{\"execute\":\"qmp_capabilities\"}");
        assert_eq!(said.next().unwrap().unwrap(), "{\"execute\":\"stop\"}");
    }

    #[test]
    fn resume_refused_is_an_error() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"{\"return\":{}}\n{\"error\":{\"desc\":\"no\"}}\n").unwrap();
        assert!(Monitor::new(ours).unwrap().resume().is_err());
    }
}
