//! The signatures of addresses of files, which are made from a sandbox's credential.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest, Sha256};

use crate::clock;
use crate::keys::is_equal;

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

    /// Returns whether the signature was made with this credential.
    pub fn is_of(&self, token: &str) -> bool {
        is_equal(&self.expected(token), self.signature)
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
