//! Ports: bytes and ends travel both ways, refusals and resets are told, nobody is held up.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use pvmm::agent::Forward;

use crate::fixture::{Fixture, in_time, wait_for};

/// Serves each client with `serve` on a thread of its own; the port.
fn server(address: &str, serve: impl Fn(TcpStream) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind(address).unwrap();
    let port = listener.local_addr().unwrap().port();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for client in listener.incoming() {
            let serve = Arc::clone(&serve);
            thread::spawn(move || serve(client.unwrap()));
        }
    });
    port
}

/// Sends back what it has read, once it has read all of it.
fn echo_at_end(mut client: TcpStream) {
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).unwrap();
    client.write_all(&bytes).unwrap();
}

fn here() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

fn client_of(forward: &Forward) -> TcpStream {
    let client = TcpStream::connect(forward.address()).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    client
}

fn unused_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn connection_half_closed_by_the_client_still_gets_the_answer() {
    in_time(|| {
        let fixture = Fixture::start();
        let port = server("127.0.0.1:0", echo_at_end);
        let mut tcp = fixture.agent().connect_tcp(port).unwrap();
        let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i % 253) as u8).collect();
        tcp.write_all(&sent).unwrap();
        tcp.shutdown_write().unwrap();
        let mut got = Vec::new();
        tcp.read_to_end(&mut got).unwrap();
        assert!(got == sent);
    });
}

#[test]
fn connection_half_closed_by_the_guest_still_takes_input() {
    let fixture = Fixture::start();
    let (tell, told) = mpsc::channel();
    let port = server("127.0.0.1:0", move |mut client| {
        client.write_all(b"said").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut rest = String::new();
        client.read_to_string(&mut rest).unwrap();
        tell.send(rest).unwrap();
    });
    let agent = fixture.agent();
    let forward = agent.forward(here(), port, |_| {}).unwrap();
    let mut client = client_of(&forward);
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert_eq!(text, "said");
    client.write_all(b"after the end").unwrap();
    drop(client);
    assert_eq!(told.recv_timeout(Duration::from_secs(20)).unwrap(), "after the end");
    wait_for("the client's place", || forward.clients() == 0);
}

#[test]
fn port_on_the_sixth_protocol_alone_is_reached() {
    let fixture = Fixture::start();
    let port = server("[::1]:0", echo_at_end);
    let mut tcp = fixture.agent().connect_tcp(port).unwrap();
    tcp.write_all(b"six").unwrap();
    tcp.shutdown_write().unwrap();
    let mut text = String::new();
    tcp.read_to_string(&mut text).unwrap();
    assert_eq!(text, "six");
}

#[test]
fn port_where_nobody_listens_is_refused_and_the_client_is_reset() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let port = unused_port();
    let refused = agent.connect_tcp(port).err().unwrap();
    assert_eq!(refused.errno(), Some(libc::ECONNREFUSED), "{refused}");
    let (tell, told) = mpsc::channel();
    let tell = std::sync::Mutex::new(tell);
    let forward = agent
        .forward(here(), port, move |e| tell.lock().unwrap().send(e.errno()).unwrap())
        .unwrap();
    let mut client = client_of(&forward);
    let read = client.read(&mut [0; 10]);
    assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(told.recv().unwrap(), Some(libc::ECONNREFUSED));
    assert!(agent.connect_tcp(0).is_err());
}

#[test]
fn connection_reset_in_the_guest_is_reset_here() {
    let fixture = Fixture::start();
    let port = server("127.0.0.1:0", |client| {
        client.set_nodelay(true).unwrap();
        let mut byte = [0];
        (&client).read_exact(&mut byte).unwrap();
        // More is waiting unread, so that closing is a reset.
        thread::sleep(Duration::from_millis(100));
    });
    let agent = fixture.agent();
    let forward = agent.forward(here(), port, |_| {}).unwrap();
    let mut client = client_of(&forward);
    client.write_all(b"xyz").unwrap();
    let read = client.read(&mut [0; 10]);
    assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
    wait_for("the client's place", || forward.clients() == 0);
}

