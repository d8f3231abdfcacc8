//! An agent that lies, floods, stalls and dies: the host end keeps its bounds and its deadlines.
//!
//! A scripted peer on a socket pair plays the agent; tests of the catalogue's group G carry its
//! numbers.
#![allow(unsafe_code)] // one test shortens a listener's queue

mod extremes;

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pvmm_guest_agent::frame::{END, HEADER_LEN, Header, Kind, credit_frame};
use pvmm_guest_agent::limits::{INPUT_WINDOW, MAX_DATA, OUTPUT_WINDOW, VERSION};
use pvmm_guest_agent::message::{
    Answer, Code, DirEntry, ExecReport, ExecStatus, FailedStep, Failure, FileKind, Goodbye,
    Metadata, Outcome, OutputCount, RefreshStep, Refreshed, Started, Usage, Welcome,
};
use pvmm_guest_agent::{Channel, encode};

use super::{Agent, AgentError, Lost, ReadyListener, Refresh};
use crate::exec::{ExecError, ExecRequest, OutputCap, ProcessEvent};

/// The agent's side of a socket.
struct Peer(UnixStream);

impl Peer {
    fn send(&mut self, bytes: &[u8]) {
        // The host may have closed the connection, as some tests expect.
        let _ = self.0.write_all(bytes);
    }

    fn control<T: serde::Serialize>(&mut self, kind: Kind, stream: u32, message: &T) {
        let mut frame = Vec::new();
        encode(&mut frame, kind, stream, message).unwrap();
        self.send(&frame);
    }

    fn data(&mut self, stream: u32, channel: Channel, end: bool, bytes: &[u8]) {
        let flags = channel.bits() | if end { END } else { 0 };
        self.send(&Header::new(Kind::Data, stream, flags, bytes.len()).to_bytes());
        self.send(bytes);
    }

    fn exit(&mut self, stream: u32, status: ExecStatus) {
        self.control(Kind::Done, stream, &Outcome::Ok(Answer::Exec(report(status))));
    }

    /// Returns the next frame of the host; `None` when it has closed the connection.
    fn frame(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut header = [0; HEADER_LEN];
        self.0.read_exact(&mut header).ok()?;
        let header = Header::parse(&header).unwrap();
        let mut payload = vec![0; header.len as usize];
        self.0.read_exact(&mut payload).ok()?;
        Some((header, payload))
    }

    fn welcome(&mut self) {
        assert_eq!(self.frame().unwrap().0.kind, Kind::Hello);
        self.control(Kind::Welcome, 0, &welcome());
    }

    /// Waits for a stream to be opened and returns its number.
    fn opened(&mut self) -> u32 {
        loop {
            let (header, _) = self.frame().expect("a request");
            if header.kind == Kind::Open {
                return header.stream;
            }
        }
    }

    fn until_hung_up(&mut self) {
        while self.frame().is_some() {}
    }
}

fn welcome() -> Welcome {
    Welcome {
        version: VERSION,
        capabilities: vec![],
        agent: String::new(),
        kernel: String::new(),
        init: true,
        uptime_us: 0,
    }
}

fn report(status: ExecStatus) -> ExecReport {
    ExecReport {
        status,
        timed_out: false,
        background: false,
        oom: false,
        stdout: OutputCount::default(),
        stderr: OutputCount::default(),
        duration_us: 0,
        usage: Usage::default(),
    }
}

const OK: ExecStatus = ExecStatus::Exited { code: 0 };

/// Returns a host end after the handshake, and the thread that plays the agent from then on.
fn against(script: impl FnOnce(&mut Peer) + Send + 'static) -> (Agent, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let peer = thread::spawn(move || {
        let mut peer = Peer(theirs);
        peer.welcome();
        script(&mut peer);
    });
    (Agent::over(ours).unwrap(), peer)
}

fn run(agent: &Agent) -> Result<crate::exec::Output, ExecError> {
    agent.exec(&ExecRequest::argv(["x"]))
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(100)
}

fn lost<T: std::fmt::Debug>(result: Result<T, ExecError>) -> Lost {
    match result {
        Err(ExecError::Agent(AgentError::Lost(lost))) => lost,
        other => panic!("{other:?}"),
    }
}

