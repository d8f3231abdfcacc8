//! Flows through a store in a folder, and what a hostile store can do.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pvmm_images::part::Part;
use pvmm_images::{Event, Progress, Silent};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::chunk::{self, CHUNK, Digest};
use crate::manifest::Manifest;
use crate::{Address, Kind, Moved, Pull, Seal, Store, TravelError, push};

/// Chunks of the file that travels, beside a hole.
const CHUNKS: u64 = 20;

/// A file, a store and a second host.
struct Road {
    dir: TempDir,
}

impl Road {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("image")).unwrap();
        for index in 0..CHUNKS {
            // A hole of a chunk after each chunk.
            file.write_all_at(&index.to_le_bytes().repeat(1 << 17), index * 2 * CHUNK).unwrap();
        }
        file.set_len(2 * CHUNKS * CHUNK + 7).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn parts(&self) -> Vec<Part> {
        let text = Part::of_bytes("sub/text", b"some text".to_vec());
        vec![Part::open("image", &self.path("image")).unwrap(), text]
    }

    fn store(&self, seal: Seal) -> Arc<Store> {
        Arc::new(Store::open(self.path("store").to_str().unwrap(), seal).unwrap())
    }

    fn push(&self, force: bool) -> Moved {
        let (store, kind) = (self.store(Seal::default()), Kind::Template);
        push(&store, kind, "data", self.parts(), force, &mut Silent).unwrap()
    }

    fn open(&self, address: &str, seal: Seal) -> Result<Pull, TravelError> {
        let address = Address::parse(self.path(address).to_str().unwrap()).unwrap();
        Pull::open(&self.store(seal), Kind::Template, &address, &mut Silent)
    }

    fn pull(&self, progress: &mut dyn Progress) -> Result<(PathBuf, Moved), TravelError> {
        let pull = self.open("store/data", Seal::default()).unwrap();
        pull.fetch(&self.path("pulls"), Vec::new(), progress)
    }

    /// Returns the path of the first chunk of the image in the store.
    fn chunk(&self) -> PathBuf {
        let hex = Digest::of(&0u64.to_le_bytes().repeat(1 << 17)).hex();
        // The first chunk is of zeros; the next one is in the store.
        assert!(!self.path("store/chunks").join(&hex[..2]).join(&hex).exists());
        let hex = Digest::of(&1u64.to_le_bytes().repeat(1 << 17)).hex();
        self.path("store/chunks").join(&hex[..2]).join(hex)
    }
}

fn same(one: &Path, other: &Path) -> bool {
    fs::read(one).unwrap() == fs::read(other).unwrap()
}

#[test]
fn push_and_pull_move_each_chunk_once_and_holes_not_at_all() {
    let road = Road::new();
    let first = road.push(false);
    // The image's first chunk is of zeros, and the text is one chunk.
    assert_eq!((first.chunks, first.chunks_moved), (CHUNKS, CHUNKS));
    let again = road.push(false);
    assert_eq!((again.chunks_moved, again.chunks_there, again.digest), (0, CHUNKS, first.digest));
    let (folder, moved) = road.pull(&mut Silent).unwrap();
    assert_eq!((moved.chunks_moved, moved.chunks_there), (CHUNKS, 0));
    assert!(same(&folder.join("image"), &road.path("image")));
    assert_eq!(fs::read(folder.join("sub/text")).unwrap(), b"some text");
    let blocks = fs::metadata(folder.join("image")).unwrap().blocks() * 512;
    assert!(blocks < (CHUNKS + 2) * CHUNK, "{blocks} bytes on disk");
}

#[test]
fn pull_of_what_is_here_moves_nothing_and_takes_chunks_of_local_files() {
    let road = Road::new();
    road.push(false);
    let pull = road.open("store/data", Seal::default()).unwrap();
    assert!(pull.is_there(&road.parts(), &mut Silent).unwrap());
    fs::remove_dir_all(road.path("store/chunks")).unwrap();
    let (folder, moved) = pull.fetch(&road.path("pulls"), road.parts(), &mut Silent).unwrap();
    assert_eq!((moved.chunks_moved, moved.chunks_there), (0, CHUNKS));
    assert!(same(&folder.join("image"), &road.path("image")));
    let file = File::options().write(true).open(road.path("image")).unwrap();
    file.write_all_at(b"x", 5).unwrap();
    assert!(!pull.is_there(&road.parts(), &mut Silent).unwrap());
}