#[test]
fn five_hundred_connections_at_once_each_have_their_own_bytes() {
    in_time(|| {
        const COUNT: usize = 500;
        let fixture = Fixture::start();
        let port = server("127.0.0.1:0", |mut client| {
            let mut line = [0; 8];
            client.read_exact(&mut line).unwrap();
            client.write_all(&line).unwrap();
        });
        let agent = fixture.agent();
        let forward = agent.forward(here(), port, |e| panic!("{e}")).unwrap();
        let mut clients: Vec<TcpStream> = (0..COUNT).map(|_| client_of(&forward)).collect();
        wait_for("all connections", || forward.clients() == COUNT);
        for (number, client) in clients.iter_mut().enumerate() {
            client.write_all(format!("{number:8}").as_bytes()).unwrap();
        }
        for (number, client) in clients.iter_mut().enumerate() {
            let mut text = String::new();
            client.read_to_string(&mut text).unwrap();
            assert_eq!(text, format!("{number:8}"));
        }
        drop(clients);
        wait_for("all places", || forward.clients() == 0);
    });
}

#[test]
fn client_of_a_server_that_does_not_read_is_held_and_others_go_on() {
    let fixture = Fixture::start();
    let before = fixture.private_kib();
    let port = server("127.0.0.1:0", |client| {
        let mut first = [0; 1];
        (&client).read_exact(&mut first).unwrap();
        match first[0] {
            b's' => thread::sleep(Duration::from_secs(600)),
            _ => (&client).write_all(b"quick").unwrap(),
        }
    });
    let agent = fixture.agent();
    let forward = agent.forward(here(), port, |e| panic!("{e}")).unwrap();
    let mut slow = client_of(&forward);
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    slow.write_all(b"s").unwrap();
    thread::spawn(move || {
        while slow.write_all(&[0; 65536]).is_ok() {
            count.fetch_add(65536, Ordering::Relaxed);
        }
    });
    let mut last = usize::MAX;
    wait_for("the slow client to stand still", || {
        thread::sleep(Duration::from_millis(200));
        let now = sent.load(Ordering::Relaxed);
        std::mem::replace(&mut last, now) == now
    });
    let mut quick = client_of(&forward);
    quick.write_all(b"q").unwrap();
    let mut text = String::new();
    quick.read_to_string(&mut text).unwrap();
    assert_eq!(text, "quick");
    assert!(fixture.private_kib() < before + 2048, "{before} KiB, {}", fixture.private_kib());
}

#[test]
fn forward_dropped_ends_its_clients_and_frees_its_port() {
    let fixture = Fixture::start();
    let (tell, told) = mpsc::channel();
    let port = server("127.0.0.1:0", move |mut client| {
        client.write_all(b"x").unwrap();
        let ended = client.read(&mut [0; 1]).map_or(true, |count| count == 0);
        tell.send(ended).unwrap();
    });
    let agent = fixture.agent();
    let forward = agent.forward(here(), port, |_| {}).unwrap();
    let address: SocketAddr = forward.address();
    let mut client = client_of(&forward);
    client.read_exact(&mut [0; 1]).unwrap();
    drop(forward);
    assert!(client.read(&mut [0; 1]).map_or(true, |count| count == 0));
    assert!(told.recv_timeout(Duration::from_secs(20)).unwrap());
    TcpListener::bind(address).unwrap();
    agent.info().unwrap();
}

#[test]
fn agent_killed_resets_the_clients_at_once() {
    let mut fixture = Fixture::start();
    let port = server("127.0.0.1:0", |mut client| drop(client.read(&mut [0; 1])));
    let agent = fixture.agent();
    let forward = agent.forward(here(), port, |_| {}).unwrap();
    let mut client = client_of(&forward);
    wait_for("the connection", || forward.clients() == 1);
    thread::sleep(Duration::from_millis(100));
    fixture.kill();
    assert_eq!(client.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(agent.connect_tcp(port).is_err());
}
