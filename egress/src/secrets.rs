//! Secrets that never enter the sandbox: placeholders that the guest holds, and the values that
//! stand for them in requests to one host each.
//!
//! The document with the values is written by whoever starts the process, and read from a
//! descriptor once. Values have a type of their own that no log or message can show.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::policy::normal_name;
use crate::sys;
use crate::tls::{self, TlsSides};
pub use crate::tls::{Authorities, TlsError};

/// The start of every placeholder; 32 hexadecimal digits follow.
pub const PLACEHOLDER_START: &str = "pvmm-secret-";
/// The most secrets of one sandbox.
pub const SECRETS_MAX: usize = 64;
/// The longest value. Servers refuse longer headers.
pub const VALUE_MAX: usize = 8 << 10;
// Values, certificates and private authorities together.
const DOCUMENT_MAX: u64 = 4 << 20;

/// Why secrets are not accepted. No message has a value.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    // The name may be a value that was written in its place.
    #[error("the name of a secret has letters, digits and underscores, and no digit first")]
    Name,
    #[error("secret {name}: {host:?} is not a host name; write one such as api.example.com")]
    Host { name: String, host: String },
    #[error("secret {name}: the value is empty")]
    Empty { name: String },
    #[error("secret {name}: the value has {len} bytes; the most is {VALUE_MAX}")]
    TooLong { name: String, len: usize },
    #[error(
        "secret {name}: the value has a line end or another byte that no header of HTTP may have"
    )]
    Value { name: String },
    #[error("secret {name} is given twice for {host}")]
    Twice { name: String, host: String },
    #[error("{count} secrets; the most is {SECRETS_MAX}")]
    TooMany { count: usize },
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("cannot read the secrets: {0}")]
    Read(#[from] io::Error),
    #[error("the document of the secrets is damaged")]
    Document,
}

/// The value of a secret. It is never printed, and overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretValue(Zeroizing<String>);

impl SecretValue {
    pub fn new(value: String) -> Self {
        Self(Zeroizing::new(value))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretValue")
    }
}

impl Serialize for SecretValue {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for SecretValue {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::new)
    }
}

/// One secret, before it has a placeholder.
#[derive(Clone, Debug)]
pub struct NewSecret {
    pub name: String,
    pub host: String,
    pub value: SecretValue,
}

/// The document that the process reads: values, and the certificate that it shows to the guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretsDocument {
    secrets: Vec<Entry>,
    /// PEM of the certificate for all hosts of the secrets.
    certificate: String,
    key: SecretValue,
    /// PEM of authorities that are trusted beside those of this host.
    authorities: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    host: String,
    placeholder: String,
    value: SecretValue,
}

/// The part of the secrets that the guest is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placeholders {
    /// Names of environment variables, and the placeholder of each.
    pub variables: Vec<(String, String)>,
    /// The hosts whose requests get the values.
    pub hosts: Vec<String>,
    /// PEM of the authority that signed the certificate shown to the guest.
    pub authority: String,
}

impl SecretsDocument {
    /// Checks secrets, gives each name a placeholder, and makes the certificate that is shown to
    /// the guest. The key of its authority is dropped at once, so that it signs no other.
    /// `authorities` is PEM of authorities that are trusted beside those of the host.
    pub fn new(
        secrets: Vec<NewSecret>,
        authorities: String,
    ) -> Result<(Self, Placeholders), SecretsError> {
        if secrets.len() > SECRETS_MAX {
            return Err(SecretsError::TooMany { count: secrets.len() });
        }
        let mut entries: Vec<Entry> = Vec::with_capacity(secrets.len());
        let mut shown = Placeholders::default();
        for NewSecret { name, host, value } in secrets {
            let host = check(&name, &host, &value)?;
            if entries.iter().any(|entry| entry.name == name && entry.host == host) {
                return Err(SecretsError::Twice { name, host });
            }
            let known = shown.variables.iter().find(|(other, _)| *other == name);
            let placeholder = match known {
                Some((_, placeholder)) => placeholder.clone(),
                None => {
                    let random = u128::from_be_bytes(sys::random()?);
                    let placeholder = format!("{PLACEHOLDER_START}{random:032x}");
                    shown.variables.push((name.clone(), placeholder.clone()));
                    placeholder
                }
            };
            if !shown.hosts.contains(&host) {
                shown.hosts.push(host.clone());
            }
            entries.push(Entry { name, host, placeholder, value });
        }
        // Refused here, where somebody reads the message.
        tls::parse_authorities(&authorities)?;
        let tls::Made { authority, certificate, key } = tls::make_certificate(&shown.hosts)?;
        shown.authority = authority;
        let key = SecretValue(key);
        Ok((Self { secrets: entries, certificate, key, authorities }, shown))
    }

