//! The documents of an image: index, manifest and configuration, as far as they are used.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::digest::Digest;
use crate::source::Settings;

/// The most layers of an image; container runtimes allow as many.
pub const MAX_LAYERS: usize = 128;

/// A list of images, of which one is chosen.
#[derive(Debug, Deserialize)]
pub struct Index {
    pub manifests: Vec<Descriptor>,
}

/// A reference to another part of an image.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default)]
    pub media_type: String,
    pub digest: Digest,
    #[serde(default)]
    pub platform: Option<Platform>,
    #[serde(default)]
    pub annotations: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Platform {
    #[serde(default)]
    pub architecture: String,
    #[serde(default)]
    pub os: String,
}

impl Descriptor {
    /// Returns whether the part may be an image for this host.
    pub fn fits(&self) -> bool {
        self.platform.as_ref().is_none_or(|it| it.os == "linux" && it.architecture == "amd64")
    }

    /// Returns the name under which an index has the part.
    pub fn name(&self) -> Option<&str> {
        self.annotations.as_ref()?.get("org.opencontainers.image.ref.name").map(String::as_str)
    }
}

/// An image: its configuration and its layers, lowest first.
#[derive(Debug, Deserialize)]
pub struct Manifest {
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
}

/// An entry of `manifest.json`, which an archive of `docker save` has in place of an index.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct DockerImage {
    pub config: String,
    #[serde(default)]
    pub repo_tags: Option<Vec<String>>,
    pub layers: Vec<String>,
}

/// The configuration of an image.
#[derive(Debug, Deserialize)]
pub struct Config {
    #[serde(default)]
    pub architecture: String,
    #[serde(default)]
    pub os: String,
    #[serde(default)]
    pub config: Option<Run>,
    pub rootfs: RootFs,
}

/// The digests of the layers without compression, lowest first.
#[derive(Debug, Deserialize)]
pub struct RootFs {
    pub diff_ids: Vec<Digest>,
}

/// How the programs of an image want to be run.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Run {
    pub user: Option<String>,
    pub env: Option<Vec<String>>,
    pub entrypoint: Option<Vec<String>>,
    pub cmd: Option<Vec<String>>,
    pub working_dir: Option<String>,
    pub exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    pub labels: Option<BTreeMap<String, String>>,
}

impl Run {
    /// Returns the settings in the form that templates keep.
    pub fn settings(&self) -> Settings {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let pair = |text: &String| {
            let (name, value) = text.split_once('=')?;
            (!name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
        };
        Settings {
            env: self.env.iter().flatten().filter_map(pair).collect(),
            workdir: given(&self.working_dir),
            user: given(&self.user),
            entrypoint: self.entrypoint.clone().filter(|words| !words.is_empty()),
            cmd: self.cmd.clone().filter(|words| !words.is_empty()),
            ports: self.exposed_ports.iter().flatten().map(|(port, _)| port.clone()).collect(),
            labels: self.labels.clone().into_iter().flatten().collect(),
        }
    }
}
