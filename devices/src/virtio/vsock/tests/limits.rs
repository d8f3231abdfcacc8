//! Floods, starvation and false claims: everything that grows is bounded, every wait has a
//! deadline, and an idle device does not spin.

use std::io::Write;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::guest::{CID, EVENT, GUEST_WINDOW, Guest, Ports, RX, is_closed, pattern};
use crate::virtio::chain::Segment;
use crate::virtio::testing::memory;
use crate::virtio::vsock::mux::{FIRST_HOST_PORT, Limits, Mux};
use crate::virtio::vsock::testing::ScriptedHost;
use crate::virtio::vsock::wire::{HEADER_LEN, HOST_CID, Header, Op, TYPE_STREAM};

/// Returns limits that a test can reach, and deadlines that it can wait for even on a busy machine.
fn small() -> Limits {
    let half_open = Duration::from_millis(500);
    Limits { connections: 8, resets: 16, half_open, ..Limits::default() }
}

#[test]
fn e5_request_flood_is_capped_and_reset() {
    let mut guest = Guest::with_limits(small());
    let _listener = guest.listen(1025);
    let (mut responses, mut resets) = (0, 0);
    for port in 0..1000 {
        guest.send(Ports { host: 1025, guest: port }, Op::Request);
        guest.run();
        while let Some((header, _)) = guest.receive() {
            responses += usize::from(header.op == Op::Response as u16);
            resets += usize::from(header.op == Op::Reset as u16);
        }
    }
    assert_eq!((responses, resets), (8, 992));
}

#[test]
fn e5_half_open_flood_without_buffers_is_capped_and_expires() {
    let mut guest = Guest::without_buffers(small());
    let listener = guest.listen(1025);
    listener.set_nonblocking(true).unwrap();
    for port in 0..200 {
        guest.send(Ports { host: 1025, guest: port }, Op::Request);
        guest.run();
    }
    let mut accepted: Vec<_> = std::iter::from_fn(|| listener.accept().ok()).collect();
    assert_eq!(accepted.len(), 8);
    guest.run_until(|_| accepted.iter_mut().all(|(stream, _)| is_closed(stream)));
}

#[test]
fn client_flood_beyond_the_cap_is_turned_away() {
    let guest = Guest::with_limits(small());
    let mut clients: Vec<_> = (0..20).map(|_| guest.client("")).collect();
    guest.run();
    let closed = clients.iter_mut().filter_map(|client| is_closed(client).then_some(())).count();
    assert_eq!(closed, 12);
}

#[test]
fn e8_guest_that_claims_bytes_never_sent_is_starved_and_reset_at_the_deadline() {
    let mut guest = Guest::with_limits(small());
    let (mut client, ports) = guest.connected_client();
    guest.send_credit(ports, 1000);
    client.write_all(b"for an honest guest").unwrap();
    guest.expect_silence();
    guest.run_until(|guest| {
        guest.receive().is_some_and(|(header, _)| header.op == Op::Reset as u16)
    });
    assert!(is_closed(&mut client));
}

#[test]
fn e8_guest_that_corrects_itself_in_time_goes_on() {
    let mut guest = Guest::with_limits(small());
    let (mut client, ports) = guest.connected_client();
    guest.send_credit(ports, 1000);
    client.write_all(b"patience").unwrap();
    guest.expect_silence();
    guest.send_credit(ports, 0);
    assert_eq!(guest.expect(Op::Data).1, b"patience");
    std::thread::sleep(Duration::from_millis(600));
    guest.expect_silence();
}

#[test]
fn e8_guest_that_shrinks_its_buffer_gets_nothing_until_there_is_room() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    let header = guest.header(ports, Op::CreditUpdate, 0);
    client.write_all(&[1; 100]).unwrap();
    guest.expect(Op::Data);
    guest.send_raw(&Header { buf_alloc: 10, ..header }, &[]);
    client.write_all(&[2; 100]).unwrap();
    guest.expect(Op::CreditRequest);
    guest.expect_silence();
    guest.send_raw(&Header { buf_alloc: 10, fwd_cnt: 100, ..header }, &[]);
    assert_eq!(guest.expect(Op::Data).1, [2; 10]);
}

