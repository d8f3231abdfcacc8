//! Reports of an agent, with any numbers in them: the host's end of the connection takes or refuses
//! it.
//!
//! The bytes choose a request of the host's and what a lying agent answers: output, records,
//! listings, segments, and reports whose numbers prefer the ends of their ranges.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use pvmm::agent::{Agent, CodeRequest, FreezeOptions, Refresh};
use pvmm::exec::{AttachFrom, ExecRequest, OutputCap};
use pvmm_guest_agent::frame::{END, HEADER_LEN, Header, Kind};
use pvmm_guest_agent::limits::VERSION;
use pvmm_guest_agent::message::{
    Answer, ByteBuf, Change, Code, Detached, DirEntry, ExecReport, ExecStatus, FailedStep, Failure,
    FileKind, FrozenWorkload, Info, Kept, Language, Metadata, Metrics, OomEvent, Outcome,
    OutputCount, ProcessInfo, RefreshStep, Refreshed, Replay, RunReport, RunStatus, SessionInfo,
    Stage, Started, Usage, WatchEvent, Welcome,
};
use pvmm_guest_agent::session::{RECORD_HEAD, RecordKind, head_of};
use pvmm_guest_agent::sparse::Segment;
use pvmm_guest_agent::{Channel, encode};

use crate::input::Input;

/// Set when the thread that reads a connection panics, which its callers see only as a lost agent.
static READER_PANICKED: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

const CAP: OutputCap = OutputCap { head: 8, tail: 8 };

/// One request of the host's and the answer to it.
pub fn answers(bytes: &[u8]) {
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if std::thread::current().name() == Some("pvmm-agent") {
                READER_PANICKED.store(true, Ordering::SeqCst);
            }
            before(info);
        }));
    });
    let mut input = Input::new(bytes);
    let request = input.below(11);
    let wire = script(&mut input, request);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let peer = std::thread::spawn(move || play(theirs, &wire));
    // An agent that breaks the protocol is an error; what it must not be is the end of the process.
    if let Ok(agent) = Agent::over(ours) {
        ask(&agent, request);
    }
    peer.join().unwrap();
    assert!(!READER_PANICKED.load(Ordering::SeqCst), "the reader of a connection panicked");
}

fn ask(agent: &Agent, request: u8) {
    let soon = || std::time::Instant::now() + std::time::Duration::from_secs(60);
    match request {
        0 | 1 => {
            if let Ok(output) = agent.exec(&ExecRequest::argv(["x"]).output_cap(CAP)) {
                assert!(output.stdout.bytes.len() <= CAP.head + CAP.tail);
                assert!(output.stdout.total >= output.stdout.dropped);
                show(&output);
                let _ = (output.status.shell_code(), output.status.success());
            }
        }
        2 => {
            if let Ok(output) = agent.run_code("s", &CodeRequest::new("x")) {
                show(&output);
            }
        }
        3 => {
            for process in agent.processes().into_iter().flatten() {
                show(&process);
                let _ = process.ended.map(|status| status.shell_code());
            }
        }
        4 => {
            for entry in agent.list("/x").into_iter().flatten() {
                assert!(!entry.name.contains(&b'/') && *entry.name != *b"..");
                show(&entry);
            }
        }
        5 => {
            if let Ok(metrics) = agent.metrics() {
                show(&metrics);
            }
            if let Ok(info) = agent.info() {
                show(&info);
            }
        }
        6 => {
            let file = tempfile::tempfile().unwrap();
            if let Ok(mut reader) = agent.open_read_sparse("/x") {
                let mut at = 0u64;
                while let Ok(count @ 1..) = reader.copy_some(&file, at) {
                    at = at.checked_add(count).expect("a file has a length");
                }
            }
        }
        7 => {
            if let Ok(mut watch) = agent.watch("/x", true) {
                while let Ok(Some(event)) = watch.next(Some(soon())) {
                    show(&event);
                }
            }
        }
        8 => {
            if let Ok(mut process) = agent.attach(1, AttachFrom::default()) {
                show(&process.replay(soon()).ok());
                while let Ok(Some(event)) = process.next_event(Some(soon())) {
                    show(&event);
                    if matches!(event, pvmm::exec::ProcessEvent::Exited(_)) {
                        break;
                    }
                }
            }
        }
        9 => {
            let _ = agent.freeze_with(FreezeOptions::default(), soon());
            if let Ok(refresh) = Refresh::new(1) {
                let _ = agent.refresh(&refresh, soon());
            }
        }
        _ => {
            for session in agent.sessions().into_iter().flatten() {
                show(&session);
            }
            let _ = agent.start_detached(&ExecRequest::argv(["x"]), None);
            if let Ok(mut reader) = agent.open_read("/x", None) {
                let _ = reader.read_to_end(&mut Vec::new());
            }
        }
    }
}

