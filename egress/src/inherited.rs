//! Connections that were open in the VM that the guest was copied from, and their end in the guest.
//!
//! The guest's kernel believes in them, and this gateway has never seen them. One that the guest
//! sends on is reset like any unknown one. For the others the gateway asks: a probe makes the
//! guest's kernel send an acknowledgement, and that is reset; a kernel without the connection
//! answers with a reset of its own, and only that ends the asking. Any of these may be lost: the
//! guest may not run yet, or is just getting the hardware address of its own.

use std::time::{Duration, Instant};

use crate::connection::ConnectionKey;
use crate::connections::CONNECTIONS_MAX;
use crate::frame::Ends;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long the guest is asked.
const PERIOD: Duration = Duration::from_secs(60);
// Probes of one turn, so that they leave room for answers to the guest.
const TURN_PROBES: usize = 64;
/// The step between the sequence numbers of one connection's probes: of any four at most one is in
/// the guest's window, where it would not be answered.
const SEQUENCE_STEP: i32 = 1 << 30;

/// The inherited connections that the guest may still have.
#[derive(Debug)]
pub struct Inherited {
    probes: Vec<Probe>,
    until: Instant,
}

#[derive(Debug)]
struct Probe {
    key: ConnectionKey,
    sequence: i32,
    next: Instant,
    pause: Duration,
}

impl Inherited {
    /// Takes a list that may come from a file of others: what cannot be a connection is left out,
    /// and so is what exceeds the number of connections that a guest can have.
    pub fn new(keys: Vec<ConnectionKey>, ends: &Ends, now: Instant) -> Self {
        let mut probes: Vec<Probe> = Vec::new();
        for key in keys {
            let known = probes.iter().any(|probe| probe.key == key);
            if probes.len() < CONNECTIONS_MAX && can_be(&key, ends) && !known {
                probes.push(Probe { key, sequence: 0, next: now, pause: FIRST_PAUSE });
            }
        }
        Self { probes, until: now + PERIOD }
    }

    pub fn keys(&self) -> impl Iterator<Item = &ConnectionKey> {
        self.probes.iter().map(|probe| &probe.key)
    }

    /// Notes that the guest has no such connection.
    pub fn gone(&mut self, key: &ConnectionKey) {
        self.probes.retain(|probe| probe.key != *key);
    }

    /// Returns the time of the next probe.
    pub fn deadline(&self) -> Option<Instant> {
        self.probes.iter().map(|probe| probe.next).min()
    }

    /// Returns the probes that are to be sent now, each with its sequence number. A connection that
    /// the guest has opened anew is none of them.
    pub fn due(
        &mut self,
        is_live: impl Fn(&ConnectionKey) -> bool,
        now: Instant,
    ) -> Vec<(ConnectionKey, i32)> {
        if now >= self.until {
            self.probes.clear();
        }
        self.probes.retain(|probe| !is_live(&probe.key));
        let due = self.probes.iter_mut().filter(|probe| probe.next <= now).take(TURN_PROBES);
        let send = |probe: &mut Probe| {
            let sequence = probe.sequence;
            probe.sequence = sequence.wrapping_add(SEQUENCE_STEP);
            probe.next = now + probe.pause;
            probe.pause = (probe.pause * 2).min(PAUSE_MAX);
            (probe.key, sequence)
        };
        due.map(send).collect()
    }
}

/// Returns whether a guest can have such a connection through its gateway.
fn can_be(key: &ConnectionKey, ends: &Ends) -> bool {
    let (to, port) = (key.destination.ip(), key.destination.port());
    let of_the_link = *to == ends.guest_ip || *to == ends.gateway_ip;
    let one_host = !to.is_unspecified() && !to.is_multicast() && !to.is_broadcast();
    key.guest_port != 0 && port != 0 && one_host && !of_the_link
}

#[cfg(test)]
mod tests {
    use smoltcp::wire::EthernetAddress;

    use super::*;

