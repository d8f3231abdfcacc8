//! The bearer tokens that the server accepts.
//!
//! Only digests are kept. A presented token is compared with each of them in constant time, so that
//! the time of an answer says nothing about a token.

use std::sync::{PoisonError, RwLock};

use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::clock;
use crate::error::ApiError;
use crate::ids;
use crate::store::{Store, TokenRow};

/// The number of characters by which people tell tokens apart.
const PREFIX_LENGTH: usize = 12;
/// The most tokens of one server: each request compares with all of them.
const MAX_TOKENS: usize = 1000;

/// The accepted tokens.
#[derive(Default)]
pub struct Tokens {
    rows: RwLock<Vec<TokenRow>>,
}

fn digest(token: &str) -> Vec<u8> {
    Sha256::digest(token.as_bytes()).to_vec()
}

/// Returns the part of a token that may be shown. A short token shows nothing of itself.
fn prefix(token: &str) -> String {
    if token.len() >= 2 * PREFIX_LENGTH && token.is_ascii() {
        return token[..PREFIX_LENGTH].to_owned();
    }
    let bytes = digest(token);
    bytes.iter().take(PREFIX_LENGTH / 2).map(|byte| format!("{byte:02x}")).collect()
}

impl Tokens {
    /// Reads the tokens of the database.
    pub fn load(store: &Store) -> Result<Self, ApiError> {
        Ok(Self { rows: RwLock::new(store.tokens()?) })
    }

    /// Accepts a token that is not in the database, for as long as the server runs.
    pub fn accept(&self, token: &str, label: &str) {
        let row = TokenRow {
            prefix: prefix(token),
            digest: digest(token),
            label: label.to_owned(),
            created_ms: clock::now_ms(),
            expires_ms: None,
        };
        let mut rows = self.rows.write().unwrap_or_else(PoisonError::into_inner);
        rows.retain(|other| other.prefix != row.prefix);
        rows.push(row);
    }

    /// Returns the prefix of a token if it is accepted.
    pub fn check(&self, token: &str) -> Option<String> {
        let (presented, now) = (digest(token), clock::now_ms());
        let rows = self.rows.read().unwrap_or_else(PoisonError::into_inner);
        let mut found = None;
        for row in rows.iter() {
            let valid = row.expires_ms.is_none_or(|expires| now < expires);
            let equal = row.digest.ct_eq(&presented) & Choice::from(u8::from(valid));
            if bool::from(equal) {
                found = Some(row.prefix.clone());
            }
        }
        found
    }

    /// Makes a token, keeps its digest, and returns it whole: it is shown this once.
    pub fn make(
        &self,
        store: &Store,
        label: &str,
        expires_ms: Option<u64>,
    ) -> Result<(String, TokenRow), ApiError> {
        let token = ids::new_token()?;
        let row = TokenRow {
            prefix: prefix(&token),
            digest: digest(&token),
            label: label.to_owned(),
            created_ms: clock::now_ms(),
            expires_ms,
        };
        let mut rows = self.rows.write().unwrap_or_else(PoisonError::into_inner);
        if rows.len() >= MAX_TOKENS {
            return Err(ApiError::conflict("there are 1000 tokens: revoke some first"));
        }
        store.put_token(&row)?;
        rows.push(row.clone());
        Ok((token, row))
    }

    /// Revokes the token of that prefix.
    pub fn revoke(&self, store: &Store, prefix: &str) -> Result<(), ApiError> {
        let mut rows = self.rows.write().unwrap_or_else(PoisonError::into_inner);
        if !rows.iter().any(|row| row.prefix == prefix) {
            return Err(ApiError::not_found(format!("token '{prefix}' not found")));
        }
        if !store.remove_token(prefix)? {
            let message = "this token was given to the server at its start: start it with another";
            return Err(ApiError::conflict(message));
        }
        rows.retain(|row| row.prefix != prefix);
        Ok(())
    }

    /// Returns all tokens, oldest first.
    pub fn list(&self) -> Vec<TokenRow> {
        let rows = self.rows.read().unwrap_or_else(PoisonError::into_inner);
        let mut rows = rows.clone();
        rows.sort_by_key(|row| row.created_ms);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_accepted_until_it_is_revoked_or_expires() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("db")).unwrap();
        let tokens = Tokens::load(&store).unwrap();
        let (token, row) = tokens.make(&store, "mine", None).unwrap();
        let (old, _) = tokens.make(&store, "old", Some(1)).unwrap();
        assert_eq!(tokens.check(&token), Some(row.prefix.clone()));
        assert_eq!(tokens.check(&old), None);
        assert_eq!(tokens.check("pvmm_no"), None);
        assert_eq!(tokens.check(""), None);
        assert_eq!(Tokens::load(&store).unwrap().check(&token), Some(row.prefix.clone()));
        tokens.revoke(&store, &row.prefix).unwrap();
        assert_eq!(tokens.check(&token), None);
        assert_eq!(tokens.revoke(&store, &row.prefix).unwrap_err().code, "not_found");
    }

    #[test]
    fn given_token_is_accepted_and_never_shown() {
        let tokens = Tokens::default();
        tokens.accept("secret", "given");
        assert!(tokens.check("secret").is_some());
        assert!(!tokens.list()[0].prefix.contains("secret"));
    }
}
