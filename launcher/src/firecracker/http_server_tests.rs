//! Tests of the API socket against misbehaving clients, without a VM.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::*;
use pvmm_sandbox::sys::{passing, poll};

struct Bench {
    server: HttpServer,
    path: PathBuf,
    now: Instant,
    _dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("api.sock");
        let server = HttpServer::bind(&path, 51200).unwrap();
        Self { server, path, now: Instant::now(), _dir: dir }
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(&self.path).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        client
    }

    /// Runs one round of the event loop; every request is answered with its path.
    fn round(&mut self) -> usize {
        let ready = poll::wait(&self.server.wants(), Some(Duration::ZERO)).unwrap();
        let mut requests = self.server.advance(&ready, self.now);
        let mut count = 0;
        while !requests.is_empty() {
            for (id, request) in requests {
                count += 1;
                self.server.answer(id, &Answer::json(&request.path));
            }
            requests = self.server.whole_requests(self.now);
        }
        count
    }

    fn rounds(&mut self) -> usize {
        (0..4).map(|_| self.round()).sum()
    }
}

fn said(client: &mut UnixStream) -> String {
    let mut bytes = vec![0; 4096];
    let count = client.read(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes[..count]).into_owned()
}

fn all_said(client: &mut UnixStream) -> String {
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn requests_of_one_connection_are_answered_in_turn() {
    let mut bench = Bench::new();
    let mut client = bench.client();
    for path in ["/a", "/b"] {
        write!(client, "GET {path} HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(bench.rounds(), 1);
        assert!(said(&mut client).ends_with(&format!("{path:?}")));
    }
    write!(client, "GET /c HTTP/1.1\r\n\r\nGET /d HTTP/1.1\r\n\r\n").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(bench.rounds(), 2);
    let text = all_said(&mut client);
    assert!(text.contains("\"/c\"") && text.ends_with("\"/d\""), "{text}");
    assert!(bench.server.clients.is_empty());
}

#[test]
fn i1_request_that_comes_byte_by_byte_keeps_nobody_waiting_and_has_an_end() {
    let mut bench = Bench::new();
    let (mut slow, mut quick) = (bench.client(), bench.client());
    for byte in b"PUT /actions HTTP/1.1\r\nContent-Le" {
        slow.write_all(&[*byte]).unwrap();
        assert_eq!(bench.round(), 0);
        bench.now += Duration::from_millis(250);
    }
    write!(quick, "GET /quick HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(bench.rounds(), 1);
    assert!(said(&mut quick).ends_with("\"/quick\""));
    bench.now += PATIENCE;
    assert_eq!(bench.rounds(), 0);
    assert!(all_said(&mut slow).starts_with("HTTP/1.1 408 "));
    assert_eq!(bench.server.clients.len(), 1);
}

#[test]
fn i6_client_that_leaves_in_mid_request_leaves_nothing() {
    let mut bench = Bench::new();
    let mut client = bench.client();
    write!(client, "PUT /mmds HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf").unwrap();
    bench.rounds();
    assert_eq!(bench.server.clients.len(), 1);
    drop(client);
    assert_eq!(bench.rounds(), 0);
    assert!(bench.server.clients.is_empty());
}

#[test]
fn client_that_leaves_while_its_request_is_carried_out_is_forgotten() {
    let mut bench = Bench::new();
    let mut client = bench.client();
    write!(client, "GET /a HTTP/1.1\r\n\r\n").unwrap();
    let advance = |bench: &mut Bench| {
        let ready = poll::wait(&bench.server.wants(), Some(Duration::ZERO)).unwrap();
        bench.server.advance(&ready, bench.now)
    };
    advance(&mut bench);
    let requests = advance(&mut bench);
    assert_eq!(requests.len(), 1);
    drop(client);
    advance(&mut bench);
    assert!(bench.server.clients.is_empty());
    bench.server.answer(requests[0].0, &Answer::done());
}

#[test]
fn i1_body_that_is_too_long_or_of_no_length_ends_the_connection() {
    for head in ["Content-Length: 51201", "Content-Length: -1", "Transfer-Encoding: chunked"] {
        let mut bench = Bench::new();
        let mut client = bench.client();
        write!(client, "PUT /mmds HTTP/1.1\r\n{head}\r\n\r\naaaa").unwrap();
        assert_eq!(bench.rounds(), 0);
        let text = all_said(&mut client);
        assert!(text.starts_with("HTTP/1.1 400 ") && text.contains("fault_message"), "{text}");
        assert!(bench.server.clients.is_empty());
    }
}

#[test]
fn body_is_called_for_when_the_client_waits_for_that() {
    let mut bench = Bench::new();
    let mut client = bench.client();
    write!(client, "PUT /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n").unwrap();
    bench.rounds();
    assert_eq!(said(&mut client), "HTTP/1.1 100 Continue\r\n\r\n");
    write!(client, "{{}}").unwrap();
    assert_eq!(bench.rounds(), 1);
    assert!(said(&mut client).ends_with("\"/a\""));
}

#[test]
fn client_that_takes_no_answer_keeps_nobody_waiting_and_has_an_end() {
    let mut bench = Bench::new();
    let mut deaf = bench.client();
    deaf.set_nonblocking(true).unwrap();
    let mut sent = 0;
    while bench.server.clients.values().all(|client| client.unsent.is_empty()) && sent < 100_000 {
        sent += 1;
        let _ = deaf.write(b"GET /a HTTP/1.1\r\n\r\n");
        bench.round();
    }
    assert!(sent < 100_000);
    bench.now = Instant::now() + 2 * PATIENCE;
    bench.rounds();
    assert!(bench.server.clients.is_empty());
}

#[test]
fn clients_beyond_the_most_take_the_place_of_idle_ones_or_are_sent_away() {
    let mut bench = Bench::new();
    let mut idle: Vec<UnixStream> = Vec::new();
    for _ in 0..CLIENTS_MAX {
        idle.push(bench.client());
        bench.round();
    }
    let mut late = bench.client();
    bench.round();
    assert_eq!(bench.server.clients.len(), CLIENTS_MAX);
    assert_eq!(all_said(&mut idle[0]), "");
    write!(late, "GET /late HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(bench.rounds(), 1);
    for client in bench.server.clients.values_mut() {
        client.busy = true;
    }
    let mut refused = bench.client();
    bench.round();
    assert!(all_said(&mut refused).starts_with("HTTP/1.1 503 "));
}

/// A client can send open files along with a request; the server must not keep them.
#[test]
fn i8_files_that_come_with_a_request_are_closed() {
    let mut bench = Bench::new();
    let mut client = bench.client();
    let (mut kept, sent) = UnixStream::pair().unwrap();
    kept.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    for part in [&b"GET /a HT"[..], b"TP/1.1\r\n\r\n"] {
        let files: Vec<OwnedFd> = (0..100).map(|_| sent.try_clone().unwrap().into()).collect();
        passing::send(&client, part, &files).unwrap();
        bench.round();
    }
    drop(sent);
    bench.rounds();
    assert!(said(&mut client).ends_with("\"/a\""));
    // The server has closed the file, while the client is still connected.
    assert_eq!(bench.server.clients.len(), 1);
    assert_eq!(kept.read(&mut [0]).unwrap(), 0);
}

#[test]
fn i7_path_that_is_taken_or_a_link_is_not_used() {
    let bench = Bench::new();
    let error = HttpServer::bind(&bench.path, 1).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    let (link, target) = (bench.path.with_extension("link"), bench.path.with_extension("target"));
    std::os::unix::fs::symlink(&target, &link).unwrap();
    assert_eq!(HttpServer::bind(&link, 1).err().unwrap().kind(), io::ErrorKind::AddrInUse);
    assert!(!target.exists());
    assert!(HttpServer::bind(Path::new(&"x".repeat(108)), 1).is_err());
}
