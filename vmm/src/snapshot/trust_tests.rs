//! Trust in a folder: it may name files only where the caller allows them, and with a key
//! everything must be signed.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::read::Folder;
use super::write::Contents;
use super::*;
use crate::memory::{Memory, MemoryImage, Mode, Region};
use crate::storage::{FrozenStorage, MissingDrive};

struct Place {
    _dir: tempfile::TempDir,
    root: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(root.join("images")).unwrap();
        fs::write(root.join("images/root.img"), [5; 8192]).unwrap();
        Self { _dir: dir, root }
    }

    /// Writes a snapshot with a disk of its own and one that it only names.
    fn write(&self, name: &str, key: Option<&Key>) -> PathBuf {
        let region = Region { address: 0, len: 64 << 20 };
        let memory = Memory::map(MemoryImage::empty(vec![region]), Mode::Tracked, None).unwrap();
        let own = tempfile::tempfile().unwrap();
        own.write_all_at(&[9; 8192], 0).unwrap();
        let image = self.root.join("images/root.img");
        let saved = super::testing::saved();
        let contents = Contents {
            machine: &saved.machine,
            facts: super::testing::manifest(Vec::new()).machine,
            image: &memory.image,
            drives: &[
                FrozenStorage::Fixed { file: own, path: None },
                FrozenStorage::Fixed { file: File::open(&image).unwrap(), path: Some(image) },
            ],
            taps: &[],
            vsock_path: None,
            base: None,
            working_set: None,
            note: b"a note",
        };
        let dir = self.root.join(name);
        contents.write(&dir, WriteOptions { key, ..Default::default() }).unwrap();
        dir
    }
}

/// The part of a load that comes before KVM is used.
fn load(dir: &Path, options: &LoadOptions) -> Result<Vec<FrozenStorage>, SnapshotError> {
    let folder = Folder::open_with(dir, options.key.as_ref())?;
    let saved = folder.state()?;
    let mut files = folder.verify(&saved, options)?;
    folder.layers(&saved, &mut files, options, 0)?;
    folder.drives(&mut files, options)
}

fn under(root: PathBuf) -> LoadOptions {
    LoadOptions { roots: Some(vec![root]), ..Default::default() }
}

#[test]
fn image_that_a_folder_names_is_opened_only_below_a_root() {
    let place = Place::new();
    let dir = place.write("snap", None);
    for options in [LoadOptions::default(), under(place.root.join("images"))] {
        let drives = load(&dir, &options).unwrap();
        assert!(matches!(drives[1], FrozenStorage::Fixed { .. }), "{options:?}");
    }
    let drives = load(&dir, &under(place.root.join("snap"))).unwrap();
    assert!(matches!(drives[0], FrozenStorage::Fixed { .. }), "its own is its own");
    let FrozenStorage::Missing { index: 1, path, allowed: false } = &drives[1] else {
        panic!("it should not be opened");
    };
    let refused = MissingDrive::new(1, path, false).to_string();
    assert!(refused.contains("images/root.img is in no folder that a snapshot may"), "{refused}");
    // The path now leads over a symbolic link.
    fs::rename(place.root.join("images"), place.root.join("moved")).unwrap();
    std::os::unix::fs::symlink(place.root.join("moved"), place.root.join("images")).unwrap();
    let drives = load(&dir, &LoadOptions::default()).unwrap();
    assert!(matches!(drives[1], FrozenStorage::Missing { allowed: true, .. }));
}

#[test]
fn base_that_a_folder_names_is_opened_only_below_a_root() {
    let place = Place::new();
    let base = place.write("base", None);
    let next = place.write("next", None);
    let id = Folder::open(&base).unwrap().manifest.id;
    let mut manifest = Folder::open(&next).unwrap().manifest;
    let path = base.display().to_string();
    manifest.memory.base = Some(manifest::BaseFacts { id, path });
    fs::write(next.join(MANIFEST), manifest.encode().unwrap()).unwrap();
    load(&next, &LoadOptions::default()).unwrap();
    load(&next, &under(place.root.clone())).unwrap();
    let refused = load(&next, &under(place.root.join("images"))).unwrap_err().to_string();
    assert!(refused.contains("in no folder that a snapshot may name files of"), "{refused}");
}

fn key(byte: u8) -> Key {
    Key::new([byte; 32]).unwrap()
}

#[test]
fn h10_folder_without_the_signature_of_the_key_is_refused() {
    let place = Place::new();
    let (signed, plain) = (place.write("signed", Some(&key(1))), place.write("plain", None));
    let with = |byte| LoadOptions { key: Some(key(byte)), ..Default::default() };
    load(&signed, &with(1)).unwrap();
    load(&signed, &LoadOptions::default()).unwrap();
    for (dir, options) in [(&plain, with(1)), (&signed, with(2))] {
        let error = load(dir, &options).unwrap_err();
        assert!(matches!(error, SnapshotError::Signature(_)), "{error}");
        assert_eq!(error.kind(), ErrorKind::SnapshotCorrupt);
    }
    // The signature of another snapshot, made with this key.
    let other = place.write("other", Some(&key(1)));
    fs::copy(other.join("signature"), signed.join("signature")).unwrap();
    assert!(load(&signed, &with(1)).is_err());
}

/// H10: an attacker who changes a snapshot corrects its checksums, but does not have the key.
#[test]
fn h10_signed_folder_that_was_changed_with_right_checksums_is_refused() {
    let place = Place::new();
    let options = LoadOptions { key: Some(key(1)), ..Default::default() };
    let writable = |path: &Path| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        File::options().write(true).open(path).unwrap()
    };
    let state = place.write("state", Some(&key(1)));
    super::testing::change(&state, &[super::testing::Change::Rip(7)]);
    load(&state, &LoadOptions::default()).expect("it looks right");
    let error = load(&state, &options).unwrap_err().to_string();
    assert!(error.contains("manifest.json is not the file that was signed"), "{error}");

    // Memory and disk with matching checksums in the state.
    for name in [MEMORY, "disk-0.img"] {
        let dir = place.write(&format!("of-{name}"), Some(&key(1)));
        writable(&dir.join(name)).write_all_at(b"!", 4096).unwrap();
        super::testing::make_sums_right(&dir);
        load(&dir, &LoadOptions::default()).expect("it looks right");
        assert!(load(&dir, &options).is_err(), "{name}");
    }
}

#[test]
fn note_of_the_caller_is_read_back() {
    let place = Place::new();
    let folder = Folder::open_with(&place.write("snap", None), None).unwrap();
    assert_eq!(folder.state().unwrap().note.as_deref(), Some(&b"a note"[..]));
}
