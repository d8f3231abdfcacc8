//! The credit protocol, checked exhaustively: every order in which a guest, a host socket and the
//! packets between them can act, for small windows.
//!
//! The host's side is the real `Connection`. The guest's side is the laziest driver that the
//! specification allows: it reports freed room only in packets that it sends anyway, when it is
//! asked, and when the host has, as far as it knows, no credit. From every reachable state, neither
//! side has sent beyond the other's window, and there is a way to the end, where every byte has
//! arrived in its place.

use std::collections::{HashMap, VecDeque};

use crate::virtio::vsock::connection::{Connection, Pair, Verdict};
use crate::virtio::vsock::wire::{Header, Op, SHUTDOWN_SEND, TYPE_STREAM};

/// The number of packets in flight in each direction: one shows few races, two show them all.
const ON_THE_WAY: usize = 2;

/// The parameters of one exploration.
#[derive(Clone, Copy, Debug)]
struct Setting {
    guest_window: u32,
    host_window: u32,
    /// The bytes that each side has to send.
    from_guest: u32,
    from_host: u32,
    /// The initial value of the free-running counters.
    start: u32,
    /// Whether the driver asks for credit when it has none.
    guest_asks: bool,
}

/// A packet and the position in the stream of its first byte.
type Packet = (Header, u32);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    host: Connection,
    /// Bytes of the host socket not yet read, and bytes written to it.
    host_left: u32,
    host_got: u32,
    guest: Driver,
    to_guest: VecDeque<Packet>,
    to_host: VecDeque<Packet>,
}

/// A driver's side of the connection, with its own counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Driver {
    left: u32,
    sent: u32,
    peer_alloc: u32,
    peer_forwarded: u32,
    received: u32,
    forwarded: u32,
    reported: u32,
    was_asked: bool,
    has_asked: bool,
    heard_end: bool,
}

impl Driver {
    fn credit(&self) -> u32 {
        self.peer_alloc.saturating_sub(self.sent.wrapping_sub(self.peer_forwarded))
    }

    fn held(&self) -> u32 {
        self.received.wrapping_sub(self.forwarded)
    }

    fn owes_report(&self, window: u32) -> bool {
        let known = self.received.wrapping_sub(self.reported);
        self.was_asked || known >= window && self.forwarded != self.reported
    }
}

impl State {
    fn first(setting: Setting) -> Self {
        let Setting { guest_window, host_window, start, .. } = setting;
        let pair = Pair { host_port: 1, guest_port: 2 };
        let mut host = Connection::from_host(pair, host_window).starting_at(start);
        let request = host.next_control().unwrap();
        let response =
            Header { buf_alloc: guest_window, fwd_cnt: start, ..packet(Op::Response, 0) };
        assert_eq!(host.take(Op::Response, &response), Verdict::Opened);
        let guest = Driver {
            left: setting.from_guest,
            sent: start,
            peer_alloc: request.buf_alloc,
            peer_forwarded: request.fwd_cnt,
            received: start,
            forwarded: start,
            reported: start,
            was_asked: false,
            has_asked: false,
            heard_end: false,
        };
        let (to_guest, to_host) = (VecDeque::new(), VecDeque::new());
        Self { host, host_left: setting.from_host, host_got: start, guest, to_guest, to_host }
    }

    fn is_done(&self, setting: Setting) -> bool {
        let all = |got: u32, of: u32| got.wrapping_sub(setting.start) == of;
        all(self.host_got, setting.from_guest)
            && all(self.guest.forwarded, setting.from_host)
            && self.guest.heard_end
    }

    /// Returns every state that one action leads to.
    fn next(&self, setting: Setting) -> Vec<Self> {
        let mut next = Vec::new();
        let mut act = |change: &dyn Fn(&mut Self)| {
            let mut after = self.clone();
            change(&mut after);
            next.push(after);
        };
        if self.to_guest.len() < ON_THE_WAY && self.host.wants_to_send() {
            let most = if self.host.wants_control() {
                1
            } else {
                // A read of nothing is the end of the host's stream, and sends nothing.
                self.host.credit.available().min(self.host_left).max(1)
            };
            for len in 1..=most {
                act(&|state| state.host_sends(len, setting));
            }
        }
        for len in 1..=self.host.window.held() {
            act(&|state| {
                state.host.window.forward(len);
                state.host_got = state.host_got.wrapping_add(len);
            });
        }
        if !self.to_host.is_empty() {
            act(&|state| state.host_takes());
        }
        if !self.to_guest.is_empty() {
            act(&|state| state.guest_takes(setting));
        }
        for len in 1..=self.guest.held() {
            act(&|state| state.guest.forwarded = state.guest.forwarded.wrapping_add(len));
        }
        if self.to_host.len() < ON_THE_WAY {
            for len in 1..=self.guest.credit().min(self.guest.left) {
                act(&|state| state.guest_sends(Op::Data, len, setting));
            }
            if self.guest.owes_report(setting.guest_window) {
                act(&|state| state.guest_sends(Op::CreditUpdate, 0, setting));
            }
            let starved = self.guest.left > 0 && self.guest.credit() == 0;
            if setting.guest_asks && starved && !self.guest.has_asked {
                act(&|state| {
                    state.guest.has_asked = true;
                    state.guest_sends(Op::CreditRequest, 0, setting);
                });
            }
        }
        next
    }

