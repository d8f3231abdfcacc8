//! The credentials of one sandbox, and the signatures of addresses that are made from them.
//!
//! A credential is derived from a key of the data directory and the sandbox's id. Nothing is kept
//! for a sandbox, and a restart of the server changes no credential.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::clock;

/// The key of a data directory.
pub struct Key(String);

impl Key {
    /// Takes up the key that a data directory has.
    pub fn from_text(text: String) -> Self {
        Self(text)
    }

    /// Returns the credential of a sandbox.
    pub fn token(&self, sandbox: &str) -> String {
        // A key of any length is a key.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(self.0.as_bytes()) else {
            return String::new();
        };
        mac.update(sandbox.as_bytes());
        let bytes = mac.finalize().into_bytes();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns whether a client has the credential of a sandbox.
    pub fn is_token(&self, sandbox: &str, presented: &str) -> bool {
        let token = self.token(sandbox);
        !token.is_empty() && bool::from(token.as_bytes().ct_eq(presented.as_bytes()))
    }

    /// Returns whether a signature was made with the credential of a sandbox.
    pub fn is_signature(&self, sandbox: &str, signed: &Signed<'_>) -> bool {
        let token = self.token(sandbox);
        let expected = signed.expected(&token);
        !token.is_empty() && bool::from(expected.as_bytes().ct_eq(signed.signature.as_bytes()))
    }
}

/// The signed parts of a request for a file.
#[derive(Clone, Copy, Debug)]
pub struct Signed<'a> {
    /// The path of the file, as the client wrote it.
    pub path: &'a str,
    /// Either `read` or `write`.
    pub operation: &'static str,
    /// The user, or nothing.
    pub user: &'a str,
    /// The time until which the signature holds, in seconds since 1970.
    pub expires: Option<u64>,
    /// The signature.
    pub signature: &'a str,
}

impl Signed<'_> {
    /// Returns whether the time of the signature is over.
    pub fn has_expired(&self) -> bool {
        self.expires.is_some_and(|at| at <= clock::now_ms() / 1000)
    }

    fn expected(&self, token: &str) -> String {
        let Self { path, operation, user, expires, .. } = self;
        let mut text = format!("{path}:{operation}:{user}:{token}");
        if let Some(expires) = expires {
            text.push_str(&format!(":{expires}"));
        }
        format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())))
    }
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
    fn signature_is_the_clients() {
        // Made with the published client.
        let signed = Signed {
            path: "/home/a b.txt",
            operation: "read",
            user: "root",
            expires: Some(1_900_000_000),
            signature: "",
        };
        let with_time = "v1_Gk//sqevVqtIxFGQBiEgNuWZTNEDVeT5XqYlHIfC790";
        assert_eq!(signed.expected("secret"), with_time);
        let plain = Signed { path: "x", operation: "write", user: "", expires: None, ..signed };
        assert_eq!(plain.expected("secret"), "v1_bxPau9bge0yo1a56OLWw1OCnJmT31nWVHAtCb2y0BSA");
        assert!(!signed.has_expired());
        assert!(Signed { expires: Some(1), ..signed }.has_expired());
    }
}