#[test]
fn g1_length_prefix_max_ends_the_connection_before_allocating() {
    let (agent, _peer) = against(|peer| {
        peer.opened();
        let mut header = [0; HEADER_LEN];
        header[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        header[4] = 1;
        header[8] = 5;
        peer.send(&header);
        peer.until_hung_up();
    });
    assert_eq!(lost(run(&agent)), Lost::Protocol("a malformed frame"));
    assert!(matches!(run(&agent), Err(ExecError::Agent(AgentError::Lost(_)))));
}

#[test]
fn g2_frame_cut_short_then_silence_meets_the_deadline() {
    let (agent, _peer) = against(|peer| {
        let stream = peer.opened();
        peer.send(&Header::new(Kind::Data, stream, 1, 100).to_bytes());
        peer.send(b"only this");
        peer.until_hung_up();
    });
    let mut process = agent.start(&ExecRequest::argv(["x"])).unwrap();
    assert_eq!(process.next_event(Some(soon())).unwrap(), None);
    let begun = Instant::now();
    assert!(matches!(agent.ping(soon()), Err(AgentError::Overdue)));
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn g2_agent_that_takes_nothing_is_lost_when_it_could_not_be_silent_for_longer() {
    let (agent, _peer) = against(|peer| {
        peer.opened();
        thread::sleep(Duration::from_secs(6));
    });
    let begun = Instant::now();
    let large = ExecRequest::argv(vec!["x".repeat(32 << 10)]);
    let started: Result<Vec<_>, _> = (0..100).map(|_| agent.start(&large)).collect();
    assert_eq!(lost(started.map(|all| all.len())), Lost::Stalled);
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn g2_silence_is_noticed_also_by_those_who_wait_without_a_deadline() {
    let (agent, peer) = against(|peer| {
        peer.opened();
        // The ping is not answered.
        peer.opened();
        peer.until_hung_up();
    });
    assert_eq!(lost(run(&agent)), Lost::Silent);
    peer.join().unwrap();
}

#[test]
fn long_command_is_waited_for_while_the_agent_gives_signs_of_life() {
    let (agent, peer) = against(|peer| {
        let stream = peer.opened();
        for _ in 0..3 {
            let ping = peer.opened();
            peer.control(Kind::Done, ping, &Outcome::Ok(Answer::Done {}));
        }
        peer.exit(stream, OK);
        peer.until_hung_up();
    });
    assert!(run(&agent).unwrap().status.success());
    drop(agent);
    peer.join().unwrap();
}

#[test]
fn g2_handshake_that_never_ends_meets_the_deadline() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let welcome = super::dial::handshake(&ours, soon());
    assert!(matches!(welcome, Err(AgentError::Handshake(_))), "{welcome:?}");
    drop(theirs);
}

#[test]
fn g3_frames_for_unknown_streams_are_ignored_and_counted() {
    let (agent, _peer) = against(|peer| {
        let stream = peer.opened();
        peer.exit(stream + 1000, OK);
        peer.data(stream + 1000, Channel::Output, false, b"for nobody");
        peer.data(stream, Channel::Output, false, b"mine");
        peer.exit(stream, OK);
        peer.exit(stream, OK);
        let next = peer.opened();
        peer.exit(next, OK);
        peer.until_hung_up();
    });
    assert_eq!(run(&agent).unwrap().stdout.bytes, b"mine");
    assert!(run(&agent).unwrap().status.success());
    assert_eq!(agent.ignored_frames(), 3);
}

#[test]
fn g4_first_of_two_exits_wins_and_later_data_is_dropped() {
    let (agent, _peer) = against(|peer| {
        let stream = peer.opened();
        peer.data(stream, Channel::Output, false, b"a");
        peer.exit(stream, ExecStatus::Exited { code: 3 });
        peer.data(stream, Channel::Output, false, b"b");
        peer.exit(stream, ExecStatus::Exited { code: 4 });
        let next = peer.opened();
        peer.exit(next, OK);
        peer.until_hung_up();
    });
    let mut process = agent.start(&ExecRequest::argv(["x"])).unwrap();
    // Everything has been received by now, so that late frames would be seen.
    run(&agent).unwrap();
    assert_eq!(process.next_event(None).unwrap(), Some(ProcessEvent::Stdout(b"a".to_vec())));
    for _ in 0..2 {
        match process.next_event(None).unwrap() {
            Some(ProcessEvent::Exited(status)) => assert_eq!(status.shell_code(), 3),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn g5_data_without_credit_ends_the_connection() {
    let (agent, _peer) = against(|peer| {
        let stream = peer.opened();
        for _ in 0..OUTPUT_WINDOW as usize / MAX_DATA {
            peer.data(stream, Channel::Output, false, &[0; MAX_DATA]);
        }
        peer.data(stream, Channel::Output, false, b"one too many");
        peer.until_hung_up();
    });
    let mut process = agent.start(&ExecRequest::argv(["x"])).unwrap();
    // Nothing is taken until everything was received, so no credit is granted.
    while !matches!(agent.ping(soon()), Err(AgentError::Lost(_))) {}
    let mut taken = 0;
    let end = loop {
        match process.next_event(None) {
            Ok(Some(ProcessEvent::Stdout(bytes))) => taken += bytes.len(),
            other => break other,
        }
    };
    assert_eq!(lost(end), Lost::Protocol("more data than it had credit for"));
    assert_eq!(taken, OUTPUT_WINDOW as usize);
}

#[test]
fn g5_flood_of_output_is_kept_within_the_cap() {
    let (agent, _peer) = against(|peer| {
        let stream = peer.opened();
        let (mut left, mut sent) = (OUTPUT_WINDOW as usize, 0usize);
        while sent < 64 << 20 {
            while left < MAX_DATA {
                let (header, payload) = peer.frame().unwrap();
                if header.kind == Kind::Credit {
                    left += u32::from_le_bytes(payload.try_into().unwrap()) as usize;
                }
            }
            peer.data(stream, Channel::Output, false, &[b'x'; MAX_DATA]);
            left -= MAX_DATA;
            sent += MAX_DATA;
        }
        peer.exit(stream, OK);
        peer.until_hung_up();
    });
    let cap = OutputCap { head: 1000, tail: 1000 };
    let output = agent.exec(&ExecRequest::argv(["x"]).output_cap(cap)).unwrap();
    assert_eq!(output.stdout.bytes.len(), 2000);
    assert_eq!(output.stdout.total, 64 << 20);
    assert!(output.stdout.truncated());
}

#[test]
fn g6_text_from_the_guest_is_escaped_in_errors() {
    let (agent, _peer) = against(|peer| {
        let stream = peer.opened();
        let failure = Failure {
            code: Code::Io,
            errno: Some(libc::ENOENT),
            path: Some(b"/\x1b[31m\n\xff".to_vec().into()),
            message: "\x1b]0;title\x07\n".repeat(1000),
        };
        peer.control(Kind::Done, stream, &Outcome::Failed(failure));
        peer.until_hung_up();
    });
    let text = agent.stat("/x", false).unwrap_err().to_string();
    assert!(text.len() < 4096, "{}", text.len());
    assert!(text.chars().all(|c| c == ' ' || c.is_ascii_graphic()), "{text:?}");
}

#[test]
fn g7_outcome_nested_without_end_ends_the_connection() {
    let (agent, _peer) = against(|peer| {
        let stream = peer.opened();
        let deep = vec![0x91; 100_000];
        peer.send(&Header::new(Kind::Done, stream, 0, deep.len()).to_bytes());
        peer.send(&deep);
        peer.until_hung_up();
    });
    assert_eq!(lost(run(&agent)), Lost::Protocol("a malformed outcome"));
}

#[test]
fn g8_agent_that_dies_in_the_middle_is_lost_at_once_for_all() {
    let (agent, peer) = against(|peer| {
        peer.opened();
        peer.opened();
    });
    let mut first = agent.start(&ExecRequest::argv(["x"])).unwrap();
    let mut second = agent.start(&ExecRequest::argv(["x"])).unwrap();
    peer.join().unwrap();
    let begun = Instant::now();
    assert_eq!(lost(first.next_event(None)), Lost::Closed);
    assert_eq!(lost(second.next_event(None)), Lost::Closed);
    assert_eq!(lost(run(&agent)), Lost::Closed);
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn g8_goodbye_is_passed_on() {
    let (agent, _peer) = against(|peer| {
        peer.opened();
        let goodbye = Goodbye { code: Code::ShuttingDown, message: String::new() };
        peer.control(Kind::Goodbye, 0, &goodbye);
        peer.until_hung_up();
    });
    assert_eq!(lost(run(&agent)), Lost::Goodbye(Code::ShuttingDown));
}

#[test]
fn g9_command_that_the_guest_does_not_end_is_given_up() {
    let (agent, peer) = against(|peer| {
        let stream = peer.opened();
        peer.control(Kind::Started, stream, &Started { pid: Some(1), ..Started::default() });
        loop {
            let (header, _) = peer.frame().expect("a cancel");
            match header.kind {
                Kind::Cancel => break,
                Kind::Open => {
                    let alive = Outcome::Ok(Answer::Done {});
                    peer.control(Kind::Done, header.stream, &alive);
                }
                other => panic!("{other:?}"),
            }
        }
    });
    let request = ExecRequest::argv(["x"]).timeout(Duration::from_millis(10)).grace(Duration::ZERO);
    let begun = Instant::now();
    assert!(matches!(agent.exec(&request), Err(ExecError::Overdue(_))));
    assert!(begun.elapsed() < Duration::from_secs(10));
    peer.join().unwrap();
}

#[test]
fn g10_exit_codes_and_signals_out_of_range_are_mapped() {
    let cases = [
        (ExecStatus::Exited { code: -1 }, 255),
        (ExecStatus::Exited { code: 256 }, 255),
        (ExecStatus::Exited { code: i32::MAX }, 255),
        (ExecStatus::Signaled { signal: 0, core_dumped: false }, 129),
        (ExecStatus::Signaled { signal: i32::MIN, core_dumped: false }, 129),
        (ExecStatus::Signaled { signal: 200, core_dumped: true }, 192),
        (ExecStatus::Signaled { signal: 11, core_dumped: true }, 139),
    ];
    for (status, code) in cases {
        let (agent, _peer) = against(move |peer| {
            let stream = peer.opened();
            peer.exit(stream, status);
            peer.until_hung_up();
        });
        assert_eq!(run(&agent).unwrap().status.shell_code(), code, "{status:?}");
    }
}

#[test]
fn g13_names_that_lead_out_of_a_folder_are_refused() {
    for name in ["..", ".", "", "a/b", "/etc/passwd", "a\0b"] {
        let (agent, _peer) = against(move |peer| {
            let stream = peer.opened();
            let metadata = Metadata {
                kind: FileKind::File,
                mode: 0,
                uid: 0,
                gid: 0,
                size: 0,
                nlink: 1,
                mtime_s: 0,
                mtime_ns: 0,
                ctime: None,
                target: None,
            };
            let entry = DirEntry { name: name.as_bytes().to_vec().into(), metadata };
            let entry = rmp_serde::to_vec_named(&entry).unwrap();
            let bytes = [&(entry.len() as u32).to_le_bytes()[..], &entry].concat();
            peer.data(stream, Channel::Output, true, &bytes);
            peer.control(Kind::Done, stream, &Outcome::Ok(Answer::Transferred(1)));
            peer.until_hung_up();
        });
        assert!(agent.list("/x").is_err(), "{name:?}");
    }
}

#[test]
fn listing_that_announces_a_huge_entry_or_is_cut_is_refused() {
    for bytes in [&[0xff, 0xff, 0xff, 0xff][..], &[9, 0, 0, 0, 1]] {
        let (agent, _peer) = against(move |peer| {
            let stream = peer.opened();
            peer.data(stream, Channel::Output, true, bytes);
            peer.control(Kind::Done, stream, &Outcome::Ok(Answer::Transferred(1)));
            peer.until_hung_up();
        });
        assert!(matches!(agent.list("/x"), Err(AgentError::Lost(Lost::Protocol(_)))));
    }
}

#[test]
fn answer_of_another_kind_is_refused() {
    let (agent, _peer) = against(|peer| {
        for _ in 0..3 {
            let stream = peer.opened();
            peer.control(Kind::Done, stream, &Outcome::Ok(Answer::Transferred(5)));
        }
        peer.until_hung_up();
    });
    assert!(matches!(agent.info(), Err(AgentError::WrongAnswer)));
    assert!(matches!(run(&agent), Err(ExecError::Agent(AgentError::WrongAnswer))));
    // Five bytes were announced and none came.
    assert!(matches!(agent.read_file("/x", 10), Err(AgentError::WrongAnswer)));
}

#[test]
fn credit_without_bounds_ends_the_connection() {
    let (agent, _peer) = against(|peer| {
        let stream = peer.opened();
        peer.send(&credit_frame(stream, Channel::Input, u32::MAX, false));
        peer.until_hung_up();
    });
    assert_eq!(lost(run(&agent)), Lost::Protocol("credit beyond all bounds"));
}

#[test]
fn input_never_exceeds_the_credit() {
    let (agent, peer) = against(|peer| {
        peer.opened();
        let window = INPUT_WINDOW as usize;
        let mut taken = 0;
        let mut take = |peer: &mut Peer| {
            let Some((header, payload)) = peer.frame() else { return false };
            taken += if header.kind == Kind::Data { payload.len() } else { 0 };
            taken < window
        };
        while take(peer) {}
        // A ping may still come, but no further data.
        peer.0.set_read_timeout(Some(Duration::from_millis(80))).unwrap();
        take(peer);
        assert_eq!(taken, window);
    });
    let mut process = agent.start(&ExecRequest::argv(["x"]).piped_stdin()).unwrap();
    let mut stdin = process.take_stdin().unwrap();
    let writer = thread::spawn(move || stdin.write_all(&[0; 1 << 20]));
    peer.join().unwrap();
    assert!(writer.join().unwrap().is_err());
}

#[test]
fn agent_dropped_hangs_up_and_joins_its_thread() {
    let (agent, peer) = against(|peer| {
        let stream = peer.opened();
        peer.exit(stream, OK);
        peer.until_hung_up();
    });
    run(&agent).unwrap();
    drop(agent);
    peer.join().unwrap();
}

/// A VM's socket, played by a listener.
struct Socket {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn vm_socket(answers: Vec<&'static [u8]>) -> Socket {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        let mut silent = Vec::new();
        for answer in answers {
            let (mut socket, _) = listener.accept().unwrap();
            let mut line = [0; 13];
            socket.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"CONNECT 1024\n");
            socket.write_all(answer).unwrap();
            if answer.starts_with(b"OK 1\n") {
                let mut peer = Peer(socket);
                peer.welcome();
                peer.until_hung_up();
            } else if answer == b"OK 2\n" {
                silent.push(socket);
            }
        }
    });
    Socket { _folder: folder, path }
}

#[test]
fn connect_tries_again_until_the_agent_listens() {
    let socket = vm_socket(vec![b"", b"OK 1", b"OK 1\n"]);
    let agent = Agent::connect(&socket.path, Instant::now() + Duration::from_secs(5)).unwrap();
    assert!(agent.welcome().init);
}

#[test]
fn connect_tries_again_when_the_guest_has_lost_the_connection_without_a_word() {
    let socket = vm_socket(vec![b"OK 2\n", b"OK 2\n", b"OK 1\n"]);
    let agent = Agent::connect(&socket.path, Instant::now() + Duration::from_secs(60)).unwrap();
    assert!(agent.welcome().init);
}

#[test]
fn connect_to_a_line_without_end_or_sense_fails_in_time_g8() {
    const LONG: &[u8] = &[b'O'; 4096];
    for answer in [LONG, b"OK\n", b"OK x\n", b"NO 1024\n", b"\n"] {
        let socket = vm_socket(vec![answer; 1000]);
        let begun = Instant::now();
        let failed = Agent::connect(&socket.path, soon());
        assert!(matches!(failed, Err(AgentError::NotListening { .. })));
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn connect_where_nobody_is_fails_at_once_g8() {
    let folder = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let deadline = begun + Duration::from_secs(60);
    let failed = Agent::connect(&folder.path().join("none"), deadline);
    assert!(matches!(failed, Err(AgentError::Dial { .. })));
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn connect_to_a_queue_that_is_full_meets_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    // SAFETY: passes a descriptor owned here and a number; it makes the queue as short as possible.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let _first = UnixStream::connect(&path).unwrap();
    let begun = Instant::now();
    let failed = Agent::connect(&path, begun + Duration::from_millis(200));
    assert!(matches!(failed, Err(AgentError::Dial { .. })));
    assert!(begun.elapsed() >= Duration::from_millis(200));
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn ready_signal_is_heard_once_it_makes_sense() {
    let folder = tempfile::tempdir().unwrap();
    let uds = folder.path().join("vsock");
    let ready = ReadyListener::bind(&uds).unwrap();
    let path = folder.path().join("vsock_1025");
    Peer(UnixStream::connect(&path).unwrap()).send(b"not a welcome at all");
    Peer(UnixStream::connect(&path).unwrap()).control(Kind::Welcome, 0, &welcome());
    let heard = ready.wait(Instant::now() + Duration::from_secs(5)).unwrap();
    assert_eq!(heard, welcome());
    drop(ready);
    assert!(!path.exists());
}

#[test]
fn ready_signal_that_never_comes_meets_the_deadline_g8() {
    let folder = tempfile::tempdir().unwrap();
    let ready = ReadyListener::bind(&folder.path().join("vsock")).unwrap();
    assert!(matches!(ready.wait(soon()), Err(AgentError::NotReady)));
}

/// A VM's socket behind which a scripted agent answers the first connection.
fn behind_a_socket(
    script: impl FnOnce(&mut Peer, &str) + Send + 'static,
) -> (PathBuf, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vsock.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        let mut peer = Peer(listener.accept().unwrap().0);
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            peer.0.read_exact(&mut byte).unwrap();
            line.extend(byte);
        }
        script(&mut peer, std::str::from_utf8(&line).unwrap());
    });
    (path, folder)
}

#[test]
fn connect_refreshed_sends_all_in_one_go_and_the_connection_goes_on() {
    let (path, _folder) = behind_a_socket(|peer, line| {
        assert_eq!(line, "CONNECT 1026\n");
        // Nothing was answered yet, and the hello and the refresh have arrived.
        assert_eq!(peer.frame().unwrap().0.kind, Kind::Hello);
        assert_eq!(peer.opened(), 1);
        peer.send(b"OK 5\n");
        peer.control(Kind::Welcome, 0, &welcome());
        let report = Refreshed { steps: every_step(), failed: None };
        peer.control(Kind::Done, 1, &Outcome::Ok(Answer::Refreshed(report)));
        let stream = peer.opened();
        assert_eq!(stream, 2);
        peer.exit(stream, OK);
        peer.until_hung_up();
    });
    let refresh = Refresh::new(3).unwrap().env("A", "b");
    let deadline = Instant::now() + Duration::from_secs(5);
    let agent = Agent::connect_refreshed(&path, &refresh, deadline).unwrap();
    assert!(run(&agent).unwrap().status.success());
}

/// The steps of a refresh without names and addresses.
fn every_step() -> Vec<RefreshStep> {
    use RefreshStep::{BootId, Clock, Entropy, Env, Generation, MachineId, Thaw};
    vec![Entropy, Clock, MachineId, BootId, Generation, Env, Thaw]
}

#[test]
fn g11_refresh_without_a_step_that_was_asked_for_or_told_twice_is_not_believed() {
    let refreshed = |steps: Vec<RefreshStep>| {
        let (path, _folder) = behind_a_socket(move |peer, _| {
            peer.send(b"OK 5\n");
            peer.welcome();
            let first = Refreshed { steps, failed: None };
            peer.control(Kind::Done, 1, &Outcome::Ok(Answer::Refreshed(first)));
            // A better answer that comes later does not count.
            let second = Refreshed { steps: every_step(), failed: None };
            peer.control(Kind::Done, 1, &Outcome::Ok(Answer::Refreshed(second)));
            peer.until_hung_up();
        });
        let deadline = Instant::now() + Duration::from_secs(5);
        Agent::connect_refreshed(&path, &Refresh::new(1).unwrap(), deadline).map(drop)
    };
    refreshed(every_step()).unwrap();
    for missing in every_step() {
        let steps = every_step().into_iter().filter(|step| *step != missing).collect();
        let failed = refreshed(steps).unwrap_err();
        let named = matches!(failed, AgentError::NotRefreshed { step, .. } if step == missing);
        assert!(named, "{missing:?}: {failed}");
    }
}

#[test]
fn connect_refreshed_with_a_failed_step_is_an_error_that_names_it() {
    let (path, _folder) = behind_a_socket(|peer, _| {
        peer.send(b"OK 5\n");
        peer.welcome();
        let failed =
            FailedStep { step: RefreshStep::Clock, errno: Some(1), message: "\x1b[2J".into() };
        let report = Refreshed { steps: vec![RefreshStep::Entropy], failed: Some(failed) };
        peer.control(Kind::Done, 1, &Outcome::Ok(Answer::Refreshed(report)));
        peer.until_hung_up();
    });
    let deadline = Instant::now() + Duration::from_secs(5);
    let failed =
        Agent::connect_refreshed(&path, &Refresh::new(1).unwrap(), deadline).err().unwrap();
    assert!(matches!(failed, AgentError::NotRefreshed { step: RefreshStep::Clock, .. }));
    assert!(!failed.to_string().contains('\x1b'), "{failed}");
}

#[test]
fn connect_refreshed_to_an_agent_that_stalls_meets_its_deadline() {
    let (path, _folder) = behind_a_socket(|peer, _| {
        peer.send(b"OK 5\n");
        peer.welcome();
        peer.until_hung_up();
    });
    let failed = Agent::connect_refreshed(&path, &Refresh::new(1).unwrap(), soon()).err().unwrap();
    assert!(matches!(failed, AgentError::Overdue), "{failed}");
}
