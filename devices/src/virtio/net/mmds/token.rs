//! The tokens of version 2 of the service: random, few, and each with an expiry.
//!
//! A token is valid only for the device that issued it: none is in a snapshot, so that a fork
//! cannot use the tokens of the original.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use crate::sys;

/// The maximum lifetime of a token, in seconds.
pub const TTL_SECONDS_MAX: u32 = 6 * 60 * 60;
/// The maximum number of tokens; one more removes the oldest.
const TOKENS_MAX: usize = 256;
const BYTES: usize = 32;

struct Token {
    secret: [u8; BYTES],
    ends: Instant,
}

/// The valid tokens.
#[derive(Default)]
pub struct Tokens(VecDeque<Token>);

impl Tokens {
    /// Issues a new token as text.
    pub fn give(&mut self, ttl: Duration, now: Instant) -> io::Result<String> {
        let mut secret = [0; BYTES];
        if sys::random(&mut secret)? != BYTES {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.retain(|token| token.ends > now);
        if self.0.len() == TOKENS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Token { secret, ends: now + ttl });
        Ok(secret.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Returns whether `text` is a token that has not expired. The time it takes does not depend on
    /// the content of a text of the right length.
    pub fn is_valid(&self, text: &str, now: Instant) -> bool {
        let Some(secret) = decode(text) else { return false };
        let same = |token: &Token| {
            token.secret.iter().zip(secret).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
        };
        self.0.iter().filter(|token| same(token) && token.ends > now).count() > 0
    }
}

fn decode(text: &str) -> Option<[u8; BYTES]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut secret = [0; BYTES];
    for (byte, pair) in secret.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_valid_until_it_ends_and_no_other_is() {
        let (mut tokens, now) = (Tokens::default(), Instant::now());
        let token = tokens.give(Duration::from_secs(10), now).unwrap();
        assert!(tokens.is_valid(&token, now + Duration::from_secs(9)));
        assert!(!tokens.is_valid(&token, now + Duration::from_secs(10)));
        let first = if token.starts_with('0') { "1" } else { "0" };
        for other in ["", "00", &token[1..], &format!("{first}{}", &token[1..])] {
            assert!(!tokens.is_valid(other, now), "{other}");
        }
        assert!(!Tokens::default().is_valid(&token, now));
    }

    #[test]
    fn number_of_tokens_is_bounded() {
        let (mut tokens, now) = (Tokens::default(), Instant::now());
        let hour = Duration::from_secs(3600);
        let first = tokens.give(hour, now).unwrap();
        let given: Vec<_> = (0..TOKENS_MAX).map(|_| tokens.give(hour, now).unwrap()).collect();
        assert_eq!(tokens.0.len(), TOKENS_MAX);
        assert!(!tokens.is_valid(&first, now));
        assert!(given.iter().all(|token| tokens.is_valid(token, now)));
    }
}
