//! Pause, snapshot, restore, reset: connections go, listeners stay, nothing is lost or left
//! waiting.

use std::io::{Read, Write};
use std::sync::atomic::Ordering;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::guest::{CID, EVENT, Guest, Ports, is_closed, open, read_rest};
use crate::virtio::registry::DeviceState;
use crate::virtio::testing::Racer;
use crate::virtio::vsock::VsockStateV1;
use crate::virtio::vsock::mux::{FIRST_HOST_PORT, LAST_HOST_PORT, Limits};
use crate::virtio::vsock::state::OwedReset;
use crate::virtio::vsock::wire::Op;

const DIAL: Ports = Ports { host: 1025, guest: 7000 };

fn state() -> VsockStateV1 {
    VsockStateV1 {
        guest_cid: CID,
        next_host_port: FIRST_HOST_PORT,
        owed_resets: Vec::new(),
        connected: false,
    }
}

#[test]
fn e15_restored_guest_hears_the_transport_reset_before_anything_else() {
    let mut guest = Guest::new();
    guest.post_event();
    guest.post_event();
    let (mut client, ports) = guest.connected_client();
    client.write_all(b"in flight").unwrap();
    guest.send_data(ports, b"in flight too");
    let mut copy = guest.restored();
    let _new_client = copy.client("CONNECT 1024\n");
    copy.run();
    // The event was sent, but nothing else is until the guest has acted and offers its event buffer
    // again.
    let event = copy.driver.used(EVENT).unwrap();
    assert_eq!(event.len, 4);
    copy.expect_silence();
    copy.post_event();
    // The packet in the ring is from a connection that no longer exists.
    let (reset, _) = copy.expect(Op::Reset);
    assert_eq!((reset.src_port, reset.dst_port), (ports.host, ports.guest));
    let (request, _) = copy.expect(Op::Request);
    assert_eq!(request.src_port, ports.host + 1, "ports go on where they stood");
}

#[test]
fn e15_restored_guest_that_never_answers_the_event_is_not_waited_for_long() {
    let mut guest = Guest::new();
    guest.post_event();
    let _remembered = guest.connected_client();
    let mut copy = guest.restored();
    let _client = copy.client("CONNECT 1024\n");
    copy.expect_silence();
    copy.run_until(|guest| {
        guest.receive().is_some_and(|(header, _)| header.op == Op::Request as u16)
    });
}

#[test]
fn e15_restored_guest_that_answers_the_event_at_once_is_reached_at_once() {
    let mut guest = Guest::new();
    guest.post_event();
    // All slots of the ring name the one buffer, so that another thread only has to move the index.
    let rings = [guest.driver.available_ring(EVENT), guest.driver.used_ring(EVENT)];
    let [offered, used] = rings.map(|ring| GuestAddress(ring.0 + 2));
    let memory = guest.driver.memory.clone();
    let slot = |index: u64| GuestAddress(offered.0 + 2 + 2 * index);
    let head: u16 = memory.read_obj(slot(0)).unwrap();
    (0..64).for_each(|index| memory.write_obj(head, slot(index)).unwrap());
    let index = {
        let memory = memory.clone();
        move |at| memory.load::<u16>(at, Ordering::Acquire).unwrap()
    };
    let asked = index.clone();
    let _vcpu = Racer::spawn(move || {
        memory.store(asked(used) + 1, offered, Ordering::Release).unwrap();
    });
    let mut remembered = guest.connected_client();
    for _ in 0..100 {
        guest = guest.restored();
        guest.run();
        while index(offered) != index(used) + 1 {
            std::thread::yield_now();
        }
        guest.driver.kick(EVENT);
        remembered = guest.connected_client();
    }
    drop(remembered);
}

#[test]
fn restored_guest_that_remembers_nothing_is_reached_at_once() {
    let mut guest = Guest::new();
    guest.post_event();
    let (client, ports) = guest.connected_client();
    drop(client);
    guest.expect(Op::Shutdown);
    guest.send(ports, Op::Reset);
    guest.run();
    let mut copy = guest.restored();
    let _client = copy.client("CONNECT 1024\n");
    copy.expect(Op::Request);
    assert!(copy.driver.used(EVENT).is_none());
}

#[test]
fn restored_guest_that_has_not_answered_yet_is_told_again_when_it_is_restored_again() {
    let mut guest = Guest::new();
    guest.post_event();
    guest.post_event();
    let _remembered = guest.connected_client();
    let mut copy = guest.restored();
    copy.run();
    assert_eq!(copy.driver.used(EVENT).unwrap().len, 4);
    let mut again = copy.restored();
    again.run();
    assert_eq!(again.driver.used(EVENT).unwrap().len, 4);
}

#[test]
fn restored_guest_with_another_address_is_told() {
    let device = open(&tempfile::tempdir().unwrap(), Limits::default());
    assert!(!device.restore(&state()).unwrap().out_of_date);
    let device = open(&tempfile::tempdir().unwrap(), Limits::default());
    assert!(device.restore(&VsockStateV1 { guest_cid: CID + 1, ..state() }).unwrap().out_of_date);
}

