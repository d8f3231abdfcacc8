//! Container images on this host: an OCI layout in a folder or an archive, or an archive of
//! `docker save`.
//!
//! Every part is compared with its digest: the manifest, the configuration, each layer as it is
//! stored, and each layer again without its compression.

mod digest;
pub mod document;
mod files;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::compression;
use crate::rootfs::{Import, ImportError};
use crate::source::Settings;
pub use digest::{Checked, Digest};
use document::{Config, Descriptor, DockerImage, Index, MAX_LAYERS, Manifest, Run};
use files::Files;

/// The largest document of an image.
const MAX_DOCUMENT: u64 = 4 << 20;
/// How deep an index may be in another.
const MAX_DEPTH: u32 = 3;

#[derive(Debug, thiserror::Error)]
pub enum OciError {
    #[error("cannot read the image {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot read {part} of the image")]
    Part { part: String, source: io::Error },
    #[error("{part} of the image is not what it should be")]
    Form { part: String, source: serde_json::Error },
    #[error("{0}")]
    Refused(String),
}

/// A container image whose documents are read and checked.
pub struct Image {
    files: Files,
    id: Digest,
    config: Config,
    layers: Vec<Layer>,
}

/// A stored layer.
struct Layer {
    path: String,
    /// The digest of the stored bytes, which an archive of `docker save` does not have.
    stored: Option<Digest>,
}

impl Image {
    /// Opens the image `name` of a folder or an archive; without a name, the only one.
    pub fn open(path: &Path, name: Option<&str>) -> Result<Self, OciError> {
        let failed = |source| OciError::Open { path: path.to_owned(), source };
        let files = Files::open(path).map_err(failed)?;
        let layout = files.read("index.json").map(drop);
        let image = match layout {
            Ok(()) => from_layout(files, name)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => from_docker(files, name)?,
            Err(source) => return Err(OciError::Part { part: "index.json".into(), source }),
        };
        image.check()?;
        Ok(image)
    }

    /// Opens the image of a manifest whose parts are in the folder `store`, as files in
    /// `blobs/sha256` that have their digests for names.
    pub fn in_store(store: &Path, manifest: &Digest) -> Result<Self, OciError> {
        let files = Files::Folder(store.to_owned());
        let bytes = blob(&files, manifest)?;
        let image = from_manifest(files, document(&manifest.to_string(), &bytes)?)?;
        image.check()?;
        Ok(image)
    }

    fn check(&self) -> Result<(), OciError> {
        let refuse = |text: String| Err(OciError::Refused(text));
        let (os, architecture) = (&self.config.os, &self.config.architecture);
        if os != "linux" || architecture != "amd64" {
            return refuse(format!("the image is for {os}/{architecture}: linux/amd64 runs here"));
        }
        let (layers, ids) = (self.layers.len(), self.config.rootfs.diff_ids.len());
        if layers != ids {
            return refuse(format!("the image has {layers} layers, its configuration {ids}"));
        }
        if layers > MAX_LAYERS {
            return refuse(format!("the image has more than {MAX_LAYERS} layers"));
        }
        Ok(())
    }

    /// Returns the digest of the configuration, which names the image: it has the digests of all
    /// layers.
    pub fn id(&self) -> &Digest {
        &self.id
    }

    /// Returns how the programs of the image want to be run.
    pub fn settings(&self) -> Settings {
        self.config.config.as_ref().map(Run::settings).unwrap_or_default()
    }

    /// Unpacks all layers, lowest first.
    pub fn unpack(&self, import: &mut Import<'_>) -> Result<(), ImportError> {
        let failed = |source| ImportError::Read { source };
        for (layer, id) in self.layers.iter().zip(&self.config.rootfs.diff_ids) {
            let stream = self.files.read(&layer.path).map_err(failed)?;
            let mut stored: Box<dyn Read> = match &layer.stored {
                Some(digest) => Box::new(Checked::new(stream, digest)),
                None => stream,
            };
            let plain = compression::open(&mut stored).map_err(failed)?;
            import.layer(Checked::new(plain, id))?;
            // What follows the end of the compressed stream belongs to the digest as well.
            io::copy(&mut stored, &mut io::sink()).map_err(failed)?;
        }
        Ok(())
    }
}

