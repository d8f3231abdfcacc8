//! Host clients that are slow, silent or misbehaving.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use super::guest::{Guest, Ports, is_closed, pattern, read_rest};
use crate::virtio::vsock::mux::Limits;
use crate::virtio::vsock::wire::{MAX_PAYLOAD, Op, SHUTDOWN_BOTH};

/// Returns limits with deadlines that a test can wait for.
fn hasty() -> Limits {
    let half_open = Duration::from_millis(50);
    Limits { half_open, ..Limits::default() }
}

#[test]
fn e14_client_that_says_nothing_is_closed_at_the_deadline() {
    let mut guest = Guest::with_limits(hasty());
    let start = Instant::now();
    let mut client = guest.client("");
    guest.run_until(|_| is_closed(&mut client));
    assert!(start.elapsed() >= Duration::from_millis(50));
    guest.expect_silence();
}

#[test]
fn e14_client_that_dribbles_is_closed_at_the_deadline() {
    let mut guest = Guest::with_limits(hasty());
    let mut client = guest.client("");
    let start = Instant::now();
    for byte in b"CONNECT 1024".iter().cycle() {
        guest.run();
        if is_closed(&mut client) {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(2), "it dribbles on");
        let _ = client.write(&[*byte]);
        thread::sleep(Duration::from_millis(10));
    }
    guest.expect_silence();
}

#[test]
fn e14_client_whose_request_comes_in_pieces_is_served() {
    let mut guest = Guest::new();
    let mut client = guest.client("");
    for byte in b"CONNECT 1024\n" {
        guest.expect_silence();
        client.write_all(&[*byte]).unwrap();
    }
    assert_eq!(guest.expect(Op::Request).0.dst_port, 1024);
}

#[test]
fn e14_client_without_a_proper_request_is_closed_at_once() {
    let mut guest = Guest::new();
    let long = "x".repeat(1 << 20);
    let requests =
        ["\n", "CONNECT 4294967296\n", "CONNECT -1\n", "GET / HTTP/1.1\r\n", &long[..100]];
    for request in requests {
        let mut client = guest.client(request);
        guest.expect_silence();
        assert!(is_closed(&mut client), "{request:?}");
    }
}

#[test]
fn e14_client_with_a_megabyte_for_a_line_is_closed_and_never_read() {
    let mut guest = Guest::new();
    let mut client = guest.client("");
    let writer = thread::spawn(move || client.write_all(&vec![b'x'; 1 << 20]));
    let start = Instant::now();
    guest.run_until(|_| writer.is_finished());
    assert!(writer.join().unwrap().is_err());
    assert!(start.elapsed() < Limits::default().half_open, "only the deadline ended it");
    guest.expect_silence();
}

#[test]
fn e14_client_that_closes_early_leaves_nothing() {
    // There is room for one, so that a client left in the table keeps the next one out.
    let mut guest = Guest::with_limits(Limits { connections: 1, ..Limits::default() });
    for request in ["", "CONN", "CONNECT 1024"] {
        drop(guest.client(request));
        guest.expect_silence();
    }
    for request in ["CONNECT 1024\n", "CONNECT 1024\ndata"] {
        drop(guest.client(request));
        guest.expect(Op::Request);
        guest.expect(Op::Reset);
        guest.expect_silence();
    }
    // A client that leaves before the guest has answered.
    let client = guest.client("CONNECT 1024\n");
    let (request, _) = guest.expect(Op::Request);
    drop(client);
    guest.expect(Op::Reset);
    guest.send(Ports { host: request.src_port, guest: 1024 }, Op::Response);
    guest.expect(Op::Reset);
}

#[test]
fn client_whom_the_guest_never_answers_is_closed_at_the_deadline() {
    let mut guest = Guest::with_limits(hasty());
    let mut client = guest.client("CONNECT 1024\n");
    guest.expect(Op::Request);
    guest.run_until(|_| is_closed(&mut client));
    guest.expect(Op::Reset);
}