#[test]
fn e9_guest_that_never_reads_stops_the_host_writer_and_nothing_else() {
    let mut guest = Guest::new();
    let (mut client, _) = guest.connected_client();
    client.set_nonblocking(true).unwrap();
    let chunk = pattern(1 << 16);
    let mut taken = 0;
    // Alternates until neither the writer nor the device can move.
    loop {
        let wrote = client.write(&chunk).unwrap_or(0);
        taken += wrote;
        guest.run();
        let mut moved = wrote > 0;
        while let Some((header, _)) = guest.receive() {
            moved |= header.op == Op::Data as u16;
        }
        if !moved {
            break;
        }
    }
    assert!(taken < 4 * GUEST_WINDOW as usize + (1 << 20));
    // Other connections are served as before.
    guest.connected_client();
}

#[test]
fn e11_reset_storm_without_buffers_is_bounded_and_ends_in_a_fresh_start() {
    let mut guest = Guest::without_buffers(small());
    guest.post_event();
    let storm = |guest: &mut Guest, ports: std::ops::Range<u32>| {
        for port in ports {
            guest.send(Ports { host: 99, guest: port }, Op::Data);
        }
        guest.run();
    };
    storm(&mut guest, 0..40);
    // Sixteen resets are owed, and the packets behind them wait.
    assert_eq!(guest.driver.used_index(1), 16);
    guest.run_until(|guest| guest.driver.used_index(EVENT) == 1);
    // The guest was sent a transport reset; its packets are taken again.
    guest.run_until(|guest| guest.driver.used_index(1) >= 32);
}

#[test]
fn e11_reset_storm_with_slow_buffers_loses_no_reset() {
    let mut guest = Guest::without_buffers(Limits { resets: 16, ..Limits::default() });
    for port in 0..40 {
        guest.send(Ports { host: 99, guest: port }, Op::Data);
    }
    let mut ports = Vec::new();
    for _ in 0..40 {
        guest.run();
        guest.post();
        guest.run();
        ports.push(guest.receive_once().unwrap().0.dst_port);
    }
    assert_eq!(ports, (0..40).collect::<Vec<_>>());
}

#[test]
fn e12_request_for_a_port_without_listener_is_reset() {
    let mut guest = Guest::new();
    for port in [0, 1025, u32::MAX] {
        guest.send(Ports { host: port, guest: 7000 }, Op::Request);
        let (reset, _) = guest.expect(Op::Reset);
        assert_eq!((reset.src_port, reset.dst_port), (port, 7000));
    }
}

#[test]
fn e16_host_bytes_for_a_guest_without_buffers_do_not_spin() {
    let mut guest = Guest::without_buffers(Limits::default());
    guest.post();
    let mut client = guest.client("CONNECT 1024\n");
    guest.run();
    let (request, _) = guest.receive_once().unwrap();
    guest.send(Ports { host: request.src_port, guest: 1024 }, Op::Response);
    guest.run();
    super::guest::read_line(&mut client);
    client.write_all(b"waiting").unwrap();
    guest.run();
    assert_eq!(guest.driver.devices.run(100), 0);
    assert!(guest.driver.is_kick_wanted(RX), "would not hear of the next buffer");
    // Not even by a hang-up, which an event loop always reports.
    drop(client);
    guest.run();
    assert_eq!(guest.driver.devices.run(100), 0);
    guest.post();
    guest.run();
    assert_eq!(guest.receive_once().unwrap().1, b"waiting");
    guest.post();
    guest.run();
    assert_eq!(guest.receive_once().unwrap().0.op, Op::Shutdown as u16);
}

#[test]
fn e16_host_bytes_for_a_guest_without_credit_do_not_spin() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.send_raw(&Header { buf_alloc: 0, ..guest.header(ports, Op::CreditUpdate, 0) }, &[]);
    client.write_all(b"waiting").unwrap();
    guest.expect(Op::CreditRequest);
    drop(client);
    guest.expect_silence();
    assert_eq!(guest.driver.devices.run(100), 0);
    guest.send_credit(ports, 0);
    assert_eq!(guest.expect(Op::Data).1, b"waiting");
    guest.expect(Op::Shutdown);
}

