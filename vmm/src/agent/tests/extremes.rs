//! Reports with numbers at the ends of their ranges: the host end adds, allocates and prints within
//! bounds.
//!
//! The fuzz target `agent_reports` tries many more.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pvmm_guest_agent::frame::{HEADER_LEN, Kind};
use pvmm_guest_agent::message::{
    Answer, Code, DirEntry, ExecReport, ExecStatus, Failure, FileKind, Kept, Metadata, Outcome,
    OutputCount, ProcessInfo, RunReport, RunStatus, Started, Usage,
};
use pvmm_guest_agent::session::{RecordKind, head_of};
use pvmm_guest_agent::{Channel, encode};

use super::{OK, against, report};
use crate::agent::{AgentError, CodeRequest, RunReport as Report};
use crate::exec::{ExecRequest, OutputCap};

const MOST: OutputCount = OutputCount { total: u64::MAX, dropped: u64::MAX };

fn extreme() -> ExecReport {
    let usage = Usage { user_us: u64::MAX, system_us: u64::MAX, max_rss_kib: u64::MAX };
    let counted = ExecReport { stdout: MOST, stderr: MOST, usage, ..report(OK) };
    ExecReport { duration_us: u64::MAX, ..counted }
}

#[test]
fn exec_whose_report_counts_to_the_end_of_numbers_is_told_with_the_greatest() {
    let (agent, peer) = against(|peer| {
        let stream = peer.opened();
        peer.data(stream, Channel::Output, false, &[b'x'; 100]);
        peer.control(Kind::Done, stream, &Outcome::Ok(Answer::Exec(extreme())));
    });
    // More than head and tail was received, so the host dropped some bytes as well as the agent.
    let cap = OutputCap { head: 10, tail: 10 };
    let output = agent.exec(&ExecRequest::argv(["x"]).output_cap(cap)).unwrap();
    assert_eq!(output.stdout.bytes, [b'x'; 20]);
    assert_eq!((output.stdout.dropped, output.stdout.total), (u64::MAX, u64::MAX));
    peer.join().unwrap();
}

#[test]
fn processes_with_extreme_numbers_are_listed() {
    let (agent, peer) = against(|peer| {
        let stream = peer.opened();
        let kept = Kept { from: u64::MAX, to: 0 };
        let status = ExecStatus::Signaled { signal: i32::MIN, core_dumped: true };
        let info = ProcessInfo {
            id: u64::MAX,
            pid: u32::MAX,
            command: String::new(),
            age_us: u64::MAX,
            terminal: false,
            attached: u32::MAX,
            stdout: kept,
            stderr: kept,
            report: Some(ExecReport { status, ..extreme() }),
        };
        peer.control(Kind::Done, stream, &Outcome::Ok(Answer::Processes(vec![info])));
    });
    let listed = agent.processes().unwrap();
    assert_eq!(listed[0].ended.unwrap().shell_code(), 129);
    peer.join().unwrap();
}

fn run_report() -> Report {
    RunReport {
        status: RunStatus::Ok {},
        timed_out: false,
        stdout: MOST,
        stderr: MOST,
        dropped: u64::MAX,
        duration_us: u64::MAX,
        run: u64::MAX,
    }
}

#[test]
fn displays_without_content_are_counted_against_the_cap() {
    // Five bytes each on the wire, so that the cap is reached by their own size and not by content.
    const COUNT: usize = 4 << 20;
    let (agent, peer) = against(|peer| {
        let stream = peer.opened();
        let records = head_of(RecordKind::Display, 0).repeat(12 << 10);
        let mut left = COUNT;
        let mut credit = 256 << 10;
        while left > 0 {
            let count = left.min(records.len() / 5).min(credit / 5);
            if count == 0 {
                let Some((header, payload)) = peer.frame() else { return };
                if header.kind == Kind::Credit {
                    credit += u32::from_le_bytes(payload.try_into().unwrap()) as usize;
                }
                continue;
            }
            peer.data(stream, Channel::Output, false, &records[..count * 5]);
            (left, credit) = (left - count, credit - count * 5);
        }
        peer.control(Kind::Done, stream, &Outcome::Ok(Answer::Run(run_report())));
    });
    let output = agent.run_code("s", &CodeRequest::new("x")).unwrap();
    assert!(output.truncated);
    assert!(output.displays.len() < COUNT, "{} displays were kept", output.displays.len());
    peer.join().unwrap();
}

fn file() -> Metadata {
    Metadata {
        kind: FileKind::File,
        mode: 0o644,
        uid: 0,
        gid: 0,
        size: u64::MAX,
        nlink: 1,
        mtime_s: 0,
        mtime_ns: 0,
        ctime: None,
        target: None,
    }
}

#[test]
fn listing_without_end_is_given_up_at_its_limit() {
    let (agent, peer) = against(|peer| {
        let stream = peer.opened();
        let mut name = 0u64;
        // More than the granted credit: the host has stopped reading long before.
        while name < 1500 {
            let entry = DirEntry { name: name.to_string().into_bytes().into(), metadata: file() };
            let mut bytes = Vec::new();
            encode(&mut bytes, Kind::Done, stream, &entry).unwrap();
            let bytes = &bytes[HEADER_LEN..];
            let len = (bytes.len() as u32).to_le_bytes();
            peer.data(stream, Channel::Output, false, &[&len[..], bytes].concat());
            name += 1;
        }
        peer.until_hung_up();
    });
    let limit = 64 << 10;
    let result = agent.list_within("/x", limit);
    assert!(matches!(result, Err(AgentError::TooLarge { limit: 65536, .. })), "{result:?}");
    drop(agent);
    peer.join().unwrap();
}

#[test]
fn reader_of_a_byte_now_and_then_is_not_held_for_ever() {
    let given_up = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&given_up);
    let (agent, peer) = against(move |peer| {
        let stream = peer.opened();
        let started = Started { metadata: Some(file()), ..Started::default() };
        peer.control(Kind::Started, stream, &started);
        // Never silent for long, and never done.
        while !seen.load(Ordering::SeqCst) {
            peer.data(stream, Channel::Output, false, b"x");
            thread::sleep(Duration::from_millis(50));
        }
    });
    assert!(matches!(agent.read_file("/x", u64::MAX), Err(AgentError::Overdue)));
    given_up.store(true, Ordering::SeqCst);
    peer.join().unwrap();
}

#[test]
fn read_that_the_agent_calls_interrupted_is_not_repeated() {
    let (agent, peer) = against(|peer| {
        let stream = peer.opened();
        let started = Started { metadata: Some(file()), ..Started::default() };
        peer.control(Kind::Started, stream, &started);
        let (errno, message) = (Some(libc::EINTR), String::new());
        let failure = Failure { code: Code::Io, errno, path: None, message };
        peer.control(Kind::Done, stream, &Outcome::Failed(failure));
        peer.until_hung_up();
    });
    let mut reader = agent.open_read("/x", None).unwrap();
    let error = reader.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Other, "{error}");
    // Nor does a caller wait who asks once more.
    let asked = Instant::now();
    assert!(reader.read(&mut [0; 16]).is_err());
    assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    drop((reader, agent));
    peer.join().unwrap();
}