    fn host_sends(&mut self, len: u32, setting: Setting) {
        if let Some(header) = self.host.next_control() {
            self.to_guest.push_back((header, 0));
        } else if self.host_left == 0 {
            self.host.host_ended();
        } else {
            let place = setting.from_host - self.host_left;
            self.host_left -= len;
            let header = self.host.data_header(len);
            self.to_guest.push_back((header, setting.start.wrapping_add(place)));
        }
    }

    fn host_takes(&mut self) {
        let (header, place) = self.to_host.pop_front().unwrap();
        let op = Op::from_raw(header.op).unwrap();
        let before = self.host_got.wrapping_add(self.host.window.held());
        match self.host.take(op, &header) {
            Verdict::Deliver => assert_eq!(place, before, "bytes out of their place"),
            Verdict::Keep => assert_ne!(op, Op::Data),
            other => panic!("a driver within the rules gets {other:?}"),
        }
        assert!(!self.host.credit.is_impossible(), "an honest driver is called a liar");
    }

    fn guest_takes(&mut self, setting: Setting) {
        let (header, place) = self.to_guest.pop_front().unwrap();
        let guest = &mut self.guest;
        guest.peer_alloc = header.buf_alloc;
        guest.peer_forwarded = header.fwd_cnt;
        guest.has_asked &= guest.credit() == 0;
        match Op::from_raw(header.op).unwrap() {
            Op::Data => {
                assert_eq!(place, guest.received, "bytes out of their place");
                guest.received = guest.received.wrapping_add(header.len);
                assert!(guest.held() <= setting.guest_window, "the host sent beyond its credit");
            }
            Op::CreditRequest => guest.was_asked = true,
            Op::CreditUpdate => {}
            Op::Shutdown => {
                assert_eq!(header.flags, SHUTDOWN_SEND);
                guest.heard_end = true;
            }
            other => panic!("the host sent {other:?}"),
        }
    }

    fn guest_sends(&mut self, op: Op, len: u32, setting: Setting) {
        let guest = &mut self.guest;
        let place = guest.sent;
        guest.sent = guest.sent.wrapping_add(len);
        guest.left -= len;
        guest.reported = guest.forwarded;
        guest.was_asked = false;
        let (buf_alloc, fwd_cnt) = (setting.guest_window, guest.forwarded);
        let header = Header { buf_alloc, fwd_cnt, ..packet(op, len) };
        self.to_host.push_back((header, place));
    }
}

fn packet(op: Op, len: u32) -> Header {
    Header { op: op as u16, len, kind: TYPE_STREAM, ..Header::default() }
}

/// Visits every reachable state, then goes back from the end: a state that is not visited again is
/// stuck. Returns the number of states.
fn explore(setting: Setting) -> usize {
    let first = State::first(setting);
    let mut numbers = HashMap::from([(first.clone(), 0)]);
    let mut todo = vec![(0, first)];
    let mut before: Vec<Vec<usize>> = vec![Vec::new()];
    let mut ends = Vec::new();
    while let Some((number, state)) = todo.pop() {
        if state.is_done(setting) {
            ends.push(number);
        }
        for after in state.next(setting) {
            let fresh = numbers.len();
            let reached = *numbers.entry(after.clone()).or_insert(fresh);
            if reached == fresh {
                before.push(Vec::new());
                todo.push((fresh, after));
            }
            before[reached].push(number);
        }
    }
    let mut leads_on = vec![false; before.len()];
    while let Some(number) = ends.pop() {
        if !std::mem::replace(&mut leads_on[number], true) {
            ends.extend(&before[number]);
        }
    }
    let stuck = numbers.iter().find(|(_, number)| !leads_on[**number]);
    assert!(stuck.is_none(), "nobody gets to the end of {setting:?} from {stuck:#?}");
    before.len()
}

#[test]
fn credit_in_every_order_of_events_never_overruns_and_never_gets_stuck() {
    let mut states = 0;
    for (guest_window, host_window) in
        (1..=4).flat_map(|guest| (1..=4).map(move |host| (guest, host)))
    {
        // More than a window, so that credit must be returned; in one direction at a time for large
        // windows.
        let (from_guest, from_host) = (host_window + 1, guest_window + 1);
        let amounts = match guest_window + host_window {
            ..=4 => vec![(from_guest, from_host)],
            _ => vec![(from_guest, 1), (1, from_host)],
        };
        for (from_guest, from_host) in amounts {
            for (start, guest_asks) in [(0, true), (u32::MAX - 1, false)] {
                states += explore(Setting {
                    guest_window,
                    host_window,
                    from_guest,
                    from_host,
                    start,
                    guest_asks,
                });
            }
        }
    }
    assert!(states > 100_000, "{states} states are not the whole protocol");
}
