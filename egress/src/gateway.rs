//! The gateway of one sandbox: what happens to each frame, question, connection and order.
//!
//! One thread owns everything, and no call waits; `event_loop.rs` does.

mod datagrams;

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use crate::associations::Associations;
use crate::audit::AuditLog;
use crate::connection::{Basis, ConnectionKey, Context, Need};
use crate::connections::{Connections, key_of};
use crate::counters::{Attempt, Counters};
use crate::dns::{self, Outcome, Question};
use crate::frame::{self, Drop, Frame, Segment};
use crate::inherited::Inherited;
use crate::link::{Link, MESSAGE_MAX, Received};
use crate::names::Names;
use crate::policy::{Denial, Policy, Port, Verdict};
use crate::rate::Bucket;
use crate::reply;
use crate::resolver::Resolver;
use crate::secrets::Secrets;
use crate::sys::{self, Interest, Poller};
use crate::token::Token;

// Frames that are read before everything else has its turn.
const TURN_FRAMES: usize = 256;
// Questions of the guest that wait for an upstream resolver.
const QUESTIONS_MAX: usize = 256;
const QUESTIONS_PER_SECOND: u32 = 100;
const QUESTIONS_BURST: u32 = 300;
// New associations over UDP, each of which costs the host a socket.
const ASSOCIATIONS_PER_SECOND: u32 = 100;
const ASSOCIATIONS_BURST: u32 = 300;
// Refusals of datagrams.
const REFUSALS_PER_SECOND: u32 = 100;
const IDLE: Duration = Duration::from_secs(30);

/// The gateway of one sandbox.
pub struct Gateway {
    poller: Poller,
    link: Link,
    link_interest: Interest,
    connections: Connections,
    associations: Associations,
    inherited: Inherited,
    resolver: Resolver,
    names: Names,
    questions: Vec<(u16, Question)>,
    question_rate: Bucket,
    association_rate: Bucket,
    refusal_rate: Bucket,
    audit: AuditLog,
    pub policy: Policy,
    pub secrets: Secrets,
    pub counters: Counters,
}

impl Gateway {
    pub fn new(
        poller: Poller,
        (mut link, inherited): (Link, Inherited),
        (policy, secrets): (Policy, Secrets),
        resolver: Resolver,
        log: Option<File>,
    ) -> io::Result<Self> {
        let now = Instant::now();
        let connections = Connections::new(&mut link, u64::from_ne_bytes(sys::random()?), now);
        let mut gateway = Self {
            poller,
            link,
            link_interest: Interest::default(),
            connections,
            associations: Associations::default(),
            inherited,
            resolver,
            names: Names::default(),
            questions: Vec::new(),
            question_rate: Bucket::new(QUESTIONS_PER_SECOND, QUESTIONS_BURST, now),
            association_rate: Bucket::new(ASSOCIATIONS_PER_SECOND, ASSOCIATIONS_BURST, now),
            refusal_rate: Bucket::new(REFUSALS_PER_SECOND, REFUSALS_PER_SECOND, now),
            audit: AuditLog::new(log, now),
            policy,
            secrets,
            counters: Counters::default(),
        };
        gateway.watch_link()?;
        Ok(gateway)
    }

    pub fn poller(&self) -> &Poller {
        &self.poller
    }

    pub fn open_connections(&self) -> usize {
        self.connections.count()
    }

    pub fn open_associations(&self) -> usize {
        self.associations.count()
    }

    /// Returns the connections over TCP that are open in the guest, those included that it has
    /// inherited and not given up yet.
    pub fn connection_keys(&self) -> Vec<ConnectionKey> {
        let inherited = self.inherited.keys().filter(|key| !self.connections.contains(key));
        self.connections.keys().chain(inherited).copied().collect()
    }

    /// Notes an event of a connection's socket on the host.
    pub fn note_connection(&mut self, number: u32, readable: bool, writable: bool) {
        self.connections.with(number, |connection, _| connection.note(readable, writable));
    }

