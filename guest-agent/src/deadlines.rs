//! The deadlines of connections and jobs, at most one of each.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::token::Token;

#[derive(Default)]
pub struct Deadlines {
    by_time: BTreeSet<(Instant, Token)>,
    by_token: BTreeMap<Token, Instant>,
}

impl Deadlines {
    /// Sets or clears the one deadline of a connection or job.
    pub fn set(&mut self, token: Token, new: Option<Instant>) {
        let old = match new {
            Some(new) => self.by_token.insert(token, new),
            None => self.by_token.remove(&token),
        };
        if let Some(old) = old {
            self.by_time.remove(&(old, token));
        }
        self.by_time.extend(new.map(|new| (new, token)));
    }

    pub fn get(&self, token: Token) -> Option<Instant> {
        self.by_token.get(&token).copied()
    }

    pub fn first(&self) -> Option<Instant> {
        self.by_time.first().map(|(first, _)| *first)
    }

    /// Takes out the first deadline that has passed.
    pub fn take_passed(&mut self, now: Instant) -> Option<Token> {
        let &(_, token) = self.by_time.first().filter(|(at, _)| *at <= now)?;
        self.set(token, None);
        Some(token)
    }
}
