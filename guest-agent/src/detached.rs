//! Processes that outlive their client.
//!
//! Such a process never waits for a reader: the newest output is kept, the rest is only counted.

use std::io;
use std::os::fd::OwnedFd;

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::{DEFAULT_KEEP, MAX_KEEP};
use pvmm_guest_agent::message::{Command, Exec, ExecReport, Kept, OutputCount, ProcessInfo};

use crate::channel::Pumped;
use crate::process::Process;
use crate::ring::Ring;
use crate::stdio::Stdio;
use crate::sys;

/// Characters of a command line in a listing.
const COMMAND_SHOWN: usize = 200;
/// Reads of an output before others get their turn.
const TURN: usize = 4;
const CHUNK: usize = 64 << 10;

pub struct DetachedProcess {
    pub process: Process,
    command: String,
    rings: Vec<Ring>,
    pub input: Option<OwnedFd>,
    /// The jobs that are attached to the process.
    pub attached: Vec<u64>,
    /// Set once the process has ended and all its output is read.
    pub report: Option<ExecReport>,
}

impl DetachedProcess {
    pub fn new(exec: &Exec, process: Process, stdio: Stdio) -> Self {
        let keep = exec.detach.and_then(|detach| detach.keep).unwrap_or(DEFAULT_KEEP);
        let cap = keep.min(MAX_KEEP) as usize;
        let mut rings = vec![Ring::new(Channel::Output, stdio.output.ours, cap)];
        rings.extend(stdio.error.map(|ends| Ring::new(Channel::Error, ends.ours, cap)));
        Self {
            process,
            command: shown(&exec.command),
            rings,
            input: stdio.input.map(|ends| ends.ours),
            attached: Vec::new(),
            report: None,
        }
    }

    pub fn info(&self, id: u64) -> ProcessInfo {
        ProcessInfo {
            id,
            pid: self.process.pid as u32,
            command: self.command.clone(),
            age_us: self.process.begun.elapsed().as_micros() as u64,
            terminal: self.process.terminal.is_some(),
            attached: self.attached.len() as u32,
            stdout: self.kept(Channel::Output),
            stderr: self.kept(Channel::Error),
            report: self.report,
        }
    }

    pub fn ring(&self, channel: Channel) -> Option<&Ring> {
        self.rings.iter().find(|ring| ring.channel == channel)
    }

    fn kept(&self, channel: Channel) -> Kept {
        self.ring(channel).map(Ring::kept).unwrap_or_default()
    }

    /// Returns whether the outputs are one terminal.
    pub fn has_one_output(&self) -> bool {
        self.rings.len() == 1
    }

    /// Returns whether signals to the process's tree reach that tree. Without a control group, the
    /// id of a dead process may belong to another process by now.
    pub fn has_tree(&self) -> bool {
        self.process.cgroup.is_some() || !self.process.is_dead()
    }

    /// Reads an output for one turn, and returns whether there may be more to read.
    pub fn read(&mut self, channel: Channel, scratch: &mut Vec<u8>) -> Pumped {
        let ring = self.rings.iter_mut().find(|ring| ring.channel == channel);
        let Some(ring) = ring else { return Pumped::Waiting };
        for _ in 0..TURN {
            let Some(fd) = &ring.fd else { return Pumped::Waiting };
            scratch.clear();
            match sys::read_onto(fd, scratch, CHUNK) {
                Ok(count) if count > 0 => ring.push(scratch),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Pumped::Waiting,
                // The end of the output, which a terminal reports as an error.
                _ => ring.fd = None,
            }
        }
        Pumped::More
    }

    /// Reads what is in the pipes now, and no more; notes whether a process still held one.
    pub fn stop(&mut self) {
        for ring in &mut self.rings {
            let Some(fd) = ring.fd.take() else { continue };
            let mut left = sys::waiting_bytes(&fd) as usize;
            self.process.background = true;
            while left > 0 {
                let mut bytes = Vec::new();
                match sys::read_onto(&fd, &mut bytes, left.min(CHUNK)) {
                    Ok(count) if count > 0 => left -= count,
                    _ => break,
                }
                ring.push(&bytes);
            }
        }
    }

    /// Keeps the report of a process that has ended with all its output read; returns whether it
    /// has.
    pub fn conclude(&mut self) -> bool {
        let total = |channel| OutputCount { total: self.kept(channel).to, dropped: 0 };
        let report = self.process.report(total(Channel::Output), total(Channel::Error));
        if report.is_none() || self.rings.iter().any(|ring| ring.fd.is_some()) {
            return false;
        }
        self.report = report;
        self.input = None;
        true
    }
}

/// Returns the beginning of a command line as text.
fn shown(command: &Command) -> String {
    let words: Vec<String> = match command {
        Command::Argv(argv) => {
            argv.iter().take(COMMAND_SHOWN).map(|arg| String::from_utf8_lossy(arg).into()).collect()
        }
        Command::Shell(line) => vec![String::from_utf8_lossy(line).into()],
    };
    words.join(" ").chars().take(COMMAND_SHOWN).collect()
}