/// Interrupts at the first detail, when some chunks are there.
struct Interrupts(bool);

impl Progress for Interrupts {
    fn event(&mut self, event: Event<'_>) {
        self.0 |= matches!(event, Event::Detail(_));
    }

    fn interrupted(&mut self) -> bool {
        self.0
    }
}

#[test]
fn pull_that_was_interrupted_goes_on_where_it_was() {
    let road = Road::new();
    road.push(false);
    let stopped = road.pull(&mut Interrupts(false)).unwrap_err();
    assert!(matches!(stopped, TravelError::Interrupted), "{stopped}");
    let (folder, moved) = road.pull(&mut Silent).unwrap();
    assert_eq!((moved.chunks_there, moved.chunks_moved), (8, CHUNKS - 8));
    assert!(same(&folder.join("image"), &road.path("image")));
    let pull = road.open("store/data", Seal::default()).unwrap();
    pull.clean(&road.path("pulls"));
    assert_eq!(fs::read_dir(road.path("pulls")).unwrap().count(), 0);
}

#[test]
fn push_that_was_interrupted_has_no_name_and_goes_on_where_it_was() {
    let road = Road::new();
    let store = road.store(Seal::default());
    let mut interrupts = Interrupts(false);
    let stopped =
        push(&store, Kind::Template, "data", road.parts(), false, &mut interrupts).unwrap_err();
    assert!(matches!(stopped, TravelError::Interrupted), "{stopped}");
    let missing = road.open("store/data", Seal::default()).err().unwrap();
    assert!(matches!(missing, TravelError::Missing { .. }), "{missing}");
    let moved = road.push(false);
    assert!(moved.chunks_there > 0 && moved.chunks_there + moved.chunks_moved == CHUNKS);
}

#[test]
fn h18_chunk_that_is_damaged_is_refused_and_a_forced_push_repairs_it() {
    let road = Road::new();
    road.push(false);
    let other = chunk::pack(&vec![9; CHUNK as usize]);
    let bomb = ruzstd::encoding::compress_to_vec(
        vec![0; 64 << 20].as_slice(),
        ruzstd::encoding::CompressionLevel::Fastest,
    );
    for bytes in [b"no frame".to_vec(), other, bomb, Vec::new()] {
        fs::write(road.chunk(), bytes).unwrap();
        let refused = road.pull(&mut Silent).unwrap_err();
        assert!(matches!(refused, TravelError::Damaged { .. }), "{refused}");
        assert!(!refused.to_string().contains('\n') && refused.to_string().contains("--force"));
    }
    assert_eq!(road.push(true).chunks_moved, CHUNKS);
    assert!(road.pull(&mut Silent).is_ok());
}

#[test]
fn store_without_the_key_knows_no_content_and_another_key_opens_nothing() {
    let road = Road::new();
    let seal = |byte: u8| Seal::of(&[byte; 32]).unwrap();
    push(&road.store(seal(1)), Kind::Template, "data", road.parts(), false, &mut Silent).unwrap();
    assert!(!road.chunk().exists());
    for wrong in [seal(2), Seal::default()] {
        assert!(road.open("store/data", wrong).is_err());
    }
    let pull = road.open("store/data", seal(1)).unwrap();
    let (folder, _) = pull.fetch(&road.path("pulls"), Vec::new(), &mut Silent).unwrap();
    assert!(same(&folder.join("image"), &road.path("image")));
}

#[test]
fn name_with_a_digest_is_only_that_manifest() {
    let road = Road::new();
    let digest = road.push(false).digest;
    road.open(&format!("store/data@sha256:{digest}"), Seal::default()).unwrap();
    fs::write(road.path("store/manifests").join(&digest), b"{}").unwrap();
    let refused = road.open("store/data", Seal::default()).err().unwrap();
    assert!(matches!(refused, TravelError::Damaged { .. }), "{refused}");
    let other = format!("store/data@sha256:{}", "0".repeat(64));
    assert!(road.open(&other, Seal::default()).is_err());
}

