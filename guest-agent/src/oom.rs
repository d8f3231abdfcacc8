//! Finds the processes that were killed for lack of memory, in the kernel's log.
//!
//! The log is read only on demand, so that it costs an idle guest nothing.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};

use pvmm_guest_agent::limits::MAX_OOM_EVENTS;
use pvmm_guest_agent::message::OomEvent;

use crate::sys;

/// Longest record of the kernel's log.
const RECORD: usize = 8 << 10;
/// The most records read at once: more than the log holds.
const MOST_RECORDS: usize = 1 << 16;

pub struct OomLog {
    /// `None` where the log may not be read.
    log: Option<OwnedFd>,
    events: VecDeque<OomEvent>,
    total: u64,
}

impl OomLog {
    /// Opens the log; only later records are read.
    pub fn open() -> Self {
        let log = sys::open(c"/dev/kmsg", libc::O_RDONLY | libc::O_NONBLOCK, 0).ok();
        if let Some(log) = &log {
            sys::seek_end(log.as_raw_fd());
        }
        Self { log, events: VecDeque::new(), total: 0 }
    }

    /// Returns the number of processes killed so far.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the last kills, newest last.
    pub fn events(&self) -> impl Iterator<Item = &OomEvent> {
        self.events.iter()
    }

    pub fn names(&self, pid: u32) -> bool {
        self.events.iter().any(|event| event.pid == pid)
    }

    /// Reads the records since the last call.
    pub fn catch_up(&mut self) {
        let Some(log) = &self.log else { return };
        let mut record = Vec::new();
        for _ in 0..MOST_RECORDS {
            record.clear();
            match sys::read_onto(log, &mut record, RECORD) {
                Ok(_) => {
                    if let Some(event) = parse(&String::from_utf8_lossy(&record)) {
                        self.total += 1;
                        self.events.truncate(MAX_OOM_EVENTS);
                        if self.events.len() == MAX_OOM_EVENTS {
                            self.events.pop_front();
                        }
                        self.events.push_back(event);
                    }
                }
                // Some records were overwritten; the rest follows.
                Err(e) if e.raw_os_error() == Some(libc::EPIPE) => {}
                Err(_) => return,
            }
        }
    }
}

/// Parses a record `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT` about a killed process.
fn parse(record: &str) -> Option<OomEvent> {
    let (head, text) = record.split_once(';')?;
    let mut numbers = head.split(',');
    // Processes can write to the log too, but not with the kernel's facility, which is zero.
    let priority: u32 = numbers.next()?.parse().ok()?;
    if priority >= 8 {
        return None;
    }
    let at_us = numbers.nth(1)?.parse().ok()?;
    let by_limit = text.starts_with("Memory cgroup out of memory: ");
    if !by_limit && !text.starts_with("Out of memory: ") {
        return None;
    }
    let (_, victim) = text.split_once("Killed process ")?;
    let (pid, rest) = victim.split_once(" (")?;
    // The name may contain anything, so it ends at the last parenthesis before the figures.
    let (name, _) = rest.split_once(") total-vm")?;
    let name = name.chars().take(16).collect();
    Some(OomEvent { pid: pid.parse().ok()?, name, at_us, by_limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn victim_is_read_from_the_kernels_words() {
        let record = "3,731,51234567,-;Memory cgroup out of memory: Killed process 77 (a (b) c) \
                      total-vm:1kB, anon-rss:1kB, oom_score_adj:0\n";
        let event = parse(record).unwrap();
        assert_eq!((event.pid, event.name.as_str(), event.by_limit), (77, "a (b) c", true));
        assert_eq!(event.at_us, 51_234_567);
        let global = record.replace("Memory cgroup out", "Out");
        assert!(!parse(&global).unwrap().by_limit);
    }

    #[test]
    fn victim_that_a_process_made_up_is_ignored() {
        let text = ";Out of memory: Killed process 1 (init) total-vm:1kB";
        assert!(parse(&format!("3,1,1,-{text}")).is_some());
        for record in ["12,1,1,-", "11,1,1,-", "x,1,1,-", "3,1,-"] {
            assert_eq!(parse(&format!("{record}{text}")), None);
        }
        assert_eq!(parse("3,1,1,-;Out of memory: Killed process x (y) total-vm"), None);
        assert_eq!(parse("3,1,1,-;Killed process 1 (y) total-vm"), None);
    }
}
