//! Fetches the parts of an image that are missing.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use pvmm_images::Progress;
use pvmm_images::oci::document::{Descriptor, Index, MAX_LAYERS, Manifest};
use pvmm_images::oci::{Checked, Digest};

use crate::client::{Client, RegistryError};
use crate::credentials::Credentials;
use crate::reference::Reference;

/// The largest document, and the largest layer.
const MAX_DOCUMENT: u64 = 4 << 20;
const MAX_LAYER: u64 = 16 << 30;
const CHUNK: usize = 256 << 10;
/// Bytes between two signs of progress.
const EVERY: u64 = 8 << 20;
const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// Returns the digest of the manifest that was last fetched for a name, if all of it is there.
pub fn known(store: &Path, reference: &Reference) -> Option<Digest> {
    fs::read_to_string(name_file(store, reference)).ok()?.trim().parse().ok()
}

/// Fetches an image into the folder `store` and returns the digest of its manifest. Parts that are
/// there already are not asked for.
pub fn pull(
    reference: &Reference,
    store: &Path,
    progress: &mut dyn Progress,
) -> Result<Digest, RegistryError> {
    let mut client = Client::new(reference, Credentials::of(&reference.registry));
    let blobs = store.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(at(&blobs))?;
    progress.step(&format!("Fetching {reference}"));
    let (mut digest, mut bytes) =
        document(&mut client, &reference.wanted(), reference.digest.as_ref())?;
    if let Ok(index) = serde_json::from_slice::<Index>(&bytes) {
        let fitting: Vec<_> = index.manifests.iter().filter(|one| one.fits()).collect();
        let [one] = fitting[..] else {
            let text = format!("{reference} has {} images for linux/amd64", fitting.len());
            return Err(RegistryError::Refused(text));
        };
        (digest, bytes) = document(&mut client, &one.digest.to_string(), Some(&one.digest))?;
    }
    let manifest: Manifest = serde_json::from_slice(&bytes)
        .map_err(|source| RegistryError::Form { what: "the manifest".into(), source })?;
    if manifest.layers.len() > MAX_LAYERS {
        let text = format!("{reference} has more than {MAX_LAYERS} layers");
        return Err(RegistryError::Refused(text));
    }
    write(&blobs.join(digest.hex()), |file| file.write_all(&bytes))?;
    fetch(&mut client, &manifest.config, MAX_DOCUMENT, &blobs, progress)?;
    for layer in &manifest.layers {
        fetch(&mut client, layer, MAX_LAYER, &blobs, progress)?;
    }
    progress.done();
    // Last, so that what is known is there.
    let name = name_file(store, reference);
    write(&name, |file| writeln!(file, "{digest}"))?;
    Ok(digest)
}

/// Fetches a manifest or an index. Returns its digest, which is `expected` if that is given.
fn document(
    client: &mut Client<'_>,
    wanted: &str,
    expected: Option<&Digest>,
) -> Result<(Digest, Vec<u8>), RegistryError> {
    let answer = client.get(&format!("manifests/{wanted}"), MANIFESTS)?;
    let mut bytes = Vec::new();
    let body = answer.into_body().into_reader().take(MAX_DOCUMENT + 1).read_to_end(&mut bytes);
    body.map_err(|source| RegistryError::Read { what: "a manifest".into(), source })?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(RegistryError::Refused("a manifest of the image has more than 4 MiB".into()));
    }
    let digest = Digest::of(&bytes);
    match expected {
        Some(expected) if *expected != digest => {
            Err(RegistryError::Refused(format!("{expected} has other bytes: {digest}")))
        }
        _ => Ok((digest, bytes)),
    }
}

/// Fetches a part, unless it is there.
fn fetch(
    client: &mut Client<'_>,
    part: &Descriptor,
    most: u64,
    blobs: &Path,
    progress: &mut dyn Progress,
) -> Result<(), RegistryError> {
    let path = blobs.join(part.digest.hex());
    if path.exists() {
        return Ok(());
    }
    let what = part.digest.to_string();
    let answer = client.get(&format!("blobs/{what}"), "*/*")?;
    let body = answer.into_body().into_reader().take(most + 1);
    let mut body = Checked::new(body, &part.digest);
    let mut buffer = vec![0; CHUNK];
    let (mut done, mut shown, mut stopped) = (0, 0, false);
    let mut copy = |file: &mut File| loop {
        let count = body.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        file.write_all(&buffer[..count])?;
        done += count as u64;
        if done > most {
            return Err(io::Error::other("it is larger than a part may be"));
        }
        if done - shown >= EVERY {
            shown = done;
            progress.detail(&format!("{} MB", done / 1_000_000));
        }
        if progress.interrupted() {
            stopped = true;
            return Err(io::ErrorKind::Interrupted.into());
        }
    };
    let written = write(&path, &mut copy);
    match written {
        Err(_) if stopped => Err(RegistryError::Interrupted),
        Err(RegistryError::Write { source, .. }) if source.kind() == io::ErrorKind::InvalidData => {
            Err(RegistryError::Read { what, source })
        }
        other => other,
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> RegistryError {
    let path = path.to_owned();
    move |source| RegistryError::Write { path, source }
}

/// Writes a file as a whole: what fails or is killed leaves none of that name.
fn write(
    path: &Path,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), RegistryError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let part = path.with_file_name(format!(".{name}.{}", std::process::id()));
    let parent = path.parent().unwrap_or(path);
    let written = fs::create_dir_all(parent)
        .and_then(|()| File::create(&part))
        .and_then(|mut file| content(&mut file).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&part, path));
    written.map_err(|error| {
        let _ = fs::remove_file(&part);
        at(path)(error)
    })
}

fn name_file(store: &Path, reference: &Reference) -> PathBuf {
    store.join("names").join(Digest::of(reference.to_string().as_bytes()).hex())
}
