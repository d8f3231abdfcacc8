//! The names that were resolved for the guest, and the addresses they led to.
//!
//! A connection to an address is judged by the names that the address was given out for, and the
//! process dials an address that its own resolver returned.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// The most names that are kept.
pub const NAMES_MAX: usize = 512;
const ADDRESSES_MAX: usize = 32;
/// The bounds of how long an answer is used.
const TTL_MIN: u32 = 5;
pub const TTL_MAX: u32 = 300;
/// How long a guest may go on using an address after its answer has expired: programs keep them.
const KNOWN: Duration = Duration::from_secs(3600);

/// The cache of resolved names.
#[derive(Debug, Default)]
pub struct Names {
    entries: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    fresh: Vec<Ipv4Addr>,
    fresh_until: Instant,
    known: Vec<(Ipv4Addr, Instant)>,
    resolved: Instant,
}

impl Names {
    /// Keeps the addresses of a name. Returns for how many seconds the guest may keep them.
    pub fn remember(&mut self, name: &str, addresses: &[Ipv4Addr], ttl: u32, now: Instant) -> u32 {
        let ttl = ttl.clamp(TTL_MIN, TTL_MAX);
        let fresh_until = now + Duration::from_secs(ttl.into());
        if self.entries.len() >= NAMES_MAX && !self.entries.contains_key(name) {
            self.evict();
        }
        let entry = self.entries.entry(name.to_owned()).or_insert_with(|| Entry {
            fresh: Vec::new(),
            fresh_until,
            known: Vec::new(),
            resolved: now,
        });
        entry.known.retain(|(address, until)| !addresses.contains(address) && *until > now);
        entry.known.splice(..0, addresses.iter().map(|address| (*address, fresh_until + KNOWN)));
        entry.known.truncate(ADDRESSES_MAX);
        entry.fresh = addresses.to_vec();
        (entry.fresh_until, entry.resolved) = (fresh_until, now);
        ttl
    }

    /// Returns the addresses of a name, and for how many seconds they hold, if it was resolved not
    /// long ago.
    pub fn fresh(&self, name: &str, now: Instant) -> Option<(&[Ipv4Addr], u32)> {
        let entry = self.entries.get(name).filter(|entry| entry.fresh_until > now)?;
        let left = entry.fresh_until.saturating_duration_since(now).as_secs();
        Some((&entry.fresh, u32::try_from(left).unwrap_or(0).max(1)))
    }

    /// Returns the names that led to an address, the last resolved first.
    pub fn names_of(&self, address: Ipv4Addr, now: Instant) -> Vec<&str> {
        let leads = |entry: &Entry| {
            entry.known.iter().any(|(known, until)| *known == address && *until > now)
        };
        let mut found: Vec<_> = self.entries.iter().filter(|(_, entry)| leads(entry)).collect();
        found.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.resolved));
        found.into_iter().map(|(name, _)| name.as_str()).collect()
    }

    fn evict(&mut self) {
        let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.resolved);
        if let Some(name) = oldest.map(|(name, _)| name.clone()) {
            self.entries.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Ipv4Addr = Ipv4Addr::new(1, 1, 1, 1);
    const TWO: Ipv4Addr = Ipv4Addr::new(2, 2, 2, 2);

    #[test]
    fn answer_is_fresh_for_its_ttl_and_known_for_longer() {
        let (mut names, now) = (Names::default(), Instant::now());
        assert_eq!(names.remember("a.example", &[ONE], 100_000, now), TTL_MAX);
        assert_eq!(names.fresh("a.example", now), Some((&[ONE][..], TTL_MAX)));
        let later = now + Duration::from_secs(301);
        assert_eq!(names.fresh("a.example", later), None);
        assert_eq!(names.names_of(ONE, later), ["a.example"]);
        assert!(names.names_of(ONE, now + Duration::from_secs(4000)).is_empty());
    }

    #[test]
    fn address_of_several_names_lists_the_last_resolved_first() {
        let (mut names, now) = (Names::default(), Instant::now());
        names.remember("a.example", &[ONE, TWO], 60, now);
        names.remember("b.example", &[ONE], 60, now + Duration::from_secs(1));
        assert_eq!(names.names_of(ONE, now), ["b.example", "a.example"]);
        assert_eq!(names.names_of(TWO, now), ["a.example"]);
    }

    #[test]
    fn address_of_an_earlier_answer_stays_known_and_is_no_longer_fresh() {
        let (mut names, now) = (Names::default(), Instant::now());
        names.remember("a.example", &[ONE], 60, now);
        names.remember("a.example", &[TWO], 60, now);
        assert_eq!(names.names_of(ONE, now), ["a.example"]);
        assert_eq!(names.fresh("a.example", now).unwrap().0, [TWO]);
    }

    #[test]
    fn cache_has_a_bound_and_drops_the_oldest() {
        let (mut names, now) = (Names::default(), Instant::now());
        for number in 0..NAMES_MAX as u64 + 10 {
            let at = now + Duration::from_millis(number);
            let addresses = [Ipv4Addr::from_bits(number as u32)];
            names.remember(&format!("h{number}.example"), &addresses, 60, at);
        }
        assert_eq!(names.entries.len(), NAMES_MAX);
        assert!(names.fresh("h9.example", now).is_none());
        assert!(names.fresh("h10.example", now).is_some());
        for number in 0..100 {
            names.remember("h99.example", &[Ipv4Addr::from_bits(number)], 60, now);
        }
        assert_eq!(names.entries["h99.example"].known.len(), ADDRESSES_MAX);
    }
}
