//! A client that breaks the rules: the agent says goodbye, drops it, and serves everybody else.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use pvmm_guest_agent::frame::{END, HEADER_LEN, Header, Kind, credit_frame};
use pvmm_guest_agent::limits::{INPUT_WINDOW, MAX_CONNECTIONS, MAX_DATA, VERSION};
use pvmm_guest_agent::message::{
    Code, Command, Exec, Goodbye, Hello, Outcome, Request, Signal, Welcome,
};
use pvmm_guest_agent::{Channel, decode, encode};

use crate::fixture::{Fixture, wait_for};

/// A client that sends what it is told.
struct Raw(UnixStream);

impl Raw {
    fn new(fixture: &Fixture) -> Self {
        let socket = fixture.socket();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        Self(socket)
    }

    fn greeted(fixture: &Fixture) -> Self {
        let mut this = Self::new(fixture);
        this.control(Kind::Hello, 0, &hello(VERSION, VERSION));
        let (header, payload) = this.frame().unwrap();
        assert_eq!(header.kind, Kind::Welcome);
        assert_eq!(decode::<Welcome>(&payload).unwrap().version, VERSION);
        this
    }

    fn send(&mut self, bytes: &[u8]) {
        // The agent may have closed already, which is what such a test waits for.
        let _ = self.0.write_all(bytes);
    }

    fn control<T: serde::Serialize>(&mut self, kind: Kind, stream: u32, message: &T) {
        let mut frame = Vec::new();
        encode(&mut frame, kind, stream, message).unwrap();
        self.send(&frame);
    }

    fn data(&mut self, stream: u32, flags: u8, bytes: &[u8]) {
        self.send(&Header::new(Kind::Data, stream, flags, bytes.len()).to_bytes());
        self.send(bytes);
    }

    fn frame(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut header = [0; HEADER_LEN];
        self.0.read_exact(&mut header).ok()?;
        let header = Header::parse(&header).unwrap();
        let mut payload = vec![0; header.len as usize];
        self.0.read_exact(&mut payload).ok()?;
        Some((header, payload))
    }

    /// Reads until the goodbye, which must be the last that comes.
    fn expect_goodbye(&mut self, code: Code) {
        loop {
            let (header, payload) = self.frame().expect("a goodbye");
            if header.kind == Kind::Goodbye {
                assert_eq!(decode::<Goodbye>(&payload).unwrap().code, code);
                assert!(self.frame().is_none(), "a frame after the goodbye");
                return;
            }
        }
    }

    fn expect_done(&mut self, stream: u32) -> Outcome {
        loop {
            let (header, payload) = self.frame().expect("an outcome");
            if header.kind == Kind::Done {
                assert_eq!(header.stream, stream);
                return decode(&payload).unwrap();
            }
        }
    }
}

fn hello(min_version: u16, max_version: u16) -> Hello {
    Hello { min_version, max_version, client: "test".into() }
}

fn cat() -> Request {
    let argv = vec![b"sleep".to_vec().into(), b"60".to_vec().into()];
    Request::Exec(Exec { stdin: true, ..Exec::new(Command::Argv(argv)) })
}

fn still_serves(fixture: &Fixture) {
    fixture.agent().ping(Instant::now() + Duration::from_secs(5)).unwrap();
}