    const ENDS: Ends = Ends {
        guest_mac: None,
        guest_ip: std::net::Ipv4Addr::new(10, 0, 2, 15),
        gateway_mac: EthernetAddress([2, 0, 0, 0, 0, 1]),
        gateway_ip: std::net::Ipv4Addr::new(10, 0, 2, 1),
    };

    fn key(text: &str) -> ConnectionKey {
        text.parse().unwrap()
    }

    fn keys(count: usize) -> Vec<ConnectionKey> {
        (0..count).map(|number| key(&format!("{}=1.1.1.1:80", 1000 + number))).collect()
    }

    fn due(inherited: &mut Inherited, now: Instant) -> usize {
        inherited.due(|_| false, now).len()
    }

    #[test]
    fn probe_is_repeated_with_growing_pauses_and_for_a_bounded_time() {
        let begun = Instant::now();
        let mut inherited = Inherited::new(keys(1), &ENDS, begun);
        let mut times = Vec::new();
        while let Some(next) = inherited.deadline() {
            if due(&mut inherited, next) == 1 {
                times.push(next - begun);
            }
        }
        assert_eq!(times[..4], [0, 50, 150, 350].map(Duration::from_millis));
        assert!(times.len() < 70 && times.iter().all(|time| *time < PERIOD), "{times:?}");
        assert!(times.last().is_some_and(|last| *last + PAUSE_MAX * 2 > PERIOD));
    }

    #[test]
    fn probe_ends_when_the_connection_is_gone() {
        let now = Instant::now();
        let mut inherited = Inherited::new(keys(2), &ENDS, now);
        assert_eq!(due(&mut inherited, now), 2);
        inherited.gone(&keys(1)[0]);
        assert_eq!(inherited.due(|_| false, now + PAUSE_MAX)[0].0, keys(2)[1]);
        inherited.gone(&keys(2)[1]);
        assert_eq!((inherited.deadline(), due(&mut inherited, now + PAUSE_MAX * 2)), (None, 0));
    }

    #[test]
    fn connection_that_the_guest_opens_anew_is_not_probed() {
        let now = Instant::now();
        let mut inherited = Inherited::new(keys(2), &ENDS, now);
        let live = keys(1)[0];
        let probes = inherited.due(|key| *key == live, now);
        assert_eq!(probes.iter().map(|probe| probe.0).collect::<Vec<_>>(), [keys(2)[1]]);
        assert!(inherited.keys().all(|key| *key != live));
    }

    #[test]
    fn list_of_a_file_is_bounded_and_what_cannot_be_is_left_out() {
        let now = Instant::now();
        let mut inherited = Inherited::new(keys(5000), &ENDS, now);
        assert_eq!(inherited.keys().count(), CONNECTIONS_MAX);
        // Each turn sends some of them, until all were sent.
        let turns: Vec<_> = (0..9).map(|_| due(&mut inherited, now)).collect();
        assert_eq!(turns, [64, 64, 64, 64, 64, 64, 64, 64, 0]);
        let wrong = ["0=1.1.1.1:80", "1=1.1.1.1:0", "1=10.0.2.1:53", "1=10.0.2.15:80"];
        let wrong =
            wrong.into_iter().chain(["1=224.0.0.1:80", "1=255.255.255.255:1", "1=0.0.0.0:1"]);
        let wrong: Vec<_> = wrong.map(key).collect();
        assert_eq!(Inherited::new(wrong, &ENDS, now).deadline(), None);
        assert_eq!(Inherited::new(keys(1).repeat(3), &ENDS, now).keys().count(), 1);
    }

    #[test]
    fn sequence_numbers_of_one_connection_differ_widely() {
        let mut now = Instant::now();
        let mut inherited = Inherited::new(keys(1), &ENDS, now);
        let mut sent = Vec::new();
        for _ in 0..4 {
            sent.extend(inherited.due(|_| false, now).into_iter().map(|probe| probe.1));
            now += PAUSE_MAX;
        }
        assert_eq!(sent, [0, 1 << 30, i32::MIN, -(1 << 30)]);
    }
}