    /// Reads the document from a file.
    pub fn read(file: File) -> Result<Self, SecretsError> {
        let mut text = Zeroizing::new(String::new());
        file.take(DOCUMENT_MAX).read_to_string(&mut text)?;
        serde_json::from_str(&text).map_err(|_| SecretsError::Document)
    }

    /// Returns the document's bytes.
    pub fn to_bytes(&self) -> Result<Zeroizing<Vec<u8>>, SecretsError> {
        serde_json::to_vec(self).map(Zeroizing::new).map_err(|_| SecretsError::Document)
    }
}

/// Checks one secret. Returns its host in normal form.
fn check(name: &str, host: &str, value: &SecretValue) -> Result<String, SecretsError> {
    let owned = || name.to_owned();
    let is_start = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    let good_name = name.bytes().next().is_some_and(is_start)
        && name.bytes().all(|byte| is_start(byte) || byte.is_ascii_digit());
    if !good_name || name.len() > 255 {
        return Err(SecretsError::Name);
    }
    let normal = normal_name(host).filter(|_| host.parse::<std::net::IpAddr>().is_err());
    let host = normal.ok_or_else(|| SecretsError::Host { name: owned(), host: host.to_owned() })?;
    let value = value.as_str();
    if value.is_empty() {
        return Err(SecretsError::Empty { name: owned() });
    }
    if value.len() > VALUE_MAX {
        return Err(SecretsError::TooLong { name: owned(), len: value.len() });
    }
    // A line end would let the value begin another header.
    if value.bytes().any(|byte| byte < b' ' || byte == 0x7f) {
        return Err(SecretsError::Value { name: owned() });
    }
    Ok(host)
}

/// One secret of the sandbox.
#[derive(Debug)]
pub struct Secret {
    pub name: String,
    pub host: String,
    pub placeholder: String,
    pub value: SecretValue,
    /// The requests that got the value.
    pub uses: Cell<u64>,
}

/// A secret as a control client sees it.
#[derive(Debug, Serialize)]
pub struct SecretReport<'a> {
    pub name: &'a str,
    pub host: &'a str,
    pub uses: u64,
}

/// All secrets of a sandbox, and the two sides of TLS towards their hosts.
#[derive(Debug, Default)]
pub struct Secrets {
    all: Vec<Rc<Secret>>,
    pub tls: Option<TlsSides>,
}

impl Secrets {
    /// Prepares the secrets of a document. Nothing is opened later.
    pub fn new(document: SecretsDocument, host: Authorities) -> Result<Self, SecretsError> {
        let (certificate, key) = (&document.certificate, document.key.as_str());
        let authorities = host.and(&document.authorities)?;
        let tls = Some(TlsSides::new(certificate, key, authorities)?);
        let prepare = |entry: Entry| {
            let host = check(&entry.name, &entry.host, &entry.value)?;
            let Entry { name, placeholder, value, .. } = entry;
            Ok(Rc::new(Secret { name, host, placeholder, value, uses: Cell::new(0) }))
        };
        let all: Result<_, SecretsError> = document.secrets.into_iter().map(prepare).collect();
        Ok(Self { all: all?, tls })
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the secrets of a host, by its name in normal form.
    pub fn of_host(&self, host: &str) -> Vec<Rc<Secret>> {
        self.all.iter().filter(|secret| secret.host == host).cloned().collect()
    }

    pub fn report(&self) -> Vec<SecretReport<'_>> {
        let all = self.all.iter().map(|secret| (secret, secret.uses.get()));
        all.map(|(secret, uses)| SecretReport { name: &secret.name, host: &secret.host, uses })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, host: &str, value: &str) -> NewSecret {
        let value = SecretValue::new(value.to_owned());
        NewSecret { name: name.to_owned(), host: host.to_owned(), value }
    }

