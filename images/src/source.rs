//! Where a template that is not made of packages came from, and how its programs want to be run.

use serde::{Deserialize, Serialize};

/// The origin of a template's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    pub kind: SourceKind,
    /// A digest of all paths, owners, modes and contents, in their order.
    pub digest: String,
    /// Settings for programs, where the source has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<Settings>,
}

/// The kind of a template's source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceKind {
    Tar,
    Folder,
    Dockerfile,
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
