//! Names of images in registries.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use pvmm_images::oci::Digest;

const MAX_REPOSITORY: usize = 255;
const MAX_TAG: usize = 128;

/// The name of an image: `HOST/REPOSITORY`, then `:TAG`, `@DIGEST`, both or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The host, with a port if it has one.
    pub registry: String,
    pub repository: String,
    pub tag: String,
    pub digest: Option<Digest>,
}

impl Reference {
    /// Returns the digest, or else the tag, as the API asks for it.
    pub fn wanted(&self) -> String {
        self.digest.as_ref().map_or_else(|| self.tag.clone(), Digest::to_string)
    }

    /// Returns the address of the registry. One on this host speaks plain HTTP, others TLS.
    pub fn origin(&self) -> String {
        let scheme = if is_local(&self.registry) { "http" } else { "https" };
        format!("{scheme}://{}", self.registry)
    }
}

/// Returns whether a host, which may have a port, is this one.
pub fn is_local(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.strip_prefix("docker://").unwrap_or(text);
        let (text, digest) = match text.split_once('@') {
            Some((text, digest)) => (text, Some(digest.parse()?)),
            None => (text, None),
        };
        let named = text.split_once('/').filter(|(host, _)| is_host(host));
        let (registry, rest) = named.ok_or("name the registry as well: HOST/NAME:TAG")?;
        let (repository, tag) = rest.rsplit_once(':').unwrap_or((rest, "latest"));
        let part = |part: &str| {
            let inner = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '.' | '_' | '-');
            part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(inner)
        };
        if repository.len() > MAX_REPOSITORY || !repository.split('/').all(part) {
            return Err("a name has small letters, digits, '.', '_', '-' and '/'".into());
        }
        let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if tag.is_empty() || tag.len() > MAX_TAG || !tag.chars().all(inner) {
            return Err("a tag has letters, digits, '.', '_' and '-'".into());
        }
        let (registry, repository, tag) = (registry.into(), repository.into(), tag.into());
        Ok(Self { registry, repository, tag, digest })
    }
}

/// Returns whether the first part of a name is a host, as container tools tell it: it has a dot or
/// a port, or is `localhost`.
fn is_host(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':' | '[' | ']');
    text.chars().all(inner) && (text.contains(['.', ':']) || text == "localhost")
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{}", self.registry, self.repository, self.tag)?;
        self.digest.as_ref().map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_has_a_host_and_a_tag_or_a_digest() {
        let read = |text: &str| text.parse::<Reference>();
        let one = read("localhost:5000/team/app:v1").unwrap();
        assert_eq!(
            (&*one.registry, &*one.repository, &*one.tag),
            ("localhost:5000", "team/app", "v1")
        );
        assert_eq!((one.origin(), one.wanted()), ("http://localhost:5000".into(), "v1".into()));
        let digest = Digest::of(b"x").to_string();
        let two = read(&format!("docker://r.example.com/app@{digest}")).unwrap();
        assert_eq!((two.origin(), two.wanted()), ("https://r.example.com".into(), digest));
        for wrong in [
            "",
            "app",
            "team/app:1",
            "r.test/",
            "r.test/App",
            "r.test/../x",
            "r.test/a:b:c",
            "r.test/a@x",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_this_host_is_spoken_to_without_tls() {
        for local in ["localhost", "localhost:5000", "127.0.0.1:5000", "[::1]:5000"] {
            assert!(is_local(local), "{local}");
        }
        for other in ["localhost.test", "10.0.0.1:5000", "127.0.0.1.test"] {
            assert!(!is_local(other), "{other}");
        }
    }
}