#[test]
fn h17_manifest_that_leads_elsewhere_or_asks_for_too_much_is_refused() {
    let digest = "a".repeat(64);
    let file = json!({ "path": "a", "size": 10, "mode": 0o600, "chunks": [digest] });
    let good = json!({
        "format": "pvmm-travel", "version": 1, "kind": "template", "name": "data",
        "chunk_bytes": CHUNK, "files": [file],
    });
    let decode = |value: &Value| Manifest::decode(value.to_string().as_bytes(), "data");
    decode(&good).unwrap();
    let changed = |pointer: &str, value: Value| {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        let refused = decode(&bad).unwrap_err().to_string();
        assert!(!refused.contains('\n'), "{refused}");
    };
    let paths = ["../a", "/a", "a/../../b", "", ".", ".hidden", "a//b", "a/", "a\0", "a\nb", "-a"];
    paths.iter().for_each(|path| changed("/files/0/path", json!(path)));
    changed("/files/0/path", json!("a/b/c/d"));
    changed("/files/0/path", json!("a".repeat(129)));
    changed("/files/0/size", json!(u64::MAX));
    changed("/files/0/size", json!(CHUNK + 1));
    changed("/files/0/mode", json!(0o4755));
    changed("/files/0/chunks", json!(["A".repeat(64)]));
    changed("/files/0/chunks", json!([]));
    changed("/files", json!([]));
    changed("/files", json!([file, file]));
    changed("/files", json!([file, { "path": "a/b", "size": 0, "mode": 0, "chunks": [] }]));
    changed("/name", json!("other"));
    changed("/version", json!(2));
    changed("/chunk_bytes", json!(1));
    changed("/kind", json!("else"));
    assert!(Manifest::decode(b"{", "data").is_err());
}

#[test]
fn h17_digest_of_two_lengths_in_one_manifest_is_refused() {
    let road = Road::new();
    let digest = "a".repeat(64);
    let file = |path: &str, size: u64| json!({ "path": path, "size": size, "mode": 0o600, "chunks": [digest] });
    let bytes = json!({
        "format": "pvmm-travel", "version": 1, "kind": "template", "name": "data",
        "chunk_bytes": CHUNK, "files": [file("a", 10), file("b", 11)],
    });
    let bytes = bytes.to_string();
    let hex = Digest::of(bytes.as_bytes()).hex();
    for folder in ["manifests", "templates"] {
        fs::create_dir_all(road.path("store").join(folder)).unwrap();
    }
    fs::write(road.path("store/manifests").join(&hex), bytes).unwrap();
    fs::write(road.path("store/templates/data"), format!("sha256:{hex}\n")).unwrap();
    let refused = road.open("store/data", Seal::default()).err().unwrap();
    assert!(refused.to_string().contains("two lengths"), "{refused}");
}

#[test]
fn h18_link_in_the_place_of_an_object_is_not_followed() {
    let road = Road::new();
    road.push(false);
    let (chunk, elsewhere) = (road.chunk(), road.path("elsewhere"));
    fs::rename(&chunk, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &chunk).unwrap();
    let refused = road.pull(&mut Silent).unwrap_err();
    assert!(matches!(refused, TravelError::Store { .. }), "{refused}");
}

#[test]
fn address_without_a_store_or_with_another_scheme_is_refused() {
    for bad in ["base", "s3://base", "dir/", "dir/-x", "dir/.x", "dir/a@sha256:12"] {
        assert!(Address::parse(bad).is_err(), "{bad}");
    }
    let address = Address::parse("s3://bucket/some/prefix/base").unwrap();
    assert_eq!(
        (address.store.as_str(), address.name.as_str()),
        ("s3://bucket/some/prefix", "base")
    );
    for bad in ["http://x/y", "s3:", "s3://", "s3://b/../c", "s3://b c/d"] {
        assert!(Store::open(bad, Seal::default()).is_err(), "{bad}");
    }
}
