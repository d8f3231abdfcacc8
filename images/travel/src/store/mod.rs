//! Stores: places that keep objects by name, written as a whole or not at all.

mod folder;
mod s3;

use std::path::Path;

use crate::chunk::{Digest, MAX_OBJECT};
use crate::error::TravelError;
use crate::manifest::{Kind, MAX_MANIFEST, Manifest, check_name};
use crate::seal::Seal;
use folder::Folder;
use s3::Bucket;

const S3: &str = "s3://";
/// The largest object that says which manifest a name has.
const MAX_POINTER: u64 = 1 << 10;
const SHA256: &str = "sha256:";

/// The name of something in a store: `STORE/NAME`, or `STORE/NAME@sha256:DIGEST`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub store: String,
    pub name: String,
    digest: Option<String>,
}

impl Address {
    pub fn parse(text: &str) -> Result<Self, TravelError> {
        let (text, digest) = match text.rsplit_once(&format!("@{SHA256}")) {
            Some((text, hex)) if Digest::parse(hex).is_some() => (text, Some(hex.to_owned())),
            Some(_) => {
                let why = format!("{text}: the digest has not 64 hexadecimal digits");
                return Err(TravelError::Address(why));
            }
            None => (text, None),
        };
        let Some((store, name)) = text.rsplit_once('/').filter(|(store, _)| *store != "s3:/")
        else {
            let why = format!("{text:?} names no store: write DIR/NAME or s3://BUCKET/NAME");
            return Err(TravelError::Address(why));
        };
        check_name(name).map_err(TravelError::Address)?;
        let store = if store.is_empty() { "/" } else { store };
        Ok(Self { store: store.to_owned(), name: name.to_owned(), digest })
    }
}

/// A folder or a bucket that keeps chunks, manifests and names.
pub struct Store {
    place: Place,
    seal: Seal,
    text: String,
}

enum Place {
    Folder(Folder),
    Bucket(Box<Bucket>),
}

impl Store {
    /// Opens `s3://BUCKET/PREFIX`, with the settings of the `AWS_*` variables, or a folder.
    pub fn open(text: &str, seal: Seal) -> Result<Self, TravelError> {
        let place = match text.strip_prefix(S3) {
            Some(rest) => {
                Place::Bucket(Box::new(Bucket::open(rest, |name| std::env::var(name).ok())?))
            }
            None if text.contains("://") || text.starts_with("s3:") => {
                let why = format!("{text}: is neither a folder nor s3://BUCKET/PREFIX");
                return Err(TravelError::Address(why));
            }
            None => Place::Folder(Folder::new(Path::new(text))),
        };
        Ok(Self { place, seal, text: text.to_owned() })
    }

    /// Returns the store as its user wrote it.
    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn has_chunk(&self, digest: &Digest) -> Result<bool, TravelError> {
        let key = chunk_key(&self.seal.object(digest));
        match &self.place {
            Place::Folder(folder) => folder.has(&key),
            Place::Bucket(bucket) => bucket.has(&key),
        }
    }

    /// Stores the packed bytes of a chunk, and returns how many bytes were sent.
    pub fn put_chunk(&self, digest: &Digest, packed: Vec<u8>) -> Result<u64, TravelError> {
        let object = self.seal.object(digest);
        let bytes = self.seal.close(&object, packed)?;
        self.put(&chunk_key(&object), &bytes)?;
        Ok(bytes.len() as u64)
    }

    /// Fetches the packed bytes of a chunk, and returns how many bytes came.
    pub fn chunk(&self, digest: &Digest) -> Result<(Vec<u8>, u64), TravelError> {
        let object = self.seal.object(digest);
        let key = chunk_key(&object);
        let Some(bytes) = self.get(&key, MAX_OBJECT)? else {
            return Err(self.missing(&format!("chunk {}", digest.hex())));
        };
        let len = bytes.len() as u64;
        let opened = self.seal.open(&object, bytes);
        Ok((opened.map_err(|_| self.damaged_chunk(digest))?, len))
    }

    /// Stores a manifest and lets its name point to it, last. Returns its digest.
    pub fn publish(&self, manifest: &Manifest) -> Result<String, TravelError> {
        let bytes = manifest.encode()?;
        if bytes.len() as u64 > MAX_MANIFEST {
            return Err(manifest.refused("it is too large"));
        }
        let digest = Digest::of(&bytes);
        let object = self.seal.object(&digest);
        self.put(&format!("manifests/{object}"), &self.seal.close(&object, bytes)?)?;
        let pointer = pointer_key(manifest.kind, &manifest.name);
        let text = format!("{SHA256}{}\n", digest.hex()).into_bytes();
        self.put(&pointer, &self.seal.close(&pointer, text)?)?;
        Ok(digest.hex())
    }

    /// Fetches the manifest at `address` and checks it. Returns it with its digest.
    pub fn manifest(
        &self,
        kind: Kind,
        address: &Address,
    ) -> Result<(Manifest, Digest), TravelError> {
        let pointer = pointer_key(kind, &address.name);
        let digest = match &address.digest {
            Some(hex) => Digest::parse(hex),
            None => {
                let Some(bytes) = self.get(&pointer, MAX_POINTER)? else {
                    return Err(self.missing(&pointer));
                };
                let text = self.seal.open(&pointer, bytes)?;
                let text = str::from_utf8(&text).ok().map(str::trim);
                text.and_then(|text| Digest::parse(text.strip_prefix(SHA256)?))
            }
        };
        let Some(digest) = digest else {
            return Err(TravelError::Unclear { store: self.text.clone(), what: pointer });
        };
        let object = self.seal.object(&digest);
        let what = format!("manifest {}", digest.hex());
        let bytes = self.get(&format!("manifests/{object}"), MAX_MANIFEST)?;
        let bytes = self.seal.open(&object, bytes.ok_or_else(|| self.missing(&what))?)?;
        if Digest::of(&bytes) != digest {
            return Err(TravelError::Damaged { store: self.text.clone(), what });
        }
        Ok((Manifest::decode(&bytes, &address.name)?, digest))
    }

    pub fn damaged_chunk(&self, digest: &Digest) -> TravelError {
        let what = format!("chunk {}", digest.hex());
        TravelError::Damaged { store: self.text.clone(), what }
    }

    fn missing(&self, what: &str) -> TravelError {
        TravelError::Missing { store: self.text.clone(), what: what.to_owned() }
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<(), TravelError> {
        match &self.place {
            Place::Folder(folder) => folder.put(key, bytes),
            Place::Bucket(bucket) => bucket.put(key, bytes),
        }
    }

    /// Returns an object of at most `most` bytes; `None` if there is none.
    fn get(&self, key: &str, most: u64) -> Result<Option<Vec<u8>>, TravelError> {
        match &self.place {
            Place::Folder(folder) => folder.get(key, most),
            Place::Bucket(bucket) => bucket.get(key, most),
        }
    }
}

fn chunk_key(object: &str) -> String {
    format!("chunks/{}/{object}", object.get(..2).unwrap_or_default())
}

fn pointer_key(kind: Kind, name: &str) -> String {
    format!("{}/{name}", kind.folder())
}