#[test]
fn client_of_a_guest_without_buffers_is_closed_at_the_deadline() {
    let mut guest = Guest::without_buffers(hasty());
    let mut client = guest.client("CONNECT 1024\n");
    guest.run_until(|_| is_closed(&mut client));
    // The guest was never notified of it.
    guest.post_all();
    guest.expect_silence();
}

#[test]
fn client_that_hangs_up_on_a_deaf_guest_is_forgotten_at_the_deadline() {
    let mut guest = Guest::with_limits(hasty());
    let (client, ports) = guest.connected_client();
    drop(client);
    assert_eq!(guest.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    guest.run_until(|guest| {
        guest.receive().is_some_and(|(header, _)| header.op == Op::Reset as u16)
    });
    guest.send_data(ports, b"late");
    guest.expect(Op::Reset);
}

#[test]
fn client_that_reads_after_the_guest_closed_gets_everything() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    let mut sent: Vec<u8> = Vec::new();
    // More than a socket buffer and less than a socket buffer and a window.
    for chunk in pattern(6 * MAX_PAYLOAD as usize).chunks(MAX_PAYLOAD as usize) {
        guest.send_data(ports, chunk);
        sent.extend(chunk);
    }
    guest.send_shutdown(ports, SHUTDOWN_BOTH);
    guest.run();
    let reader = thread::spawn(move || read_rest(&mut client));
    guest.run_until(|_| reader.is_finished());
    assert!(reader.join().unwrap() == sent);
}

#[test]
fn client_that_never_reads_what_the_guest_left_is_given_up() {
    let drain = Duration::from_millis(50);
    let mut guest = Guest::with_limits(Limits { drain, ..Limits::default() });
    let (mut client, ports) = guest.connected_client();
    client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let sent = pattern(6 * MAX_PAYLOAD as usize);
    sent.chunks(MAX_PAYLOAD as usize).for_each(|chunk| guest.send_data(ports, chunk));
    guest.send_shutdown(ports, SHUTDOWN_BOTH);
    let start = Instant::now();
    guest.run_until(|_| start.elapsed() > 4 * drain);
    // Only what the socket had accepted by then arrives.
    assert!(read_rest(&mut client).len() < sent.len());
}

#[test]
fn socket_that_somebody_listens_on_is_refused_and_a_dead_one_replaced() {
    use crate::virtio::vsock::{Vsock, VsockConfig, VsockError};
    let dir = tempfile::tempdir().unwrap();
    let config = VsockConfig {
        guest_cid: 3,
        uds_path: dir.path().join("vsock"),
        keep_socket: false,
        dial_path: None,
    };
    let first = Vsock::open(&config).unwrap();
    assert!(matches!(Vsock::open(&config), Err(VsockError::InUse { .. })));
    drop(first);
    assert!(!config.uds_path.exists());
    drop(std::os::unix::net::UnixListener::bind(&config.uds_path).unwrap());
    assert!(config.uds_path.exists());
    drop(Vsock::open(&config).unwrap());
    drop(Vsock::open(&VsockConfig { keep_socket: true, ..config.clone() }).unwrap());
    assert!(config.uds_path.exists());
    std::fs::remove_file(&config.uds_path).unwrap();
    std::fs::write(&config.uds_path, "precious").unwrap();
    assert!(matches!(Vsock::open(&config), Err(VsockError::Bind { .. })));
    assert_eq!(std::fs::read(&config.uds_path).unwrap(), b"precious");
}

#[test]
fn socket_bound_by_somebody_else_is_used_and_left() {
    use crate::virtio::testing::MockDriver;
    use crate::virtio::vsock::{Vsock, VsockConfig};
    let dir = tempfile::tempdir().unwrap();
    let config = VsockConfig {
        guest_cid: 3,
        uds_path: dir.path().join("vsock"),
        keep_socket: false,
        dial_path: None,
    };
    let listener = std::os::unix::net::UnixListener::bind(&config.uds_path).unwrap();
    let driver = MockDriver::ready(Vsock::from_listener(&config, listener).unwrap());
    let mut client = UnixStream::connect(&config.uds_path).unwrap();
    client.write_all(b"nonsense\n").unwrap();
    driver.run();
    assert!(is_closed(&mut client));
    drop(driver);
    assert!(config.uds_path.exists());
}