/// Text for people is made of everything that came.
fn show(what: &dyn std::fmt::Debug) {
    assert!(!format!("{what:?}").is_empty());
}

/// The agent's side: a welcome, then for each request the same frames, until the host hangs up.
fn play(mut socket: UnixStream, wire: &[(Kind, u8, Vec<u8>)]) {
    let mut answered = 0;
    loop {
        let mut header = [0; HEADER_LEN];
        if socket.read_exact(&mut header).is_err() {
            return;
        }
        let header = Header::parse(&header).unwrap();
        let mut payload = vec![0; header.len as usize];
        if socket.read_exact(&mut payload).is_err() {
            return;
        }
        let mut bytes = Vec::new();
        match header.kind {
            Kind::Hello => {
                let words = String::new;
                let (agent, kernel) = (words(), words());
                let (version, capabilities) = (VERSION, Vec::new());
                let (init, uptime_us) = (true, u64::MAX);
                let welcome = Welcome { version, capabilities, agent, kernel, init, uptime_us };
                encode(&mut bytes, Kind::Welcome, 0, &welcome).unwrap();
            }
            Kind::Open => {
                answered += 1;
                for (kind, flags, payload) in wire {
                    let head = Header::new(*kind, header.stream, *flags, payload.len());
                    bytes.extend(head.to_bytes());
                    bytes.extend(payload);
                }
            }
            _ => {}
        }
        if socket.write_all(&bytes).is_err() || answered == 3 {
            return;
        }
    }
}

/// The frames that answer a request, made of what the request expects.
fn script(input: &mut Input, request: u8) -> Vec<(Kind, u8, Vec<u8>)> {
    let mut frames = Vec::new();
    if matches!(request, 6..=8 | 10) || input.below(4) == 0 {
        frames.push(message(Kind::Started, &started(input)));
    }
    let mut data = Vec::new();
    for _ in 0..input.below(5) {
        match request {
            2 => record(input, &mut data),
            4 => framed(&entry(input), input, &mut data),
            6 => segment(input, &mut data),
            7 => framed(&event(input), input, &mut data),
            _ => data.resize(data.len() + usize::from(input.u8()), input.u8()),
        }
    }
    let channel = if input.below(4) == 0 { Channel::Error } else { Channel::Output };
    let cut = usize::from(input.u8()) + 1;
    for chunk in data.chunks(if cut < 200 { cut } else { 60_000 }) {
        frames.push((Kind::Data, channel.bits(), chunk.to_vec()));
    }
    if input.below(4) == 0 {
        frames.push((Kind::Data, channel.bits() | END, Vec::new()));
    }
    if input.below(8) == 0 {
        frames.push((Kind::Credit, 0, input.u32().to_le_bytes().to_vec()));
    }
    let outcome = outcome(input, request, data.len() as u64);
    frames.push(message(Kind::Done, &outcome));
    frames
}

