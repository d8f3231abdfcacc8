//! Sends the chunks that a store lacks, and then the manifest.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use pvmm_images::Progress;
use pvmm_images::part::{Content, Part};

use crate::Moved;
use crate::chunk::{self, CHUNK, Digest};
use crate::error::TravelError;
use crate::manifest::{FileEntry, Kind, Manifest, check_name};
use crate::store::Store;
use crate::workers;

/// Chunks between two signs of progress.
const EVERY: u64 = 8;

/// Sends `parts` to the store under `name`. With `force` every chunk is sent, so that a damaged
/// store is whole again. The name points to the new manifest only when everything is there, and
/// what an interrupted push has sent is not sent again.
pub fn push(
    store: &Arc<Store>,
    kind: Kind,
    name: &str,
    parts: Vec<Part>,
    force: bool,
    progress: &mut dyn Progress,
) -> Result<Moved, TravelError> {
    check_name(name).map_err(TravelError::Address)?;
    progress.step(&format!("Sending {name} to {}", store.text()));
    let mut files: Vec<_> = parts.iter().map(entry).collect();
    let jobs = all_chunks(parts.iter().map(|part| part.content.size()));
    let mut moved = Moved { name: name.into(), store: store.text().into(), ..Moved::default() };
    let (to, seen) = (store.clone(), Mutex::new(HashSet::new()));
    let work = move |(file, index): (usize, u64)| {
        let Some(bytes) = read(&parts[file], index)? else { return Ok((file, index, None)) };
        let digest = Digest::of(&bytes);
        let first = seen.lock().unwrap_or_else(PoisonError::into_inner).insert(digest);
        let fate = if !first {
            Fate::Twice
        } else if !force && to.has_chunk(&digest)? {
            Fate::There
        } else {
            Fate::Moved(to.put_chunk(&digest, chunk::pack(&bytes))?)
        };
        Ok((file, index, Some((digest, fate))))
    };
    let mut done = 0u64;
    let total = jobs.len() as u64;
    let take = |(file, index, chunk): (usize, u64, Option<(Digest, Fate)>),
                progress: &mut dyn Progress| {
        if let Some((digest, fate)) = chunk {
            files[file].chunks[index as usize] = digest.hex();
            match fate {
                Fate::Twice => {}
                Fate::There => moved.chunks_there += 1,
                Fate::Moved(bytes) => {
                    moved.chunks_moved += 1;
                    moved.bytes_moved += bytes;
                }
            }
        }
        done += 1;
        if done.is_multiple_of(EVERY) {
            progress.detail(&format!("{done} of {total} MiB"));
        }
        Ok(())
    };
    workers::run(jobs, work, take, progress)?;
    moved.chunks = moved.chunks_moved + moved.chunks_there;
    let manifest = Manifest::new(kind, name, files);
    moved.bytes = manifest.total();
    let to = store.clone();
    moved.digest = workers::one(move || to.publish(&manifest), progress)?;
    progress.done();
    Ok(moved)
}

/// The fate of a chunk in a push.
enum Fate {
    /// Another place of the same files has it.
    Twice,
    There,
    /// Sent, with this many bytes.
    Moved(u64),
}

/// Returns the place of every chunk of files with these sizes: the file's, and the chunk's in it.
pub fn all_chunks(sizes: impl Iterator<Item = u64>) -> Vec<(usize, u64)> {
    let places = |(file, size)| (0..chunk::count(size)).map(move |index| (file, index));
    sizes.enumerate().flat_map(places).collect()
}

/// Reads a chunk of a file; `None` if it is all zeros.
pub fn read(part: &Part, index: u64) -> Result<Option<Vec<u8>>, TravelError> {
    match &part.content {
        Content::Bytes(bytes) => {
            let start = (index * CHUNK) as usize;
            let len = chunk::len(bytes.len() as u64, index);
            let bytes = bytes.get(start..start + len).unwrap_or_default();
            Ok(Some(bytes.to_vec()).filter(|bytes| !chunk::is_zero(bytes)))
        }
        Content::File { file, size } => chunk::read(file, *size, index)
            .map_err(|source| TravelError::Read { what: part.path.clone(), source }),
    }
}

fn entry(part: &Part) -> FileEntry {
    let size = part.content.size();
    let chunks = vec![String::new(); chunk::count(size) as usize];
    FileEntry { path: part.path.clone(), size, mode: part.mode, chunks }
}
