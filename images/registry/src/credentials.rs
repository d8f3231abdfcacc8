//! Names and passwords of registries, from the files that container tools write.

use std::collections::BTreeMap;
use std::env;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

/// The most of such a file that is read.
const MAX_FILE: u64 = 1 << 20;

/// The credentials for one registry, as a header has them. They are not shown.
#[derive(Clone)]
pub struct Credentials(String);

#[derive(Deserialize)]
struct AuthFile {
    #[serde(default)]
    auths: BTreeMap<String, Auth>,
}

#[derive(Deserialize)]
struct Auth {
    #[serde(default)]
    auth: String,
}

impl Credentials {
    /// Returns the credentials that container tools keep for a registry, if there are any.
    pub fn of(registry: &str) -> Option<Self> {
        files().into_iter().find_map(|path| {
            let mut text = String::new();
            File::open(path).ok()?.take(MAX_FILE).read_to_string(&mut text).ok()?;
            Self::in_file(&text, registry)
        })
    }

    fn in_file(text: &str, registry: &str) -> Option<Self> {
        let file: AuthFile = serde_json::from_str(text).ok()?;
        let plain = |key: &str| {
            let key = key.trim_start_matches("https://").trim_start_matches("http://");
            key.split('/').next() == Some(registry)
        };
        let (_, found) = file.auths.iter().find(|(key, _)| plain(key))?;
        let decoded = STANDARD.decode(found.auth.trim()).ok()?;
        decoded.contains(&b':').then(|| Self(STANDARD.encode(decoded)))
    }

    /// Returns the value of the header `Authorization`.
    pub fn header(&self) -> String {
        format!("Basic {}", self.0)
    }
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials")
    }
}

/// Returns the places of the files, the first of which counts.
fn files() -> Vec<PathBuf> {
    let below = |name, rest: &str| env::var_os(name).map(|dir| PathBuf::from(dir).join(rest));
    let given = env::var_os("REGISTRY_AUTH_FILE").map(PathBuf::from);
    let places = [
        given,
        below("XDG_RUNTIME_DIR", "containers/auth.json"),
        below("DOCKER_CONFIG", "config.json"),
        below("HOME", ".docker/config.json"),
    ];
    places.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_those_of_the_registry_and_are_not_shown() {
        let file =
            r#"{"auths": {"https://r.test/v1/": {"auth": "dTpw"}, "b.test": {"auth": "?"}}}"#;
        let found = Credentials::in_file(file, "r.test").unwrap();
        assert_eq!(
            (found.header(), format!("{found:?}")),
            ("Basic dTpw".into(), "Credentials".into())
        );
        for other in ["b.test", "test", "r.test:5000"] {
            assert!(Credentials::in_file(file, other).is_none(), "{other}");
        }
        assert!(Credentials::in_file("no JSON", "r.test").is_none());
    }
}