    fn refused(secrets: Vec<NewSecret>) -> String {
        SecretsDocument::new(secrets, String::new()).unwrap_err().to_string()
    }

    #[test]
    fn each_name_has_one_placeholder_that_nobody_can_guess() {
        let all = vec![
            secret("TOKEN", "a.example", "1"),
            secret("TOKEN", "B.example.", "2"),
            secret("_K2", "a.example", "3"),
        ];
        let (document, shown) = SecretsDocument::new(all, String::new()).unwrap();
        let [token, key] = &shown.variables[..] else { panic!("{shown:?}") };
        assert_eq!((token.0.as_str(), key.0.as_str()), ("TOKEN", "_K2"));
        assert_ne!(token.1, key.1);
        assert_eq!(token.1.len(), PLACEHOLDER_START.len() + 32);
        assert_eq!(shown.hosts, ["a.example", "b.example"]);
        let secrets = Secrets::new(document, Authorities::default()).unwrap();
        assert_eq!(secrets.of_host("b.example").len(), 1);
        assert_eq!(secrets.of_host("c.example").len(), 0);
    }

    #[test]
    fn value_is_never_printed() {
        let (document, _) =
            SecretsDocument::new(vec![secret("A", "a.example", "hunter2")], String::new()).unwrap();
        assert!(!format!("{document:?}").contains("hunter2"));
        let bytes = document.to_bytes().unwrap();
        assert!(String::from_utf8_lossy(&bytes).contains("hunter2"));
        let secrets = Secrets::new(document, Authorities::default()).unwrap();
        assert!(!format!("{secrets:?}").contains("hunter2"));
        let report = serde_json::to_string(&secrets.report()).unwrap();
        assert_eq!(report, r#"[{"name":"A","host":"a.example","uses":0}]"#);
    }

    #[test]
    fn secret_that_no_request_could_carry_is_refused_without_its_value() {
        for (bad, why) in [
            (secret("", "a.example", "v-1"), "letters"),
            (secret("1A", "a.example", "v-1"), "letters"),
            (secret("A-B", "a.example", "v-1"), "letters"),
            (secret("A", "", "v-1"), "not a host name"),
            (secret("A", "*.example.com", "v-1"), "not a host name"),
            (secret("A", "10.0.0.1", "v-1"), "not a host name"),
            (secret("A", "a.example:443", "v-1"), "not a host name"),
            (secret("A", "a.example", ""), "empty"),
            (secret("A", "a.example", "v-1\r\nHost: b.example"), "line end"),
            (secret("A", "a.example", "v-1\0"), "line end"),
            (secret("A", "a.example", &"v-1".repeat(VALUE_MAX)), "the most is 8192"),
        ] {
            let message = refused(vec![bad]);
            assert!(message.contains(why) && !message.contains("v-1"), "{message}");
        }
        let twice = vec![secret("A", "a.example", "v-1"), secret("A", "A.example", "v-2")];
        assert!(refused(twice).contains("given twice for a.example"));
        let many = (0..=SECRETS_MAX).map(|n| secret(&format!("A{n}"), "a.example", "v")).collect();
        assert!(refused(many).contains("65 secrets"));
    }

    #[test]
    fn authorities_that_are_none_are_refused() {
        for pem in ["x", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            let all = vec![secret("A", "a.example", "v")];
            let refused = SecretsDocument::new(all, pem.to_owned()).unwrap_err().to_string();
            assert!(refused.contains("not PEM"), "{refused}");
        }
    }
}
