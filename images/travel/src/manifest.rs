//! The manifest: the files of a template or snapshot, and the chunks of each.
//!
//! It comes from a store that anybody may have written to, so every field is checked before one is
//! used: names lead nowhere else, and counts and sizes have caps.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::chunk::{CHUNK, Digest, count};
use crate::error::TravelError;

const FORMAT: &str = "pvmm-travel";
const VERSION: u32 = 1;
/// The largest manifest, in a store and in memory.
pub const MAX_MANIFEST: u64 = 64 << 20;
const MAX_FILES: usize = 256;
/// The most bytes of all files together, holes included.
const MAX_TOTAL: u64 = 1 << 40;
const MAX_PATH: usize = 128;
const MAX_DEPTH: usize = 3;
const MAX_NAME: usize = 63;

/// The things that travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Template,
    Snapshot,
    /// A hibernated VM.
    Hibernated,
}

impl Kind {
    /// Returns the folder of a store in which names of this kind are.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Template => "templates",
            Self::Snapshot | Self::Hibernated => "snapshots",
        }
    }
}

/// The files of a template or snapshot, and the chunks of each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    pub kind: Kind,
    pub name: String,
    chunk_bytes: u64,
    pub files: Vec<FileEntry>,
}

/// One file, and its chunks in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    pub path: String,
    pub size: u64,
    pub mode: u32,
    /// Digests in hexadecimal; an empty text is a chunk of zeros.
    pub chunks: Vec<String>,
}

impl FileEntry {
    /// Returns the digest of each chunk; `None` for zeros.
    pub fn digests(&self) -> impl Iterator<Item = Option<Digest>> {
        self.chunks.iter().map(|hex| Digest::parse(hex))
    }
}

impl Manifest {
    pub fn new(kind: Kind, name: &str, files: Vec<FileEntry>) -> Self {
        let (format, name) = (FORMAT.to_owned(), name.to_owned());
        Self { format, version: VERSION, kind, name, chunk_bytes: CHUNK, files }
    }

    pub fn encode(&self) -> Result<Vec<u8>, TravelError> {
        serde_json::to_vec(self).map_err(|error| self.refused(&error.to_string()))
    }

    /// Decodes and checks the manifest of `name`.
    pub fn decode(bytes: &[u8], name: &str) -> Result<Self, TravelError> {
        let refused = |why: String| TravelError::Manifest { name: name.to_owned(), why };
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|error| refused(error.to_string().chars().take(120).collect()))?;
        manifest.check().map_err(|why| manifest.refused(&why))?;
        if manifest.name != name {
            return Err(refused("it is of another name".into()));
        }
        Ok(manifest)
    }

    /// Returns the error for a manifest that is not as it should be.
    pub fn refused(&self, why: &str) -> TravelError {
        let name = self.name.chars().take(MAX_NAME).collect();
        TravelError::Manifest { name, why: why.to_owned() }
    }

    /// Returns the file at `path`.
    pub fn file(&self, path: &str) -> Option<&FileEntry> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Returns the size of all files, holes included.
    pub fn total(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT || self.version != VERSION {
            return Err("it is of a format that this pvmm does not read".into());
        }
        if self.chunk_bytes != CHUNK {
            return Err("its chunks have another size".into());
        }
        check_name(&self.name)?;
        if self.files.is_empty() || self.files.len() > MAX_FILES {
            return Err(format!("it has no files, or more than {MAX_FILES}"));
        }
        let (mut paths, mut total) = (BTreeSet::new(), 0u64);
        for file in &self.files {
            check_path(&file.path)?;
            if !paths.insert(file.path.as_str()) {
                return Err(format!("it has the file {} twice", file.path));
            }
            total = total.saturating_add(file.size);
            if total > MAX_TOTAL {
                return Err("its files are larger than 1 TiB".into());
            }
            if file.chunks.len() as u64 != count(file.size) {
                return Err(format!("{} has another number of chunks than its size", file.path));
            }
            if file.mode & !0o777 != 0 {
                return Err(format!("{} has special mode bits", file.path));
            }
            let known = |hex: &String| hex.is_empty() || Digest::parse(hex).is_some();
            if !file.chunks.iter().all(known) {
                return Err(format!("{} has a digest that is none", file.path));
            }
        }
        // A file in the place of a folder would make the others fail halfway.
        let inside =
            |path: &&str| path.rmatch_indices('/').any(|(at, _)| paths.contains(&path[..at]));
        match paths.iter().find(|path| inside(path)) {
            Some(path) => Err(format!("{path} is inside of a file")),
            None => Ok(()),
        }
    }
}

/// Checks a name: one component of a path, not hidden, no option.
pub fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    let first = name.bytes().next().is_some_and(|c| c.is_ascii_alphanumeric());
    if first && name.len() <= MAX_NAME && name.bytes().all(plain) {
        Ok(())
    } else {
        Err(format!("{name:?} is not a name (letters, digits, then also . _ -, at most 63)"))
    }
}

/// Checks a path: relative, of plain names that are not hidden, not deep.
fn check_path(path: &str) -> Result<(), String> {
    let whole = path.len() <= MAX_PATH && path.split('/').count() <= MAX_DEPTH;
    if whole && path.split('/').all(|part| check_name(part).is_ok()) {
        Ok(())
    } else {
        Err(format!(
            "{:?} is not a path that a file may have",
            path.chars().take(80).collect::<String>()
        ))
    }
}
