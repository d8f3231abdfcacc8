//! Datagrams over UDP, and their associations: judged, sent, answered.
//!
//! The first datagram of an association is judged as the first segment of a connection is. There is
//! no name in a datagram, so nothing is judged later; rules by name therefore need `/udp`.

use std::net::IpAddr;
use std::time::Instant;

use smoltcp::wire::Icmpv4DstUnreachable;

use super::Gateway;
use crate::associations::{Association, Incoming, PAYLOAD_MAX, Sent, attempt_of, port_of};
use crate::connection::{Basis, ConnectionKey, is_own};
use crate::frame::Datagram;
use crate::policy::{Denial, Policy, Verdict};
use crate::reply;
use crate::secrets::Secrets;

// Datagrams to the guest in one turn.
const TURN_DATAGRAMS: usize = 256;

impl Gateway {
    /// Carries a datagram of the guest, or refuses it.
    pub(super) fn take_datagram(&mut self, datagram: &Datagram<'_>, now: Instant) {
        let Datagram { source_port, destination, payload, packet } = *datagram;
        let key = ConnectionKey { guest_port: source_port, destination };
        if !self.associations.contains(&key) {
            let opened = self.judge_datagram(&key, now).map(|basis| self.open(key, basis, now));
            if let Err(denial) = opened {
                self.deny(attempt_of(&key, None), denial, now);
                if self.refusal_rate.take(now)
                    && let Some(packet) = reply::prohibited(&self.link.ends, packet)
                {
                    self.link.answer(&packet);
                }
                return;
            }
        }
        match self.associations.send(&key, payload, now) {
            Some((Sent::Done, basis)) => {
                self.counters.add_bytes(basis.rule(), payload.len() as u64, 0);
            }
            Some((Sent::Lost, _)) => self.counters.totals.datagrams_lost += 1,
            // The host has no way there, or has learned that nobody listens.
            Some((Sent::Refused, _)) => {
                self.tell(&key, Icmpv4DstUnreachable::PortUnreachable, now);
            }
            None => self.tell(&key, Icmpv4DstUnreachable::HostUnreachable, now),
        }
    }

    fn judge_datagram(&mut self, key: &ConnectionKey, now: Instant) -> Result<Basis, Denial> {
        let to = *key.destination.ip();
        if to == self.link.ends.gateway_ip || to == self.link.ends.guest_ip {
            return Err(Denial::Protocol);
        }
        let basis = self.judge_target(to, port_of(key), now)?;
        if !self.association_rate.take(now) {
            return Err(Denial::TooMany);
        }
        judge_remote(key, &self.policy, &self.secrets).map(|()| basis)
    }

    fn open(&mut self, key: ConnectionKey, basis: Basis, now: Instant) {
        let (attempt, rule) = (attempt_of(&key, Some(&basis)), basis.rule().clone());
        if self.associations.open(key, basis, &self.poller, now).is_ok() {
            self.counters.add_connection(&rule);
            self.audit.allowed(&attempt, &rule, now);
        }
    }

    /// Notes that the socket of an association has something to read.
    pub fn note_association(&mut self, number: u32) {
        self.associations.note(number);
    }

    /// Gives the guest what has arrived for it, and ends idle associations.
    pub(super) fn advance_associations(&mut self, now: Instant) {
        self.associations.expire(now);
        let mut buffer = [0; PAYLOAD_MAX + 1];
        for _ in 0..TURN_DATAGRAMS {
            if !self.link.takes_datagrams() {
                break;
            }
            let received = self.associations.receive(&mut buffer, &self.poller, now);
            let Some((association, incoming)) = received else { break };
            let key = association.key;
            match incoming {
                Incoming::Datagram(len) => {
                    self.counters.add_bytes(association.basis.rule(), 0, len as u64);
                    let payload = buffer.get(..len).unwrap_or_default();
                    let (ends, from) = (&self.link.ends, key.destination);
                    let packet = reply::datagram(ends, from, key.guest_port, payload);
                    self.link.queue_datagram(&packet);
                }
                Incoming::Lost => self.counters.totals.datagrams_lost += 1,
                Incoming::Refused => self.tell(&key, Icmpv4DstUnreachable::PortUnreachable, now),
            }
        }
        self.associations.rest(&self.poller);
    }

    /// Ends the associations that the policy no longer allows.
    pub(super) fn judge_associations(&mut self, now: Instant) {
        let Self { associations, policy, secrets, .. } = self;
        let denied = associations.judge_again(|association| judge(association, policy, secrets));
        for (association, denial) in denied {
            self.tell(&association.key, Icmpv4DstUnreachable::CommProhibited, now);
            self.deny(attempt_of(&association.key, Some(&association.basis)), denial, now);
        }
    }

    /// Tells the guest why its datagrams do not arrive.
    fn tell(&mut self, key: &ConnectionKey, reason: Icmpv4DstUnreachable, now: Instant) {
        if self.refusal_rate.take(now) {
            let packet = reply::unreachable(&self.link.ends, key, reason);
            self.link.answer(&packet);
        }
    }
}

/// Judges an association under a new policy.
fn judge(association: &mut Association, policy: &Policy, secrets: &Secrets) -> Result<(), Denial> {
    let (key, port) = (association.key, port_of(&association.key));
    let address = IpAddr::V4(*key.destination.ip());
    let verdict = match &association.basis {
        Basis::Address { .. } => policy.judge_address(address, port),
        Basis::Name { name, .. } => {
            policy.judge_resolved(address, Some(port))?;
            policy.judge_name(name, Some(port))
        }
    };
    match (verdict, &mut association.basis) {
        (Verdict::Denied(denial), _) => return Err(denial),
        (Verdict::Allowed(allowed), Basis::Address { rule } | Basis::Name { rule, .. }) => {
            *rule = allowed;
        }
    }
    judge_remote(&key, policy, secrets)
}

/// Judges what holds for every association, whether a rule allows its address or its name.
fn judge_remote(key: &ConnectionKey, policy: &Policy, secrets: &Secrets) -> Result<(), Denial> {
    let (address, port) = (IpAddr::V4(*key.destination.ip()), port_of(key));
    // A request over QUIC would reach a host with secrets with its placeholders.
    if !secrets.is_empty() && policy.hides_name(address, port) {
        return Err(Denial::Quic);
    }
    if is_own(address) && !policy.opens_own_address(address, port) {
        return Err(Denial::OwnAddress);
    }
    Ok(())
}