#[test]
fn g1_length_prefix_max_closes_before_allocating() {
    let fixture = Fixture::start();
    let before = fixture.private_kib();
    for kind in [1u8, 3, 5, 6, 200] {
        let mut raw = Raw::greeted(&fixture);
        let mut header = [0u8; HEADER_LEN];
        header[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        header[4] = u8::from(kind != 1);
        header[8] = kind;
        raw.send(&header);
        raw.expect_goodbye(Code::Protocol);
    }
    assert!(fixture.private_kib() < before + 512);
    still_serves(&fixture);
}

#[test]
fn g1_length_prefix_zero_closes() {
    let fixture = Fixture::start();
    let mut raw = Raw::greeted(&fixture);
    raw.send(&[0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]);
    raw.expect_goodbye(Code::Protocol);
    still_serves(&fixture);
}

#[test]
fn garbage_instead_of_a_hello_closes() {
    let fixture = Fixture::start();
    let mut raw = Raw::new(&fixture);
    raw.send(b"GET / HTTP/1.1\r\n\r\n");
    raw.expect_goodbye(Code::Protocol);
    let mut raw = Raw::new(&fixture);
    raw.control(Kind::Open, 1, &Request::Ping {});
    raw.expect_goodbye(Code::Protocol);
    let mut raw = Raw::greeted(&fixture);
    raw.control(Kind::Hello, 0, &hello(VERSION, VERSION));
    raw.expect_goodbye(Code::Protocol);
    still_serves(&fixture);
}

#[test]
fn version_not_shared_is_told() {
    let fixture = Fixture::start();
    for (min, max) in [(VERSION + 1, VERSION + 9), (0, VERSION - 1)] {
        let mut raw = Raw::new(&fixture);
        raw.control(Kind::Hello, 0, &hello(min, max));
        raw.expect_goodbye(Code::Version);
    }
    let mut raw = Raw::new(&fixture);
    raw.control(Kind::Hello, 0, &hello(0, u16::MAX));
    assert_eq!(raw.frame().unwrap().0.kind, Kind::Welcome);
}

#[test]
fn flags_reserved_bytes_and_kinds_unknown_close() {
    let fixture = Fixture::start();
    let ping = |change: fn(&mut [u8])| {
        let mut frame = Vec::new();
        encode(&mut frame, Kind::Open, 1, &Request::Ping {}).unwrap();
        change(&mut frame);
        frame
    };
    for frame in [ping(|f| f[9] = 4), ping(|f| f[10] = 1), ping(|f| f[8] = 99), ping(|f| f[4] = 0)]
    {
        let mut raw = Raw::greeted(&fixture);
        raw.send(&frame);
        raw.expect_goodbye(Code::Protocol);
    }
    still_serves(&fixture);
}

#[test]
fn extension_frame_is_skipped() {
    let fixture = Fixture::start();
    let mut raw = Raw::greeted(&fixture);
    raw.send(&[3, 0, 0, 0, 9, 0, 0, 0, 0x80, 0xff, 1, 2, b'a', b'b', b'c']);
    raw.control(Kind::Open, 1, &Request::Ping {});
    assert!(matches!(raw.expect_done(1), Outcome::Ok(_)));
}

#[test]
fn stream_number_that_does_not_rise_closes() {
    let fixture = Fixture::start();
    let mut raw = Raw::greeted(&fixture);
    raw.control(Kind::Open, 5, &Request::Ping {});
    raw.expect_done(5);
    raw.control(Kind::Open, 5, &Request::Ping {});
    raw.expect_goodbye(Code::Protocol);
}

#[test]
fn frames_for_an_ended_stream_are_ignored_but_not_for_one_never_opened_g3() {
    let fixture = Fixture::start();
    let mut raw = Raw::greeted(&fixture);
    raw.control(Kind::Open, 1, &Request::Ping {});
    raw.expect_done(1);
    raw.data(1, END, b"late");
    raw.send(&credit_frame(1, Channel::Output, 1, false));
    raw.control(Kind::Open, 2, &Request::Ping {});
    raw.expect_done(2);
    raw.data(3, 0, b"never opened");
    raw.expect_goodbye(Code::Protocol);
}

#[test]
fn data_beyond_the_window_closes_and_kills() {
    let fixture = Fixture::start();
    let mut raw = Raw::greeted(&fixture);
    raw.control(Kind::Open, 1, &cat());
    for _ in 0..(INPUT_WINDOW as usize / MAX_DATA) * 2 + 2 {
        raw.data(1, 0, &[0; MAX_DATA]);
    }
    raw.expect_goodbye(Code::Protocol);
    wait_for("the exec's end", || fixture.agent().info().unwrap().execs == 0);
}

#[test]
fn data_after_the_end_and_on_wrong_channels_closes() {
    let fixture = Fixture::start();
    for bad in [Channel::Output.bits(), Channel::Error.bits()] {
        let mut raw = Raw::greeted(&fixture);
        raw.control(Kind::Open, 1, &cat());
        raw.data(1, bad, b"x");
        raw.expect_goodbye(Code::Protocol);
    }
    let mut raw = Raw::greeted(&fixture);
    raw.control(Kind::Open, 1, &cat());
    raw.data(1, END, b"x");
    raw.data(1, 0, b"y");
    raw.expect_goodbye(Code::Protocol);
}

#[test]
fn credit_without_bounds_closes() {
    let fixture = Fixture::start();
    let mut raw = Raw::greeted(&fixture);
    raw.control(Kind::Open, 1, &cat());
    raw.send(&credit_frame(1, Channel::Output, u32::MAX, false));
    raw.expect_goodbye(Code::Protocol);
}

#[test]
fn signal_that_does_not_exist_closes() {
    let fixture = Fixture::start();
    for signal in [-1, 0, 65, i32::MAX] {
        let mut raw = Raw::greeted(&fixture);
        raw.control(Kind::Open, 1, &cat());
        raw.control(Kind::Signal, 1, &Signal { signal, scope: Default::default() });
        raw.expect_goodbye(Code::Protocol);
    }
}

#[test]
fn request_that_makes_no_sense_ends_its_stream_only_g7() {
    let fixture = Fixture::start();
    let mut raw = Raw::greeted(&fixture);
    let deep = [vec![0x91; 5000], vec![0xc0]].concat();
    let huge_key = [&[0x81, 0xdb, 0, 1, 0, 0][..], &vec![b'k'; 65536], &[0xc0]].concat();
    let lying_array = vec![0x81, 0xa4, b'e', b'x', b'e', b'c', 0xdd, 0xff, 0xff, 0xff, 0xff];
    let unknown =
        rmp_serde::to_vec_named(&std::collections::BTreeMap::from([("later", ())])).unwrap();
    for (index, payload) in [deep, huge_key, lying_array, unknown, vec![0xc1]].iter().enumerate() {
        let stream = index as u32 + 1;
        raw.send(&Header::new(Kind::Open, stream, 0, payload.len()).to_bytes());
        raw.send(payload);
        match raw.expect_done(stream) {
            Outcome::Failed(failure) => assert_eq!(failure.code, Code::BadRequest),
            other => panic!("{other:?}"),
        }
    }
    raw.control(Kind::Open, 100, &Request::Ping {});
    assert!(matches!(raw.expect_done(100), Outcome::Ok(_)));
}

#[test]
fn connections_beyond_the_cap_are_told_so() {
    let fixture = Fixture::start();
    let held: Vec<Raw> = (0..MAX_CONNECTIONS).map(|_| Raw::greeted(&fixture)).collect();
    let mut more = Raw::new(&fixture);
    more.expect_goodbye(Code::TooMany);
    drop(held);
    wait_for("room", || pvmm::agent::Agent::over(fixture.socket()).is_ok());
}

#[test]
fn client_that_never_reads_is_not_listened_to_without_end() {
    let fixture = Fixture::start();
    let before = fixture.private_kib();
    let mut raw = Raw::greeted(&fixture);
    raw.0.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut frames = Vec::new();
    for stream in 1..200_000u32 {
        encode(&mut frames, Kind::Open, stream, &Request::Info {}).unwrap();
    }
    let stuck = raw.0.write_all(&frames).is_err();
    assert!(stuck, "the agent took all requests of a client that reads no answers");
    assert!(fixture.private_kib() < before + 4096);
    still_serves(&fixture);
}

#[test]
fn g2_truncated_frame_then_silence_is_given_up() {
    let fixture = Fixture::start();
    let mut raw = Raw::new(&fixture);
    raw.0.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    let mut frame = Vec::new();
    encode(&mut frame, Kind::Hello, 0, &hello(VERSION, VERSION)).unwrap();
    let begun = Instant::now();
    raw.send(&frame[..frame.len() - 1]);
    raw.expect_goodbye(Code::Silent);
    assert!(begun.elapsed() > Duration::from_secs(5));
}
