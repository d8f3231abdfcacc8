//! Associations to servers on loopback, under a clock of the test's own.

use std::net::SocketAddrV4;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// A table, its poller, and a server that answers when it is told to.
struct Bench {
    table: Associations,
    poller: Poller,
    server: UdpSocket,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let (table, poller) = (Associations::default(), Poller::new().unwrap());
        Self { table, poller, server, now: Instant::now() }
    }

    fn key(&self, guest_port: u16) -> ConnectionKey {
        let SocketAddr::V4(destination) = self.server.local_addr().unwrap() else { panic!("IPv6") };
        ConnectionKey { guest_port, destination }
    }

    fn open(&mut self, guest_port: u16) -> ConnectionKey {
        let (key, basis) = (self.key(guest_port), Basis::Address { rule: "all".into() });
        self.table.open(key, basis, &self.poller, self.now).unwrap();
        key
    }

    fn send(&mut self, key: &ConnectionKey) -> Option<Sent> {
        self.table.send(key, b"ping", self.now).map(|(sent, _)| sent)
    }

    /// Waits for the next thing for the guest.
    fn receive(&mut self) -> (u16, Incoming) {
        let mut buffer = [0; PAYLOAD_MAX + 1];
        loop {
            if let Some((association, incoming)) =
                self.table.receive(&mut buffer, &self.poller, self.now)
            {
                return (association.key.guest_port, incoming);
            }
            let ready = self.poller.wait(Some(PATIENCE)).unwrap();
            assert!(!ready.is_empty(), "nothing arrives");
            for ready in ready {
                let Token::Association(number) = ready.token else { panic!("{ready:?}") };
                self.table.note(number);
            }
        }
    }

    /// Waits for a datagram at the server and returns the host's end of its association.
    fn heard(&self) -> SocketAddr {
        self.server.recv_from(&mut [0; 64]).unwrap().1
    }
}

#[test]
fn association_that_is_idle_expires_and_one_in_use_stays() {
    let mut bench = Bench::new();
    let (idle, used) = (bench.open(1), bench.open(2));
    bench.now += IDLE / 2;
    assert_eq!(bench.send(&used), Some(Sent::Done));
    bench.now += IDLE / 2;
    assert_eq!(bench.table.deadline(), Some(bench.now));
    bench.table.expire(bench.now);
    assert_eq!((bench.table.contains(&idle), bench.table.contains(&used)), (false, true));
    bench.now += IDLE / 2;
    bench.table.expire(bench.now);
    assert_eq!((bench.table.count(), bench.table.deadline()), (0, None));
}

#[test]
fn answer_keeps_its_association() {
    let mut bench = Bench::new();
    let key = bench.open(1);
    bench.send(&key);
    bench.now += IDLE - Duration::from_secs(1);
    bench.server.send_to(b"pong", bench.heard()).unwrap();
    assert_eq!(bench.receive(), (1, Incoming::Datagram(4)));
    bench.now += IDLE - Duration::from_secs(1);
    bench.table.expire(bench.now);
    assert!(bench.table.contains(&key));
}

#[test]
fn full_table_gives_the_place_of_the_least_used_to_a_new_one() {
    let mut bench = Bench::new();
    for port in 1..=ASSOCIATIONS_MAX as u16 {
        bench.now += Duration::from_millis(1);
        bench.open(port);
    }
    bench.now += Duration::from_millis(1);
    bench.send(&bench.key(1));
    let new = bench.open(1000);
    assert_eq!(bench.table.count(), ASSOCIATIONS_MAX);
    assert!(bench.table.contains(&bench.key(1)) && bench.table.contains(&new));
    assert!(!bench.table.contains(&bench.key(2)), "the one used longest ago");
    assert_eq!(bench.send(&bench.key(2)), None);
}

#[test]
fn association_takes_nothing_of_another_sender() {
    let mut bench = Bench::new();
    let key = bench.open(1);
    bench.send(&key);
    let far = bench.heard();
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    for _ in 0..3 {
        // The kernel may tell the sender that nobody listens.
        let _ = other.send_to(b"forged", far);
    }
    bench.server.send_to(b"pong", far).unwrap();
    assert_eq!(bench.receive(), (1, Incoming::Datagram(4)));
    let mut buffer = [0; PAYLOAD_MAX + 1];
    assert!(bench.table.receive(&mut buffer, &bench.poller, bench.now).is_none());
}

#[test]
fn datagram_that_the_guest_cannot_take_is_lost_and_the_next_arrives() {
    let mut bench = Bench::new();
    let key = bench.open(1);
    bench.send(&key);
    let far = bench.heard();
    for len in [PAYLOAD_MAX + 1, 9000, PAYLOAD_MAX, 0] {
        bench.server.send_to(&vec![7; len], far).unwrap();
    }
    let received: Vec<_> = (0..4).map(|_| bench.receive().1).collect();
    let [longest, empty] = [PAYLOAD_MAX, 0].map(Incoming::Datagram);
    assert_eq!(received, [Incoming::Lost, Incoming::Lost, longest, empty]);
}

#[test]
fn associations_have_turns() {
    let mut bench = Bench::new();
    let (busy, quiet) = (bench.open(1), bench.open(2));
    bench.send(&busy);
    let far = bench.heard();
    (0..10).for_each(|_| drop(bench.server.send_to(b"much", far)));
    bench.send(&quiet);
    bench.server.send_to(b"pong", bench.heard()).unwrap();
    assert!((0..3).any(|_| bench.receive().0 == 2), "the quiet one waits for the busy one");
}

#[test]
fn port_where_nobody_listens_is_refused() {
    let mut bench = Bench::new();
    let closed: SocketAddrV4 = {
        let SocketAddr::V4(address) = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
        else {
            panic!("IPv6")
        };
        address
    };
    let key = ConnectionKey { guest_port: 9, destination: closed };
    let basis = Basis::Address { rule: "all".into() };
    bench.table.open(key, basis, &bench.poller, bench.now).unwrap();
    bench.send(&key);
    assert_eq!(bench.receive(), (9, Incoming::Refused));
}

#[test]
fn broadcast_address_cannot_be_opened() {
    let mut bench = Bench::new();
    let destination = SocketAddrV4::new(Ipv4Addr::BROADCAST, 9);
    let key = ConnectionKey { guest_port: 9, destination };
    let basis = Basis::Address { rule: "all".into() };
    assert!(bench.table.open(key, basis, &bench.poller, bench.now).is_err());
    assert_eq!(bench.table.count(), 0);
}

#[test]
fn socket_that_is_known_to_have_more_is_not_reported_until_it_was_read() {
    let mut bench = Bench::new();
    let key = bench.open(1);
    assert_eq!(bench.send(&key), Some(Sent::Done));
    let host = bench.heard();
    bench.server.send_to(b"pong", host).unwrap();
    for ready in bench.poller.wait(Some(PATIENCE)).unwrap() {
        let Token::Association(number) = ready.token else { panic!("{ready:?}") };
        bench.table.note(number);
    }
    bench.table.rest(&bench.poller);
    assert!(bench.poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
    assert_eq!(bench.receive(), (1, Incoming::Datagram(4)));
    // Nothing is left, so the socket is watched again.
    bench.server.send_to(b"again", host).unwrap();
    assert_eq!(bench.receive(), (1, Incoming::Datagram(5)));
}