fn message<T: serde::Serialize>(kind: Kind, message: &T) -> (Kind, u8, Vec<u8>) {
    let mut frame = Vec::new();
    encode(&mut frame, kind, 1, message).unwrap();
    (kind, 0, frame.split_off(HEADER_LEN))
}

/// A length that is mostly true, and the message.
fn framed<T: serde::Serialize>(what: &T, input: &mut Input, data: &mut Vec<u8>) {
    let bytes = message(Kind::Done, what).2;
    let told = if input.below(16) == 0 { number(input) as u32 } else { bytes.len() as u32 };
    data.extend(told.to_le_bytes());
    data.extend(bytes);
}

fn record(input: &mut Input, data: &mut Vec<u8>) {
    let kind = RecordKind::from_byte(input.below(7) + 1).unwrap();
    let mut body = Vec::new();
    for _ in 0..input.below(4) {
        let key = ["text/plain", "name", "", "image/png"][usize::from(input.below(4))];
        body.extend((key.len() as u16).to_le_bytes());
        body.extend(key.bytes());
        let value = vec![input.u8(); usize::from(input.u8())];
        let told = if input.below(16) == 0 { number(input) as u32 } else { value.len() as u32 };
        body.extend(told.to_le_bytes());
        body.extend(value);
    }
    let mut head: [u8; RECORD_HEAD] = head_of(kind, body.len());
    if input.below(16) == 0 {
        head[..4].copy_from_slice(&(number(input) as u32).to_le_bytes());
    }
    data.extend(head);
    data.extend(body);
}

fn segment(input: &mut Input, data: &mut Vec<u8>) {
    if input.below(2) == 0 {
        data.extend(Segment::Hole(number(input)).head());
    } else {
        let len = u64::from(input.u8());
        let told = if input.below(16) == 0 { number(input) } else { len };
        data.extend(Segment::Data(told).head());
        data.resize(data.len() + len as usize, input.u8());
    }
}

fn outcome(input: &mut Input, request: u8, sent: u64) -> Outcome {
    if input.below(16) == 0 {
        let (errno, message) = (Some(number(input) as i32), "why\u{1b}[2J".to_owned());
        return Outcome::Failed(Failure { code: Code::Io, errno, path: None, message });
    }
    let expected = if input.below(16) == 0 { input.below(11) } else { request };
    Outcome::Ok(match expected {
        0 | 1 | 8 => Answer::Exec(exec_report(input)),
        2 => Answer::Run(RunReport {
            status: match input.below(3) {
                0 => RunStatus::Ok {},
                1 => RunStatus::Error {},
                _ => RunStatus::Died { status: Some(exec_status(input)) },
            },
            timed_out: input.below(2) == 0,
            stdout: count(input),
            stderr: count(input),
            dropped: number(input),
            duration_us: number(input),
            run: number(input),
        }),
        3 => Answer::Processes((0..input.below(4)).map(|_| process(input)).collect()),
        5 => metrics_or_info(input),
        7 => Answer::Done {},
        9 if input.below(2) == 0 => Answer::Frozen(FrozenWorkload {
            execs: number(input) as u32,
            ..FrozenWorkload::default()
        }),
        9 => {
            let errno = Some(number(input) as i32);
            let failed = FailedStep { step: RefreshStep::Clock, errno, message: "x".repeat(300) };
            let failed = (input.below(2) == 0).then_some(failed);
            Answer::Refreshed(Refreshed { steps: vec![RefreshStep::Entropy], failed })
        }
        4 | 6 => Answer::Transferred(if input.below(2) == 0 { sent } else { number(input) }),
        _ if input.below(2) == 0 => Answer::Detached(Detached { id: number(input), pid: 0 }),
        _ => Answer::Sessions(vec![SessionInfo {
            session: "s".to_owned(),
            language: Language::Python,
            version: String::new(),
            pid: number(input) as u32,
            busy: true,
            runs: number(input),
        }]),
    })
}