#[test]
fn e15_restored_guest_that_was_connecting_is_reset() {
    let mut guest = Guest::without_buffers(Limits::default());
    guest.post_event();
    let _listener = guest.listen(DIAL.host);
    guest.send(DIAL, Op::Request);
    guest.run();
    let mut copy = guest.restored();
    copy.post_all();
    copy.run();
    copy.post_event();
    let (reset, _) = copy.expect(Op::Reset);
    assert_eq!((reset.src_port, reset.dst_port), (DIAL.host, DIAL.guest));
    copy.expect_silence();
}

#[test]
fn e15_connect_storm_after_restore_is_answered_in_full() {
    let mut guest = Guest::new();
    guest.post_event();
    let mut copy = guest.restored();
    let clients: Vec<_> = (0..100).map(|_| copy.client("CONNECT 1024\n")).collect();
    copy.run();
    copy.post_event();
    let mut answered = 0;
    copy.run_until(|guest| {
        while let Some((header, _)) = guest.receive() {
            assert_eq!(header.op, Op::Request as u16);
            guest.send(Ports { host: header.src_port, guest: header.dst_port }, Op::Response);
            guest.run();
            answered += 1;
        }
        answered == clients.len()
    });
    for mut client in clients {
        assert!(super::guest::read_line(&mut client).starts_with("OK "));
    }
}

#[test]
fn e15_hundred_restores_in_a_row_each_serve_the_next_client() {
    let mut guest = Guest::new();
    guest.post_event();
    for round in 0..100 {
        // Restored with bytes in flight in both directions.
        let (mut client, ports) = guest.connected_client();
        client.write_all(b"in flight").unwrap();
        guest.send_data(ports, b"in flight too");
        guest = guest.restored();
        guest.run();
        assert_eq!(guest.driver.used(EVENT).unwrap().len, 4, "round {round}");
        guest.post_event();
        guest.expect(Op::Reset);
    }
    let (mut client, ports) = guest.connected_client();
    assert_eq!(ports.host, FIRST_HOST_PORT + 100);
    client.write_all(b"still here").unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"still here");
}

#[test]
fn source_of_a_snapshot_keeps_its_connections() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.driver.devices.handle().quiesce_all().unwrap();
    guest.driver.transport.save().unwrap();
    client.write_all(b"while quiet").unwrap();
    guest.send_data(ports, b"from the ring");
    guest.expect_silence();
    guest.driver.devices.handle().resume_all().unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"while quiet");
    let mut heard = [0; 13];
    client.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"from the ring");
}

#[test]
fn quiet_device_neither_spins_nor_loses_a_client() {
    let mut guest =
        Guest::with_limits(Limits { half_open: Duration::from_millis(500), ..Limits::default() });
    let mut waiting = guest.client("CONNECT 1024\n");
    let (request, _) = guest.expect(Op::Request);
    guest.driver.devices.handle().quiesce_all().unwrap();
    let _client = guest.client("CONNECT 1024\n");
    guest.run();
    assert_eq!(guest.driver.devices.run(100), 0);
    // A pause longer than the deadline ends no connection.
    std::thread::sleep(Duration::from_millis(600));
    guest.driver.devices.handle().resume_all().unwrap();
    guest.expect(Op::Request);
    assert!(!is_closed(&mut waiting));
    guest.send(Ports { host: request.src_port, guest: 1024 }, Op::Response);
    guest.run();
    super::guest::read_line(&mut waiting);
}

#[test]
fn device_reset_closes_connections_and_keeps_the_listener() {
    let mut guest = Guest::new();
    let (mut client, _) = guest.connected_client();
    guest.driver.reset();
    assert_eq!(read_rest(&mut client), b"");
    // A client that connects before the next driver is ready waits for it.
    let _early = guest.client("CONNECT 1024\n");
    guest.driver.start();
    guest.reset_buffers();
    guest.post_all();
    let (request, _) = guest.expect(Op::Request);
    assert_eq!(request.src_port, FIRST_HOST_PORT + 1);
}

#[test]
fn device_dropped_while_active_removes_its_socket() {
    let guest = Guest::new();
    let path = guest.uds();
    assert!(path.exists());
    let Guest { driver, dir, .. } = guest;
    drop(driver);
    assert!(!path.exists());
    drop(dir);
}

#[test]
fn state_of_an_active_device_round_trips() {
    let mut guest = Guest::new();
    guest.connected_client();
    let saved = guest.driver.suspend().state;
    let next_host_port = FIRST_HOST_PORT + 1;
    assert_eq!(
        saved.device,
        DeviceState::Vsock(VsockStateV1 { next_host_port, connected: true, ..state() })
    );
}

#[test]
fn state_with_impossible_values_is_refused() {
    state().validate().unwrap();
    let reset = OwedReset { host_port: 1, guest_port: 2, kind: 1 };
    let wrong = [
        VsockStateV1 { guest_cid: 2, ..state() },
        VsockStateV1 { next_host_port: 0, ..state() },
        VsockStateV1 { next_host_port: LAST_HOST_PORT, ..state() },
        VsockStateV1 { owed_resets: vec![reset; 1 << 20], ..state() },
    ];
    for state in wrong {
        assert!(state.validate().is_err(), "{:?}", state.guest_cid);
    }
}
