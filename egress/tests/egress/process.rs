//! The gateway's process: what it has given up, and what it costs while nothing happens.

use std::time::{Duration, Instant};

use super::fixture::{Guest, Upstream};

/// Returns the processor time that the gateway uses in a second, in hundredths of it.
fn ticks_in_a_second(guest: &mut Guest) -> u64 {
    let (before, end) = (guest.gateway_ticks(), Instant::now() + Duration::from_secs(1));
    guest.until(|_| (Instant::now() >= end).then_some(()));
    guest.gateway_ticks() - before
}

#[test]
fn process_has_no_rights_that_it_does_not_need() {
    let mut guest = Guest::start(&[]);
    // An answer shows that the process has begun its work.
    guest.status();
    assert_eq!(guest.gateway_field("NoNewPrivs"), "1");
    assert_eq!(guest.gateway_field("Seccomp"), "2");
    assert_eq!(guest.gateway_field("Threads"), "1");
    for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
        assert_eq!(guest.gateway_field(set).trim_start_matches('0'), "", "{set}");
    }
    let limits = guest.gateway_file("limits");
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    // The limit itself and the most that it may be raised to.
    assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["0", "0"]);
}

#[test]
fn idle_connection_costs_no_processor_time() {
    let upstream = Upstream::silent();
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    let handle = guest.connect(upstream.address);
    assert!(guest.is_accepted(handle));
    let ticks = ticks_in_a_second(&mut guest);
    assert!(ticks < 10, "{ticks} hundredths of a second");
}

#[test]
fn guest_that_does_not_read_costs_no_processor_time() {
    static LONG: [u8; 2 << 20] = [7; 2 << 20];
    let upstream = Upstream::start(&LONG);
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    let handle = guest.connect(upstream.address);
    assert!(guest.is_accepted(handle));
    guest.socket(handle).send_slice(b"go").unwrap();
    let full = guest.until(|guest| {
        let socket = guest.socket(handle);
        (socket.recv_queue() == socket.recv_capacity()).then_some(())
    });
    assert_eq!(full, Some(()));
    let ticks = ticks_in_a_second(&mut guest);
    assert!(ticks < 10, "{ticks} hundredths of a second");
    assert!(guest.gateway_memory_kib() < 64 << 10);
}