#[test]
fn idle_device_with_open_connections_never_wakes_up() {
    let mut guest = Guest::new();
    let (_client, _) = guest.connected_client();
    guest.run();
    // A deadline that was met may cause one wake-up; then the device is idle.
    std::thread::sleep(Duration::from_millis(2100));
    guest.driver.devices.run(100);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(guest.driver.devices.run(100), 0);
}

#[test]
fn burst_for_one_connection_does_not_starve_another() {
    let mut guest = Guest::without_buffers(Limits::default());
    guest.post_all();
    let (mut loud, _) = guest.connected_client();
    let (mut quiet, ports) = guest.connected_client();
    loud.write_all(&pattern(60_000)).unwrap();
    quiet.write_all(b"psst").unwrap();
    guest.run();
    let packets: Vec<_> = std::iter::from_fn(|| guest.receive()).collect();
    let heard = packets.iter().position(|(header, _)| header.src_port == ports.host).unwrap();
    assert!(heard <= 16, "heard after {heard} packets");
}

#[test]
fn e5_hundred_thousand_requests_at_once_leave_only_the_capped_ones() {
    let limits = Limits::default();
    let (mut host, now) = (ScriptedHost::default(), Instant::now());
    host.serve(1025);
    let mut mux = Mux::new(CID, host, FIRST_HOST_PORT, limits);
    let memory = memory();
    let packet = Segment { address: GuestAddress(0x2000), len: HEADER_LEN as u32 };
    let mut taken = 0;
    for src_port in 0..100_000 {
        let header = Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port,
            dst_port: 1025,
            kind: TYPE_STREAM,
            op: Op::Request as u16,
            ..Header::default()
        };
        memory.write_slice(&header.encode(), packet.address).unwrap();
        if mux.can_take_packet() {
            mux.take_packet(now, &memory, &[packet]);
            taken += 1;
        }
    }
    assert_eq!((mux.len(), taken), (limits.connections, limits.connections + limits.resets));
    // None of them is answered, so all are gone at the deadline.
    mux.serve_host(now + limits.half_open);
    assert_eq!(mux.len(), 0);
}

#[test]
fn reads_of_a_full_stream_grow_and_of_a_quiet_one_shrink() {
    let (mut host, now) = (ScriptedHost::default(), Instant::now());
    let client = host.client(b"CONNECT 1\n");
    let mut mux = Mux::new(CID, host, FIRST_HOST_PORT, Limits::default());
    let (memory, mut filled) = (memory(), Vec::new());
    let buffer = [Segment { address: GuestAddress(0x2000), len: HEADER_LEN as u32 + 10 }];
    let mut fill = |mux: &mut Mux<ScriptedHost>| {
        let wanted = mux.buffers_wanted();
        mux.fill(now, &memory, &vec![&buffer[..]; wanted], &mut filled);
        std::mem::take(&mut filled).len()
    };
    mux.note_clients();
    mux.serve_host(now);
    mux.serve_host(now);
    assert_eq!(fill(&mut mux), 1);
    let response = Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 1,
        dst_port: FIRST_HOST_PORT,
        kind: TYPE_STREAM,
        op: Op::Response as u16,
        buf_alloc: 1 << 20,
        ..Header::default()
    };
    let packet = Segment { address: GuestAddress(0x3000), len: HEADER_LEN as u32 };
    memory.write_slice(&response.encode(), packet.address).unwrap();
    mux.take_packet(now, &memory, &[packet]);
    client.write(10 * (1 + 2 + 4 + 8 + 16 + 16 + 3));
    let reads: Vec<usize> = (0..7).map(|_| fill(&mut mux)).collect();
    assert_eq!(reads, [1, 2, 4, 8, 16, 16, 3]);
    assert_eq!(mux.buffers_wanted(), 0);
}