fn from_layout(files: Files, name: Option<&str>) -> Result<Image, OciError> {
    let index: Index = document("index.json", &read(&files, "index.json")?)?;
    let mut descriptor = choose(&index, name)?;
    let mut depth = 0;
    let manifest: Manifest = loop {
        let bytes = blob(&files, &descriptor.digest)?;
        let part = descriptor.digest.to_string();
        // Older writers leave the media type out, so what a document is is seen by its content.
        match document::<Index>(&part, &bytes) {
            Ok(inner) if depth < MAX_DEPTH => descriptor = choose(&inner, None)?,
            Ok(_) => return Err(OciError::Refused("the image has too many indexes".into())),
            Err(_) => break document(&part, &bytes)?,
        }
        depth += 1;
    };
    from_manifest(files, manifest)
}

fn from_manifest(files: Files, manifest: Manifest) -> Result<Image, OciError> {
    let config =
        document(&manifest.config.digest.to_string(), &blob(&files, &manifest.config.digest)?)?;
    if manifest.layers.iter().any(|layer| layer.media_type.contains("foreign")) {
        return Err(OciError::Refused("the image has a layer that is kept elsewhere".into()));
    }
    let layer =
        |layer: Descriptor| Layer { path: place(&layer.digest), stored: Some(layer.digest) };
    let layers = manifest.layers.into_iter().map(layer).collect();
    Ok(Image { files, id: manifest.config.digest, config, layers })
}

fn from_docker(files: Files, name: Option<&str>) -> Result<Image, OciError> {
    let bytes = read(&files, "manifest.json").map_err(|_| {
        OciError::Refused("neither index.json nor manifest.json is there: this is no image".into())
    })?;
    let images: Vec<DockerImage> = document("manifest.json", &bytes)?;
    let tags = |image: &DockerImage| image.repo_tags.clone().unwrap_or_default();
    let fits =
        |image: &&DockerImage| name.is_none_or(|name| tags(image).iter().any(|tag| tag == name));
    let found: Vec<_> = images.iter().filter(fits).collect();
    let [image] = found[..] else {
        return Err(one_of(name, images.iter().flat_map(tags)));
    };
    let bytes = read(&files, &image.config)?;
    let (config, layers) = (document(&image.config, &bytes)?, image.layers.iter());
    let layers = layers.map(|path| Layer { path: path.clone(), stored: None }).collect();
    Ok(Image { files, id: Digest::of(&bytes), config, layers })
}

/// Returns the image of an index for this host.
fn choose(index: &Index, name: Option<&str>) -> Result<Descriptor, OciError> {
    let fits = |one: &&Descriptor| one.fits() && (name.is_none() || one.name() == name);
    let found: Vec<_> = index.manifests.iter().filter(fits).collect();
    match found[..] {
        [one] => Ok(one.clone()),
        _ => Err(one_of(
            name,
            index.manifests.iter().filter_map(|one| one.name().map(str::to_owned)),
        )),
    }
}

fn one_of(name: Option<&str>, names: impl Iterator<Item = String>) -> OciError {
    let names: Vec<_> = names.take(10).collect();
    let wanted = name.map_or_else(|| "one".to_owned(), |name| format!("{name:?}"));
    let there = if names.is_empty() { "none with a name".into() } else { names.join(", ") };
    OciError::Refused(format!("{wanted} image for linux/amd64 was expected; there are: {there}"))
}

fn place(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Reads a document that has its digest for a name.
fn blob(files: &Files, digest: &Digest) -> Result<Vec<u8>, OciError> {
    let bytes = read(files, &place(digest))?;
    if Digest::of(&bytes) == *digest {
        Ok(bytes)
    } else {
        Err(OciError::Refused(format!("{digest} has other bytes")))
    }
}

fn read(files: &Files, path: &str) -> Result<Vec<u8>, OciError> {
    let failed = |source| OciError::Part { part: path.to_owned(), source };
    let mut bytes = Vec::new();
    let stream = files.read(path).map_err(failed)?;
    stream.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(OciError::Refused(format!("{path} of the image has more than 4 MiB")));
    }
    Ok(bytes)
}

fn document<T: DeserializeOwned>(part: &str, bytes: &[u8]) -> Result<T, OciError> {
    serde_json::from_slice(bytes).map_err(|source| OciError::Form { part: part.to_owned(), source })
}

#[cfg(test)]
mod tests;
