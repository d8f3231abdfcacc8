//! The credentials of one sandbox: for its files and commands, for all its ports, for one port.
//!
//! A credential is derived from a key of the data directory and the sandbox's id. Nothing is kept
//! for a sandbox, and a restart of the server changes no credential.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// The key of a data directory.
pub struct Key(String);

impl Key {
    /// Takes up the key that a data directory has.
    pub fn from_text(text: String) -> Self {
        Self(text)
    }

    fn derive(&self, words: &str) -> String {
        // A key of any length is a key.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(self.0.as_bytes()) else {
            return String::new();
        };
        mac.update(words.as_bytes());
        let bytes = mac.finalize().into_bytes();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns the credential for everything in a sandbox.
    pub fn token(&self, sandbox: &str) -> String {
        self.derive(sandbox)
    }

    /// Returns the credential for the ports of a sandbox, and for nothing else.
    pub fn traffic_token(&self, sandbox: &str) -> String {
        self.derive(&format!("{sandbox}/ports"))
    }

    /// Returns the credential for one port of a sandbox, and for nothing else.
    pub fn preview_token(&self, sandbox: &str, port: u16) -> String {
        self.derive(&format!("{sandbox}/ports/{port}"))
    }

    /// Returns whether a client has the credential of a sandbox.
    pub fn is_token(&self, sandbox: &str, presented: &str) -> bool {
        is_equal(&self.token(sandbox), presented)
    }

    /// Returns whether a client has a credential that opens a port of a sandbox.
    pub fn opens_port(&self, sandbox: &str, port: u16, presented: &str) -> bool {
        is_equal(&self.preview_token(sandbox, port), presented)
            | is_equal(&self.traffic_token(sandbox), presented)
    }
}

/// Compares a credential with the one that a client presents, in constant time.
pub fn is_equal(credential: &str, presented: &str) -> bool {
    !credential.is_empty() && bool::from(credential.as_bytes().ct_eq(presented.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_of_one_sandbox_and_one_key() {
        let (ours, theirs) = (Key::from_text("a".to_owned()), Key::from_text("b".to_owned()));
        let token = ours.token("one");
        assert!(ours.is_token("one", &token));
        assert!(!ours.is_token("two", &token) && !theirs.is_token("one", &token));
        assert!(!ours.is_token("one", "") && !ours.is_token("one", &token[1..]));
    }

    #[test]
    fn credential_of_a_port_opens_nothing_else() {
        let key = Key::from_text("a".to_owned());
        let (all, one) = (key.traffic_token("one"), key.preview_token("one", 80));
        assert!(key.opens_port("one", 80, &one) && !key.opens_port("one", 81, &one));
        assert!(key.opens_port("one", 80, &all) && key.opens_port("one", 81, &all));
        for wrong in [&all, &one] {
            assert!(!key.is_token("one", wrong) && !key.opens_port("two", 80, wrong));
        }
        assert!(!key.opens_port("one", 80, &key.token("one")));
    }
}