fn metrics_or_info(input: &mut Input) -> Answer {
    if input.below(2) == 0 {
        return Answer::Info(Info {
            uptime_us: number(input),
            cpus: number(input) as u32,
            memory_total_kib: number(input),
            memory_available_kib: number(input),
            generation: number(input),
            ..Info::default()
        });
    }
    let victim = OomEvent { pid: u32::MAX, at_us: number(input), ..OomEvent::default() };
    Answer::Metrics(Metrics {
        uptime_us: number(input),
        cpus: number(input) as u32,
        cpu_busy_us: number(input),
        cpu_idle_us: number(input),
        load_centi: [number(input) as u32; 3],
        memory_total_kib: number(input),
        memory_available_kib: number(input),
        disk_total_bytes: number(input),
        disk_available_bytes: number(input),
        oom_kills: number(input),
        oom_events: vec![victim; usize::from(input.below(40))],
        ..Metrics::default()
    })
}

/// A number that is telling: an end of its range more often than anything else.
fn number(input: &mut Input) -> u64 {
    const ENDS: [u64; 6] = [0, 1, u64::MAX, u64::MAX - 1, i64::MAX as u64, u32::MAX as u64];
    match input.below(3) {
        0 => input.number(),
        _ => ENDS[usize::from(input.below(ENDS.len() as u8))],
    }
}

fn count(input: &mut Input) -> OutputCount {
    OutputCount { total: number(input), dropped: number(input) }
}

fn exec_status(input: &mut Input) -> ExecStatus {
    match input.below(3) {
        0 => ExecStatus::Exited { code: number(input) as i32 },
        1 => ExecStatus::Signaled { signal: number(input) as i32, core_dumped: true },
        _ => ExecStatus::CouldNotStart { stage: Stage::Exec, errno: number(input) as i32 },
    }
}

fn exec_report(input: &mut Input) -> ExecReport {
    ExecReport {
        status: exec_status(input),
        timed_out: input.below(2) == 0,
        background: false,
        oom: input.below(2) == 0,
        stdout: count(input),
        stderr: count(input),
        duration_us: number(input),
        usage: Usage {
            user_us: number(input),
            system_us: number(input),
            max_rss_kib: number(input),
        },
    }
}

fn process(input: &mut Input) -> ProcessInfo {
    ProcessInfo {
        id: number(input),
        pid: number(input) as u32,
        command: "x".to_owned(),
        age_us: number(input),
        terminal: false,
        attached: number(input) as u32,
        stdout: Kept { from: number(input), to: number(input) },
        stderr: Kept { from: number(input), to: number(input) },
        report: (input.below(2) == 0).then(|| exec_report(input)),
    }
}

fn started(input: &mut Input) -> Started {
    let replay = Replay {
        stdout_from: number(input),
        stderr_from: number(input),
        terminal: input.below(2) == 0,
    };
    Started {
        pid: Some(number(input) as u32),
        metadata: (input.below(8) > 0).then(|| metadata(input)),
        replay: Some(replay),
    }
}

fn metadata(input: &mut Input) -> Metadata {
    Metadata {
        kind: FileKind::File,
        mode: number(input) as u32,
        uid: number(input) as u32,
        gid: number(input) as u32,
        size: number(input),
        nlink: number(input),
        mtime_s: number(input) as i64,
        mtime_ns: number(input) as u32,
        ctime: Some((number(input) as i64, number(input) as u32)),
        target: None,
    }
}

fn entry(input: &mut Input) -> DirEntry {
    let name = ["a", "..", "a/b", "", "ordinary"][usize::from(input.below(5))];
    DirEntry { name: ByteBuf::from(name.as_bytes()), metadata: metadata(input) }
}

fn event(input: &mut Input) -> WatchEvent {
    let path = ["a", "../a", "a/b", "", "/a"][usize::from(input.below(5))];
    let (change, path) = (Change::Modified, ByteBuf::from(path.as_bytes()));
    WatchEvent { change, path, directory: false, cookie: number(input) as u32 }
}
