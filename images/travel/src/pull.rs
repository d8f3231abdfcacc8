//! Fetches the chunks that this host lacks, and puts the files together in a folder of their own.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pvmm_images::Progress;
use pvmm_images::part::Part;

use crate::Moved;
use crate::chunk::{self, Digest};
use crate::error::TravelError;
use crate::manifest::{Kind, Manifest};
use crate::push::{all_chunks, read};
use crate::staging::{self, Staging};
use crate::store::{Address, Store};
use crate::workers;

/// Chunks between two signs of progress.
const EVERY: u64 = 8;

/// A manifest that was fetched and checked, whose files are wanted here.
pub struct Pull {
    store: Arc<Store>,
    pub manifest: Manifest,
    digest: Digest,
    /// The length of each chunk, and its places: file and number.
    wanted: HashMap<Digest, (usize, Vec<(usize, u64)>)>,
}

impl Pull {
    /// Fetches the manifest at `address`.
    pub fn open(
        store: &Arc<Store>,
        kind: Kind,
        address: &Address,
        progress: &mut dyn Progress,
    ) -> Result<Self, TravelError> {
        let (from, address) = (store.clone(), address.clone());
        let (manifest, digest) = workers::one(move || from.manifest(kind, &address), progress)?;
        if manifest.kind.folder() != kind.folder() {
            return Err(manifest.refused("it is of another kind"));
        }
        let mut wanted: HashMap<Digest, (usize, Vec<(usize, u64)>)> = HashMap::new();
        for (file, entry) in manifest.files.iter().enumerate() {
            for (index, digest) in (0..).zip(entry.digests()) {
                let Some(digest) = digest else { continue };
                let len = chunk::len(entry.size, index);
                let (known, places) = wanted.entry(digest).or_insert((len, Vec::new()));
                if *known != len {
                    return Err(manifest.refused("one digest has chunks of two lengths"));
                }
                places.push((file, index));
            }
        }
        Ok(Self { store: store.clone(), manifest, digest, wanted })
    }

    /// Whether `parts` are the files of the manifest, in every byte.
    pub fn is_there(
        &self,
        parts: &[Part],
        progress: &mut dyn Progress,
    ) -> Result<bool, TravelError> {
        let files = &self.manifest.files;
        let same = |part: &Part| {
            self.manifest.file(&part.path).is_some_and(|file| file.size == part.content.size())
        };
        if parts.len() != files.len() || !parts.iter().all(same) {
            return Ok(false);
        }
        let differs = Arc::new(AtomicBool::new(false));
        let jobs = parts.iter().flat_map(|part| {
            let digests = self.manifest.file(&part.path).into_iter().flat_map(|it| it.digests());
            (0..).zip(digests).map(|(index, digest)| (part.clone(), index, digest))
        });
        let known = differs.clone();
        let work = move |(part, index, digest): (Part, u64, Option<Digest>)| {
            let same = known.load(Ordering::Relaxed)
                || read(&part, index)?.map(|bytes| Digest::of(&bytes)) == digest;
            if !same {
                known.store(true, Ordering::Relaxed);
            }
            Ok(())
        };
        workers::run(jobs.collect(), work, |(), _| Ok(()), progress)?;
        Ok(!differs.load(Ordering::Relaxed))
    }

    /// Returns the result of a pull that found everything in place.
    pub fn nothing_moved(&self) -> Moved {
        let chunks = self.wanted.len() as u64;
        Moved {
            name: self.manifest.name.clone(),
            store: self.store.text().to_owned(),
            digest: self.digest.hex(),
            bytes: self.manifest.total(),
            chunks,
            chunks_there: chunks,
            ..Moved::default()
        }
    }

    /// Puts the files together in a folder below `pulls`, and returns that folder. Chunks come from
    /// an earlier pull that was interrupted, from `local` files, and else from the store.
    pub fn fetch(
        &self,
        pulls: &Path,
        local: Vec<Part>,
        progress: &mut dyn Progress,
    ) -> Result<(PathBuf, Moved), TravelError> {
        progress.step(&format!("Fetching {} from {}", self.manifest.name, self.store.text()));
        let fetched = self.fill(pulls, local, progress);
        if fetched.as_ref().is_err_and(TravelError::is_full_disk) {
            // It cannot go on before there is room, and this is room.
            staging::sweep(pulls, &self.manifest);
        }
        progress.done();
        fetched
    }

