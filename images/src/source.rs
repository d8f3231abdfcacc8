//! Where a template that is not made of packages came from, and how its programs want to be run.

use serde::{Deserialize, Serialize};

/// The origin of a template's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    pub kind: SourceKind,
    /// A digest of all paths, owners, modes and contents, in their order.
    pub digest: String,
    /// The key of the build that made it, where a build of the same key need not be done again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_key: Option<String>,
    /// Settings for programs, where the source has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<Settings>,
}

/// The facts of a source that are known before its files are read.
#[derive(Clone, Debug)]
pub struct Origin {
    pub kind: SourceKind,
    pub build_key: Option<String>,
    pub settings: Option<Settings>,
}

impl Origin {
    /// Returns the origin of files that come without settings.
    pub fn of(kind: SourceKind) -> Self {
        Self { kind, build_key: None, settings: None }
    }
}

/// The kind of a template's source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceKind {
    Tar,
    Folder,
    Dockerfile,
    /// A container image.
    Image,
}

/// Settings of a Dockerfile for running its programs. The agent applies environment, working
/// directory and user; the others are kept for the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub env: Vec<(String, String)>,
    pub workdir: Option<String>,
    pub user: Option<String>,
    pub entrypoint: Option<Vec<String>>,
    pub cmd: Option<Vec<String>>,
    pub ports: Vec<String>,
    pub labels: Vec<(String, String)>,
}

impl Settings {
    /// The file in a root filesystem from which the agent reads them.
    pub const FILE: &str = "/etc/pvmm/defaults";

    /// Returns what commands get that say nothing themselves, as the agent reads it.
    pub fn defaults(&self) -> Vec<u8> {
        let env = self.env.iter().map(|(name, value)| format!("env {name}={value}\0"));
        let cwd = self.workdir.iter().map(|path| format!("cwd {path}\0"));
        let user = self.user.iter().map(|name| format!("user {name}\0"));
        env.chain(cwd).chain(user).collect::<String>().into_bytes()
    }
}
