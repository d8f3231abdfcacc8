//! Reports with numbers at the ends of their ranges: the host end adds, allocates and prints within bounds.
//! The fuzz target `agent_reports` tries many more of them.

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::frame::Kind;
use pvmm_guest_agent::message::{
    Answer, ExecReport, ExecStatus, Kept, Outcome, OutputCount, ProcessInfo, RunReport, RunStatus,
    Usage,
};
use pvmm_guest_agent::session::{RecordKind, head_of};

use super::{OK, against, report};
use crate::agent::{CodeRequest, RunReport as Report};
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
    // More than head and tail came, so the host forgot some as well as the agent.
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
