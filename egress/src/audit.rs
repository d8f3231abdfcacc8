//! The audit log: a JSON line for each decision, to a descriptor that the caller supplies.
//!
//! A guest can cause decisions as fast as it sends frames, so lines have a rate and the log has an
//! end. The descriptor is never waited for.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use serde::Serialize;

use crate::counters::{Attempt, now_ms};
use crate::rate::Bucket;

const LINES_PER_SECOND: u32 = 50;
const LINES_BURST: u32 = 200;
/// The most bytes that one process logs.
const BYTES_MAX: u64 = 64 << 20;

/// The destination of audit lines, if there is one.
#[derive(Debug)]
pub struct AuditLog {
    file: Option<File>,
    bucket: Bucket,
    bytes_left: u64,
    omitted: u64,
}

#[derive(Serialize)]
struct Line<'a> {
    time_ms: u64,
    decision: &'a str,
    #[serde(flatten)]
    attempt: &'a Attempt,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    /// The lines before this one that the rate did not allow.
    #[serde(skip_serializing_if = "is_zero")]
    omitted: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl AuditLog {
    /// The descriptor must not block.
    pub fn new(file: Option<File>, now: Instant) -> Self {
        let bucket = Bucket::new(LINES_PER_SECOND, LINES_BURST, now);
        Self { file, bucket, bytes_left: BYTES_MAX, omitted: 0 }
    }

    pub fn allowed(&mut self, attempt: &Attempt, rule: &str, now: Instant) {
        self.write("allow", attempt, Some(rule), None, now);
    }

    pub fn denied(&mut self, attempt: &Attempt, reason: &str, now: Instant) {
        self.write("deny", attempt, None, Some(reason), now);
    }

    fn write(
        &mut self,
        decision: &str,
        attempt: &Attempt,
        rule: Option<&str>,
        reason: Option<&str>,
        now: Instant,
    ) {
        let Some(file) = &mut self.file else { return };
        if self.bytes_left == 0 || !self.bucket.take(now) {
            self.omitted += 1;
            return;
        }
        let (time_ms, omitted) = (now_ms(), self.omitted);
        let line = Line { time_ms, decision, attempt, rule, reason, omitted };
        let Ok(mut bytes) = serde_json::to_vec(&line) else { return };
        bytes.push(b'\n');
        // A line that a pipe takes in part would spoil the next one; a pipe takes this little whole
        // or not at all.
        match file.write(&bytes) {
            Ok(_) => self.omitted = 0,
            Err(_) => self.omitted += 1,
        }
        self.bytes_left = self.bytes_left.saturating_sub(bytes.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audit_lines_are_json_and_have_a_rate() {
        let mut file = tempfile::tempfile().unwrap();
        let now = Instant::now();
        let mut log = AuditLog::new(Some(file.try_clone().unwrap()), now);
        let attempt =
            Attempt { name: Some("a\n\"b".to_owned()), protocol: "tcp", ..Attempt::default() };
        for _ in 0..10_000 {
            log.denied(&attempt, "no-rule", now);
        }
        log.allowed(&attempt, "all", now + std::time::Duration::from_secs(1));
        let mut text = String::new();
        std::io::Seek::rewind(&mut file).unwrap();
        std::io::Read::read_to_string(&mut file, &mut text).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), LINES_BURST as usize + 1);
        let last = lines.last().unwrap();
        assert_eq!((&last["decision"], &last["omitted"]), (&"allow".into(), &9800.into()));
    }
}
