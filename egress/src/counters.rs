//! The use that a sandbox has made of each rule, and the attempts that were denied.
//!
//! Counters belong to a rule's text, so they survive a change of the policy that keeps the rule.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::frame::Drop;
use crate::policy::{Denial, Policy, RULES_MAX};

/// The most denied attempts that are kept.
pub const DENIED_MAX: usize = 100;

/// The use of one rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RuleCount {
    /// Connections over TCP, and associations over UDP.
    pub connections: u64,
    /// Bytes from the guest.
    pub bytes_out: u64,
    /// Bytes to the guest.
    pub bytes_in: u64,
}

/// The target of an attempt, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Attempt {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    pub protocol: &'static str,
}

/// A denied attempt, and how often it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Denied {
    /// Milliseconds since 1970 of the last time.
    pub time_ms: u64,
    #[serde(flatten)]
    pub attempt: Attempt,
    pub reason: Denial,
    pub count: u64,
}

/// All counters of a sandbox.
#[derive(Debug, Default)]
pub struct Counters {
    rules: HashMap<Rc<str>, RuleCount>,
    denied: VecDeque<Denied>,
    dropped: BTreeMap<Drop, u64>,
    pub totals: Totals,
}

/// Counters of the whole sandbox.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Totals {
    pub connections: u64,
    pub bytes_out: u64,
    pub bytes_in: u64,
    pub denied: u64,
    pub dns_questions: u64,
    pub frames_in: u64,
    /// Frames for the guest that found its queue full.
    pub frames_lost: u64,
    /// Datagrams that found a queue of the host full, or were too long.
    pub datagrams_lost: u64,
}

/// The counters as a control client sees them.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    pub rules: Vec<RuleReport<'a>>,
    pub denied: &'a VecDeque<Denied>,
    pub dropped: &'a BTreeMap<Drop, u64>,
    pub totals: Totals,
}

/// One rule and its use.
#[derive(Debug, Serialize)]
pub struct RuleReport<'a> {
    pub rule: &'a str,
    pub action: &'static str,
    #[serde(flatten)]
    pub count: RuleCount,
}

impl Counters {
    pub fn add_connection(&mut self, rule: &Rc<str>) {
        self.totals.connections += 1;
        self.rule(rule).connections += 1;
    }

    pub fn add_bytes(&mut self, rule: &Rc<str>, out: u64, into: u64) {
        self.totals.bytes_out += out;
        self.totals.bytes_in += into;
        let count = self.rule(rule);
        count.bytes_out += out;
        count.bytes_in += into;
    }

    /// Counts a frame that was dropped.
    pub fn add_dropped(&mut self, why: Drop) {
        *self.dropped.entry(why).or_default() += 1;
    }

    /// Records a denied attempt. Returns how often it was made.
    pub fn add_denied(&mut self, attempt: Attempt, reason: Denial) -> u64 {
        self.totals.denied += 1;
        let same = |denied: &Denied| denied.attempt == attempt && denied.reason == reason;
        // The last attempts are at the end, and a repeated one is most often among them.
        let known = self.denied.iter().rposition(same);
        let before = known.and_then(|at| self.denied.remove(at)).map_or(0, |denied| denied.count);
        if self.denied.len() >= DENIED_MAX {
            self.denied.pop_front();
        }
        let count = before + 1;
        self.denied.push_back(Denied { time_ms: now_ms(), attempt, reason, count });
        count
    }

    /// Forgets the counters of rules that a new policy no longer has.
    pub fn keep_rules_of(&mut self, policy: &Policy) {
        let (allow, deny) = policy.rules();
        let kept: Vec<_> = allow.chain(deny).collect();
        self.rules.retain(|rule, _| kept.contains(&rule));
    }

    pub fn report<'a>(&'a self, policy: &'a Policy) -> Report<'a> {
        let (allow, deny) = policy.rules();
        let show = |action| {
            move |rule: &'a Rc<str>| RuleReport {
                rule,
                action,
                count: self.rules.get(rule).copied().unwrap_or_default(),
            }
        };
        Report {
            rules: allow.map(show("allow")).chain(deny.map(show("deny"))).collect(),
            denied: &self.denied,
            dropped: &self.dropped,
            totals: self.totals,
        }
    }

    fn rule(&mut self, rule: &Rc<str>) -> &mut RuleCount {
        // Connections of rules that are gone are reset, so the map has the size of the policy; the
        // bound holds whatever happens.
        if self.rules.len() > 2 * RULES_MAX {
            self.rules.clear();
        }
        self.rules.entry(rule.clone()).or_default()
    }
}

/// Returns the milliseconds since 1970.
pub fn now_ms() -> u64 {
    let passed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(passed.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyDocument;

    fn attempt(port: u16) -> Attempt {
        Attempt { port: Some(port), protocol: "tcp", ..Attempt::default() }
    }

    #[test]
    fn denied_attempts_are_merged_and_bounded() {
        let mut counters = Counters::default();
        for port in 0..1000 {
            counters.add_denied(attempt(port), Denial::NoRule);
        }
        assert_eq!(counters.denied.len(), DENIED_MAX);
        assert_eq!(counters.add_denied(attempt(950), Denial::NoRule), 2);
        assert_eq!(counters.denied.back().unwrap().attempt, attempt(950));
        assert_eq!(counters.denied.len(), DENIED_MAX);
        assert_eq!(counters.totals.denied, 1001);
    }

    #[test]
    fn counters_survive_a_policy_that_keeps_the_rule() {
        let policy = |rules: &[&str]| {
            let allow = rules.iter().map(|rule| (*rule).to_owned()).collect();
            Policy::new(&PolicyDocument { allow, ..PolicyDocument::default() }).unwrap()
        };
        let mut counters = Counters::default();
        for rule in ["1.1.1.1/32", "2.2.2.2/32"] {
            counters.add_connection(&rule.into());
            counters.add_bytes(&rule.into(), 10, 20);
        }
        let kept = policy(&["1.1.1.1"]);
        counters.keep_rules_of(&kept);
        let report = counters.report(&kept);
        let count = RuleCount { connections: 1, bytes_out: 10, bytes_in: 20 };
        assert_eq!((report.rules.len(), report.rules[0].count), (1, count));
        assert_eq!(counters.rules.len(), 1);
    }
}