    fn fill(
        &self,
        pulls: &Path,
        mut local: Vec<Part>,
        progress: &mut dyn Progress,
    ) -> Result<(PathBuf, Moved), TravelError> {
        let staging = Staging::open(pulls, &self.manifest, &self.digest)?;
        let mut missing = self.missing(&staging, progress)?;
        local.extend(staging::earlier(pulls, &self.manifest, &self.digest));
        self.take_local(&staging, local, &mut missing, progress)?;
        let mut moved = self.nothing_moved();
        moved.chunks_there -= missing.len() as u64;
        let jobs: Vec<_> = missing.iter().map(|digest| (*digest, self.wanted[digest].0)).collect();
        let store = self.store.clone();
        let work = move |(digest, len): (Digest, usize)| {
            let (packed, sent) = store.chunk(&digest)?;
            let bytes = chunk::unpack(&packed, len).filter(|bytes| Digest::of(bytes) == digest);
            bytes.map(|bytes| (digest, bytes, sent)).ok_or_else(|| store.damaged_chunk(&digest))
        };
        let total = jobs.len();
        let take = |(digest, bytes, sent): (Digest, Vec<u8>, u64), progress: &mut dyn Progress| {
            self.write(&staging, &digest, &bytes)?;
            moved.chunks_moved += 1;
            moved.bytes_moved += sent;
            if moved.chunks_moved.is_multiple_of(EVERY) {
                progress.detail(&format!("{} of {total} MiB", moved.chunks_moved));
            }
            Ok(())
        };
        workers::run(jobs, work, take, progress)?;
        Ok((staging.finish(&self.manifest)?, moved))
    }

    /// Removes what is left of this pull and of earlier ones, once its folder has its name.
    pub fn clean(&self, pulls: &Path) {
        staging::sweep(pulls, &self.manifest);
    }

    /// Returns the chunks that an earlier pull has not written. Zeros that it has not are written.
    fn missing(
        &self,
        staging: &Staging,
        progress: &mut dyn Progress,
    ) -> Result<HashSet<Digest>, TravelError> {
        let mut missing = HashSet::new();
        for (file, index) in all_chunks(self.manifest.files.iter().map(|file| file.size)) {
            let entry = &self.manifest.files[file];
            let there = staging.read(&self.manifest, file, index);
            let there = there.map_err(TravelError::write(&staging.path))?;
            let wanted = entry.chunks.get(index as usize).and_then(|hex| Digest::parse(hex));
            match (there.map(|bytes| Digest::of(&bytes)), wanted) {
                (there, Some(digest)) if there != Some(digest) => {
                    missing.insert(digest);
                }
                (Some(_), None) => {
                    staging.write(file, index, &vec![0; chunk::len(entry.size, index)])?;
                }
                _ => {}
            }
            if progress.interrupted() {
                return Err(TravelError::Interrupted);
            }
        }
        Ok(missing)
    }

    /// Takes missing chunks out of files of this host.
    fn take_local(
        &self,
        staging: &Staging,
        local: Vec<Part>,
        missing: &mut HashSet<Digest>,
        progress: &mut dyn Progress,
    ) -> Result<(), TravelError> {
        let (wanted, enough) = (missing.clone(), Arc::new(AtomicBool::new(missing.is_empty())));
        let jobs = all_chunks(local.iter().map(|part| part.content.size()));
        let known = enough.clone();
        let work = move |(file, index): (usize, u64)| {
            // A file that cannot be read, or is cut short meanwhile, is of no help and no harm.
            let bytes =
                if known.load(Ordering::Relaxed) { None } else { read(&local[file], index).ok() };
            let found = bytes.flatten().map(|bytes| (Digest::of(&bytes), bytes));
            Ok(found.filter(|(digest, _)| wanted.contains(digest)))
        };
        let take = |found: Option<(Digest, Vec<u8>)>, _: &mut dyn Progress| {
            if let Some((digest, bytes)) = found
                && missing.remove(&digest)
            {
                self.write(staging, &digest, &bytes)?;
                enough.store(missing.is_empty(), Ordering::Relaxed);
            }
            Ok(())
        };
        workers::run(jobs, work, take, progress)
    }

    fn write(&self, staging: &Staging, digest: &Digest, bytes: &[u8]) -> Result<(), TravelError> {
        let Some((_, places)) = self.wanted.get(digest) else { return Ok(()) };
        places.iter().try_for_each(|(file, index)| staging.write(*file, *index, bytes))
    }
}