    /// Puts a new policy in place of the old one. Connections that it denies are reset, and
    /// associations end.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
        self.counters.keep_rules_of(&self.policy);
        let (mut denied, policy) = (Vec::new(), &self.policy);
        self.connections.each(|_, connection, socket| {
            if let Err(denial) = connection.judge_again(socket, policy) {
                denied.push((connection.attempt(), denial));
            }
        });
        let now = Instant::now();
        denied.into_iter().for_each(|(attempt, denial)| self.deny(attempt, denial, now));
        self.judge_associations(now);
    }

    /// Returns how long nothing happens without an event. `clients` is the deadline of others.
    pub fn timeout(&mut self, clients: Option<Instant>, now: Instant) -> Duration {
        let has_more = self.connections.has_more() || self.associations.has_more();
        if has_more && !self.link.is_blocked() {
            return Duration::ZERO;
        }
        // The stack cannot send while the guest takes no frames; the link's event ends that.
        let (connections, inherited) = if self.link.is_blocked() {
            (self.connections.own_deadline(), None)
        } else {
            (self.connections.deadline(now), self.inherited.deadline())
        };
        let associations = self.associations.deadline();
        let next = [connections, associations, inherited, self.resolver.deadline(), clients];
        let next = next.into_iter().flatten().min();
        next.map_or(IDLE, |next| next.saturating_duration_since(now).min(IDLE))
    }

    /// Does everything that can be done without waiting. Returns false if the link is gone.
    pub fn turn(&mut self, link_ready: bool, now: Instant) -> io::Result<bool> {
        if link_ready && !self.read_frames(now) {
            return Ok(false);
        }
        for (name, outcome) in self.resolver.expire(&self.poller, now) {
            self.resolved(&name, &outcome, now);
        }
        self.advance_connections(now);
        self.advance_associations(now);
        self.connections.send(&mut self.link, now);
        self.probe_inherited(now);
        self.connections.reap();
        if !self.link.flush() {
            return Ok(false);
        }
        self.counters.totals.frames_lost = self.link.lost;
        self.watch_link()?;
        Ok(true)
    }

    /// Asks the guest about connections that it has inherited. Its answers are segments of unknown
    /// connections, and are reset as such.
    fn probe_inherited(&mut self, now: Instant) {
        if self.link.is_blocked() {
            return;
        }
        let Self { inherited, connections, link, .. } = self;
        for (key, sequence) in inherited.due(|key| connections.contains(key), now) {
            link.answer(&reply::probe(&link.ends, &key, sequence));
        }
    }

    fn watch_link(&mut self) -> io::Result<()> {
        let interest = Interest { readable: true, writable: self.link.is_blocked() };
        self.poller.watch(self.link.fd(), Token::Link, self.link_interest, interest)?;
        self.link_interest = interest;
        Ok(())
    }

    /// Reads frames, as many as one turn allows. Returns false if the link is gone.
    fn read_frames(&mut self, now: Instant) -> bool {
        let mut buffer = [0; MESSAGE_MAX];
        for _ in 0..TURN_FRAMES {
            match self.link.receive(&mut buffer) {
                Received::Frame(frame) => self.take_frame(frame, now),
                Received::Malformed => self.counters.add_dropped(Drop::Malformed),
                Received::Empty => return true,
                Received::Gone => return false,
            }
        }
        true
    }

    fn take_frame(&mut self, bytes: &[u8], now: Instant) {
        self.counters.totals.frames_in += 1;
        if self.link.ends.guest_mac.is_none() {
            self.link.ends.guest_mac = frame::source(bytes);
        }
        let ends = self.link.ends;
        match frame::read(bytes, &ends) {
            Frame::ArpRequest { sender_ip } => {
                if let Some(packet) = reply::arp(&ends, sender_ip) {
                    self.link.answer_arp(&packet);
                }
            }
            Frame::Echo { ident, sequence, data } => {
                self.link.answer(&reply::echo(&ends, ident, sequence, data));
            }
            Frame::Dns { source_port, message } => self.take_question(source_port, message, now),
            Frame::Tcp(segment) => self.take_segment(&segment, now),
            Frame::Udp(datagram) => self.take_datagram(&datagram, now),
            Frame::Ignored => {}
            Frame::Dropped(why) => self.counters.add_dropped(why),
        }
    }

    fn take_segment(&mut self, segment: &Segment<'_>, now: Instant) {
        if segment.rst {
            self.inherited.gone(&key_of(segment));
        }
        if self.connections.has(segment) {
            self.connections.feed(segment, &mut self.link, now);
            return;
        }
        let opens = segment.syn && !segment.ack;
        match opens.then(|| self.judge_segment(segment, now)) {
            Some(Ok(basis)) => {
                let rules = (&self.policy, &self.secrets);
                self.connections.accept(segment, basis, &mut self.link, rules, now);
            }
            refused => {
                if let Some(packet) = reply::reset(&self.link.ends, segment) {
                    self.link.answer(&packet);
                }
                if let Some(Err(denial)) = refused {
                    self.deny(attempt_of(segment), denial, now);
                }
            }
        }
    }

    /// Judges a handshake's first segment.
    fn judge_segment(&mut self, segment: &Segment<'_>, now: Instant) -> Result<Basis, Denial> {
        let (to, port) = (*segment.destination.ip(), segment.destination.port());
        if to == self.link.ends.gateway_ip || to == self.link.ends.guest_ip {
            return Err(Denial::Protocol);
        }
        let basis = self.judge_target(to, Port::tcp(port), now)?;
        if self.connections.has_room() { Ok(basis) } else { Err(Denial::TooMany) }
    }

    /// Judges a target by its address, then by the names that led there.
    fn judge_target(&self, to: Ipv4Addr, port: Port, now: Instant) -> Result<Basis, Denial> {
        let mut denial = match self.policy.judge_address(to.into(), port) {
            Verdict::Allowed(rule) => return Ok(Basis::Address { rule }),
            // No name can allow these.
            Verdict::Denied(denial @ (Denial::DeniedByRule | Denial::Quic)) => return Err(denial),
            Verdict::Denied(denial) => denial,
        };
        let has_rule = denial == Denial::Protocol;
        for (at, name) in self.names.names_of(to, now).into_iter().enumerate() {
            match self.policy.judge_name(name, Some(port)) {
                Verdict::Allowed(rule) => {
                    self.policy.judge_resolved(to.into(), Some(port))?;
                    return Ok(Basis::Name { name: name.to_owned(), rule });
                }
                // The name that was resolved last says most about what the guest wants, unless a
                // rule is for the address itself.
                Verdict::Denied(by_name) if at == 0 && !has_rule => denial = by_name,
                Verdict::Denied(_) => {}
            }
        }
        Err(denial)
    }

    fn take_question(&mut self, source_port: u16, message: &[u8], now: Instant) {
        self.counters.totals.dns_questions += 1;
        let Some(question) = dns::read_question(message) else {
            self.counters.add_dropped(Drop::Malformed);
            return;
        };
        let verdict = match &question.name {
            Some(name) => self.policy.judge_name(name, None),
            None => Verdict::Denied(Denial::NameNotAllowed),
        };
        let attempt = dns_attempt(question.name.clone());
        let answer = match verdict {
            Verdict::Denied(denial) => {
                self.deny(attempt, denial, now);
                question.refuse()
            }
            Verdict::Allowed(rule) => {
                self.audit.allowed(&attempt, &rule, now);
                if question.asks_addresses() {
                    self.answer_or_ask(source_port, question, now)
                } else {
                    question.answer(&[], 0)
                }
            }
        };
        self.send_answer(source_port, answer);
    }

    /// Answers a question from the cache, or asks upstream and answers later.
    fn answer_or_ask(
        &mut self,
        source_port: u16,
        question: Question,
        now: Instant,
    ) -> Option<Vec<u8>> {
        let name = question.name.as_deref()?;
        if let Some((addresses, ttl)) = self.names.fresh(name, now) {
            let open = self.open_addresses(addresses).0;
            return question.answer(&open, ttl);
        }
        let asked = self.questions.len() < QUESTIONS_MAX
            && self.question_rate.take(now)
            && self.resolver.ask(name, &self.poller, now);
        if !asked {
            return question.fail();
        }
        self.questions.push((source_port, question));
        None
    }

    /// Continues a question whose socket is ready.
    pub fn advance_question(&mut self, number: u32, now: Instant) {
        if let Some((name, outcome)) = self.resolver.advance(number, &self.poller, now) {
            self.resolved(&name, &outcome, now);
        }
    }

    /// Gives the result of a question to everyone who waits for it.
    fn resolved(&mut self, name: &str, outcome: &Outcome, now: Instant) {
        let is_open = self.policy.judge_name(name, None).is_allowed();
        let (mut open, mut ttl, mut refused) = (Vec::new(), 0, !is_open);
        if let (Outcome::Found { addresses, ttl: upstream_ttl }, true) = (outcome, is_open) {
            let closed;
            (open, closed) = self.open_addresses(addresses);
            ttl = self.names.remember(name, &open, *upstream_ttl, now);
            if let Some((address, denial)) = closed {
                let attempt =
                    Attempt { address: Some(address.into()), ..dns_attempt(Some(name.to_owned())) };
                self.deny(attempt, denial, now);
                refused = open.is_empty();
            }
        }
        let waits = |(_, question): &mut (u16, Question)| question.name.as_deref() == Some(name);
        let waiting: Vec<_> = self.questions.extract_if(.., waits).collect();
        for (source_port, question) in waiting {
            let answer = match outcome {
                _ if refused => question.refuse(),
                Outcome::Found { .. } => question.answer(&open, ttl),
                Outcome::NoSuchName => question.no_such_name(),
                Outcome::Failed => question.fail(),
            };
            self.send_answer(source_port, answer);
        }
        self.dial_waiting(name, &open, now);
    }

    /// Returns the addresses that a name may lead to, and the first of the others.
    fn open_addresses(
        &self,
        addresses: &[Ipv4Addr],
    ) -> (Vec<Ipv4Addr>, Option<(Ipv4Addr, Denial)>) {
        let judge = |address: Ipv4Addr| self.policy.judge_resolved(address.into(), None);
        let closed = |address: &Ipv4Addr| judge(*address).err().map(|denial| (*address, denial));
        let first_closed = addresses.iter().find_map(closed);
        let open = addresses.iter().copied().filter(|address| judge(*address).is_ok()).collect();
        (open, first_closed)
    }

    fn dial_waiting(&mut self, name: &str, addresses: &[Ipv4Addr], now: Instant) {
        let mut needs = Vec::new();
        let Self { connections, policy, secrets, counters, .. } = self;
        connections.each(|number, connection, socket| {
            if connection.waits_for(name) {
                let mut context = Context { policy, secrets, counters, now };
                needs.push((number, connection.dial(addresses, socket, &mut context)));
            }
        });
        needs.into_iter().for_each(|(number, need)| self.meet(number, need, now));
    }

    fn advance_connections(&mut self, now: Instant) {
        let mut needs = Vec::new();
        let Self { connections, policy, secrets, counters, .. } = self;
        connections.each(|number, connection, socket| {
            let need = connection.advance(socket, &mut Context { policy, secrets, counters, now });
            if need != Need::Nothing {
                needs.push((number, need));
            }
        });
        needs.into_iter().for_each(|(number, need)| self.meet(number, need, now));
        let Self { connections, poller, .. } = self;
        connections.each(|_, connection, socket| {
            if connection.watch(socket, poller).is_err() {
                connection.reset(socket);
            }
        });
    }

    fn meet(&mut self, number: u32, need: Need, now: Instant) {
        let Some((attempt, rule)) = self
            .connections
            .with(number, |connection, _| (connection.attempt(), connection.basis.rule().clone()))
        else {
            return;
        };
        match need {
            Need::Nothing => {}
            Need::Record(denial) => self.deny(attempt, denial, now),
            Need::Connected => {
                self.counters.add_connection(&rule);
                self.audit.allowed(&attempt, &rule, now);
            }
            Need::Addresses(name) => {
                let fresh = self.names.fresh(&name, now).map(|(addresses, _)| addresses.to_vec());
                if let Some(addresses) = fresh {
                    self.dial_waiting(&name, &addresses, now);
                } else if !self.resolver.ask(&name, &self.poller, now) {
                    self.connections.with(number, |connection, socket| connection.reset(socket));
                    self.deny(attempt, Denial::TooMany, now);
                }
            }
        }
    }

    fn send_answer(&mut self, source_port: u16, answer: Option<Vec<u8>>) {
        if let Some(message) = answer {
            self.link.answer(&reply::dns(&self.link.ends, source_port, &message));
        }
    }

    fn deny(&mut self, attempt: Attempt, denial: Denial, now: Instant) {
        self.audit.denied(&attempt, denial.word(), now);
        self.counters.add_denied(attempt, denial);
    }
}

fn attempt_of(segment: &Segment<'_>) -> Attempt {
    let address = Some(IpAddr::V4(*segment.destination.ip()));
    let port = Some(segment.destination.port());
    Attempt { name: None, address, port, protocol: "tcp" }
}

fn dns_attempt(name: Option<String>) -> Attempt {
    Attempt { name, address: None, port: None, protocol: "dns" }
}
