//! Selects the modules that a guest needs and sorts them in load order.
//!
//! The order comes from the modules themselves, so that neither depmod nor kmod has to be
//! installed.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Read};

use lzma_rust2::XzReader;
use ruzstd::decoding::StreamingDecoder;

use super::elf;

/// The largest module; it stops a crafted file from filling memory.
const MODULE_CAP: u64 = 64 << 20;

#[derive(Debug, thiserror::Error)]
pub enum ModulesError {
    #[error("the kernel package has no module {name}, and it is not built in")]
    Missing { name: String },
    #[error("cannot decompress module {name}")]
    Decompress { name: String, source: io::Error },
    #[error("module {name} is not an x86-64 ELF object with module information")]
    NotAModule { name: String },
    #[error("modules {names} need one another in a circle")]
    Circle { names: String },
}

/// The modules of a kernel package as stored, and the names of the built-in ones.
#[derive(Debug, Default)]
pub(super) struct Offer {
    /// Maps a name to (compression suffix, bytes).
    files: BTreeMap<String, (String, Vec<u8>)>,
    built_in: HashSet<String>,
}

impl Offer {
    /// Whether a file of the package is a module.
    pub(super) fn is_module(file_name: &str) -> bool {
        split(file_name).is_some()
    }

    pub(super) fn add(&mut self, file_name: &str, bytes: Vec<u8>) {
        if let Some((name, suffix)) = split(file_name) {
            self.files.insert(name, (suffix.to_owned(), bytes));
        }
    }

    /// Adds the names in `modules.builtin`: one path per line.
    pub(super) fn add_built_in(&mut self, list: &str) {
        let names = list.lines().filter_map(|line| split(line.rsplit('/').next()?));
        self.built_in.extend(names.map(|(name, _)| name));
    }

    /// Returns `wanted` and all dependencies, uncompressed, each after its own dependencies.
    pub(super) fn in_order(&self, wanted: &[&str]) -> Result<Vec<(String, Vec<u8>)>, ModulesError> {
        let mut order = Vec::new();
        let mut path = Vec::new();
        for name in wanted {
            self.visit(&spelled(name), &mut path, &mut order)?;
        }
        Ok(order)
    }

    fn visit(
        &self,
        name: &str,
        path: &mut Vec<String>,
        order: &mut Vec<(String, Vec<u8>)>,
    ) -> Result<(), ModulesError> {
        if self.built_in.contains(name) || order.iter().any(|(done, _)| done == name) {
            return Ok(());
        }
        if path.iter().any(|above| above == name) {
            return Err(ModulesError::Circle { names: path.join(", ") });
        }
        let (suffix, packed) =
            self.files.get(name).ok_or_else(|| ModulesError::Missing { name: name.to_owned() })?;
        let bytes = unpack(suffix, packed)
            .map_err(|source| ModulesError::Decompress { name: name.to_owned(), source })?;
        let needs =
            depends(&bytes).ok_or_else(|| ModulesError::NotAModule { name: name.to_owned() })?;
        path.push(name.to_owned());
        for need in needs {
            self.visit(&need, path, order)?;
        }
        path.pop();
        order.push((name.to_owned(), bytes));
        Ok(())
    }
}

/// Splits `virtio-rng.ko.xz` into (`virtio_rng`, `.xz`).
fn split(file_name: &str) -> Option<(String, &str)> {
    let (name, suffix) = file_name.rsplit_once(".ko")?;
    matches!(suffix, "" | ".xz" | ".zst" | ".gz").then(|| (spelled(name), suffix))
}

/// Normalizes a module's name: to the kernel `-` and `_` are equal.
fn spelled(name: &str) -> String {
    name.replace('-', "_")
}

fn unpack(suffix: &str, packed: &[u8]) -> io::Result<Vec<u8>> {
    let stream: Box<dyn Read + '_> = match suffix {
        ".xz" => Box::new(XzReader::new(packed, false)),
        ".zst" => Box::new(StreamingDecoder::new(packed).map_err(io::Error::other)?),
        ".gz" => Box::new(flate2::read::GzDecoder::new(packed)),
        _ => Box::new(packed),
    };
    let mut bytes = Vec::new();
    stream.take(MODULE_CAP).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the `depends=` entry of a module's `.modinfo`.
fn depends(module: &[u8]) -> Option<Vec<String>> {
    let info = elf::section(module, b".modinfo")?;
    let line = info.split(|&byte| byte == 0).find_map(|line| line.strip_prefix(b"depends="))?;
    let names = std::str::from_utf8(line).ok()?;
    Some(names.split(',').filter(|name| !name.is_empty()).map(spelled).collect())
}
