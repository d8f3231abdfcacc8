//! A snapshot for another host: with the images and the bases that it only names, and without the
//! paths of this host.
//!
//! In a portable manifest an image outside is called `image-N.img`, with the place of its drive,
//! and the base of a snapshot is the folder `base-N` beside it, with its depth in the chain.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::manifest::DiskFacts;
use super::outside::{Roots, is_allowed, open_folder};
use super::read::{Folder, open_outside, open_plain};
use super::write::large_files;
use super::{CHAIN_MAX, MANIFEST, MEMORY, SIBLING, STATE, SnapshotError};
use crate::error::Error;
use crate::storage::MissingDrive;

/// One file of a portable snapshot.
#[derive(Debug)]
pub struct PortableFile {
    /// The path below the snapshot's folder.
    pub path: String,
    /// The bytes of the file.
    pub content: PortableContent,
}

/// The bytes of a file: a text that is not on this host's disk, or an open file.
#[derive(Debug)]
#[allow(missing_docs)] // each variant is its type
pub enum PortableContent {
    Text(Vec<u8>),
    File(File),
}

/// Lists the files of the snapshot in `dir`, of its bases, and of the images that it names below
/// `roots`. Signatures are left out: they are of the paths of this host.
pub fn portable_files(dir: &Path, roots: &Roots) -> Result<Vec<PortableFile>, Error> {
    let mut files = Vec::new();
    let mut folder = Folder::open_with(dir, None)?;
    for depth in 0..=CHAIN_MAX {
        add(&mut files, &folder, depth, roots)?;
        let Some(base) = &folder.manifest.memory.base else { return Ok(files) };
        let path = PathBuf::from(&base.path);
        let refused = |reason: String| SnapshotError::Base { dir: base.path.clone(), reason };
        if !is_allowed(&path, roots) {
            let why = "is in no folder that a snapshot may name files of; allow its folder";
            return Err(refused(why.into()).into());
        }
        let opened = open_folder(&path).map_err(|error| refused(error.to_string()))?;
        let below = Folder::read(opened, &path, None)?;
        if below.manifest.id != base.id {
            return Err(refused("is another snapshot than the one it was".into()).into());
        }
        folder = below;
    }
    let reason = "the chain is too long".into();
    Err(SnapshotError::Base { dir: dir.display().to_string(), reason }.into())
}

fn add(
    files: &mut Vec<PortableFile>,
    folder: &Folder,
    depth: usize,
    roots: &Roots,
) -> Result<(), SnapshotError> {
    let mut push = |name: &str, content| {
        files.push(PortableFile { path: format!("{}{name}", prefix(depth)), content });
    };
    let mut manifest = folder.manifest.clone();
    for (index, disk) in manifest.disks.iter_mut().enumerate() {
        let DiskFacts::Outside { path, size, modified_ns } = disk else { continue };
        let outside = PathBuf::from(&*path);
        *path = image_file(index);
        // The images of a base are those of an earlier moment, which nothing reads.
        if depth > 0 {
            continue;
        }
        match open_outside(&outside, *size, *modified_ns, roots) {
            Some(file) => push(path, PortableContent::File(file)),
            None => {
                let allowed = is_allowed(&outside, roots);
                return Err(MissingDrive::new(index, &outside, allowed).into());
            }
        }
    }
    if let Some(base) = &mut manifest.memory.base {
        base.path = base_folder(depth + 1);
    }
    push(MANIFEST, PortableContent::Text(manifest.encode()?));
    push(STATE, PortableContent::File(open_plain(folder.dir(), STATE)?.0));
    for (name, size) in large_files(&folder.manifest) {
        push(&name, PortableContent::File(folder.large(&name, size)?));
    }
    if let Ok(file) = folder.large(SIBLING, folder.manifest.memory.size) {
        push(SIBLING, PortableContent::File(file));
    }
    Ok(())
}

/// Makes the portable snapshot in `dir` one of this host, for its place `later`, to which the
/// caller renames `dir`. Returns the paths of all files that belong to it. The manifests may come
/// from anybody: one that names other files than its own is refused.
pub fn settle_portable(dir: &Path, later: &Path) -> Result<Vec<String>, Error> {
    let mut paths = Vec::new();
    for depth in 0..=CHAIN_MAX {
        let here = dir.join(prefix(depth));
        let folder = Folder::open_with(&here, None)?;
        let mut manifest = folder.manifest.clone();
        let mut own: Vec<_> = [MANIFEST, STATE].map(str::to_owned).into();
        own.extend(large_files(&manifest).into_iter().map(|(name, _)| name));
        for (index, disk) in manifest.disks.iter_mut().enumerate() {
            let DiskFacts::Outside { path, modified_ns, .. } = disk else { continue };
            if *path != image_file(index) {
                return Err(SnapshotError::Manifest("names a file of another host".into()).into());
            }
            if depth == 0 {
                set_modified(&here.join(&*path), *modified_ns)?;
                own.push(path.clone());
            }
            *path = text(&later.join(prefix(depth)).join(&*path))?;
        }
        let base = manifest.memory.base.is_some();
        if let Some(base) = &mut manifest.memory.base {
            if base.path != base_folder(depth + 1) {
                return Err(SnapshotError::Manifest("names a file of another host".into()).into());
            }
            base.path = text(&later.join(&base.path))?;
        }
        if here.join(SIBLING).exists() {
            own.push(SIBLING.to_owned());
        }
        replace(&here.join(MANIFEST), &manifest.encode()?)?;
        paths.extend(own.into_iter().map(|name| format!("{}{name}", prefix(depth))));
        if !base {
            return Ok(paths);
        }
    }
    let reason = "the chain is too long".into();
    Err(SnapshotError::Base { dir: MEMORY.into(), reason }.into())
}

fn prefix(depth: usize) -> String {
    if depth == 0 { String::new() } else { format!("{}/", base_folder(depth)) }
}

fn base_folder(depth: usize) -> String {
    format!("base-{depth}")
}

fn image_file(index: usize) -> String {
    format!("image-{index}.img")
}

fn text(path: &Path) -> Result<String, SnapshotError> {
    let unclear = || SnapshotError::Manifest(format!("{}: is not UTF-8", path.display()));
    path.to_str().map(str::to_owned).ok_or_else(unclear)
}

/// Gives an image the time that its snapshot knows it by.
fn set_modified(path: &Path, modified_ns: i128) -> Result<(), SnapshotError> {
    let ns = u64::try_from(modified_ns)
        .map_err(|_| SnapshotError::Manifest("has an impossible time".into()))?;
    let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(ns);
    let done = File::open(path).and_then(|file| file.set_modified(time));
    done.map_err(|source| SnapshotError::Write { file: path.display().to_string(), source })
}

/// Replaces a small file as a whole.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), SnapshotError> {
    let new = path.with_extension("new");
    let write = || {
        let mut file = File::create(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(|source| SnapshotError::Write { file: path.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::FileExt;

    use super::super::write::Contents;
    use super::super::{Disk, Disks, LoadOptions, WriteOptions, testing};
    use super::*;
    use crate::memory::{MemoryImage, Region};
    use crate::storage::FrozenStorage;

    /// Writes a snapshot with one image outside of its folder.
    fn snapshot(dir: &Path, image: &Path) {
        fs::write(image, [5; 8192]).unwrap();
        let contents = Contents {
            machine: &testing::saved().machine,
            facts: testing::manifest(Vec::new()).machine,
            image: &MemoryImage::empty(vec![Region { address: 0, len: 64 << 20 }]),
            drives: &[FrozenStorage::Fixed {
                file: File::open(image).unwrap(),
                path: Some(image.to_owned()),
            }],
            taps: &[],
            vsock_path: None,
            base: None,
            working_set: None,
            note: b"note",
        };
        contents.write(dir, WriteOptions { disk_only: true, ..Default::default() }).unwrap();
    }

    /// Copies what travels to another folder, as a store does.
    fn travel(files: Vec<PortableFile>, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for PortableFile { path, content } in files {
            let mut bytes = Vec::new();
            match content {
                PortableContent::Text(text) => bytes = text,
                PortableContent::File(file) => {
                    bytes.resize(file.metadata().unwrap().len() as usize, 0);
                    file.read_exact_at(&mut bytes, 0).unwrap();
                }
            }
            fs::write(to.join(path), bytes).unwrap();
        }
    }

    #[test]
    fn snapshot_on_another_host_has_its_image_beside_it_and_travels_on_unchanged() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        let (dir, image, there) = (root.join("snap"), root.join("rootfs.img"), root.join("there"));
        snapshot(&dir, &image);
        let roots = Some(vec![root.clone()]);
        travel(portable_files(&dir, &roots).unwrap(), &root.join("staging"));
        let own = settle_portable(&root.join("staging"), &there).unwrap();
        fs::rename(root.join("staging"), &there).unwrap();
        fs::remove_file(&image).unwrap();
        let names: BTreeSet<_> = own.into_iter().collect();
        assert!(names.contains("image-0.img") && names.contains(MANIFEST), "{names:?}");
        let read = Disks::load(&there, &LoadOptions { roots: roots.clone(), ..Default::default() });
        let read = read.unwrap();
        let [Disk::ReadOnly { path, .. }] = read.disks.as_slice() else { panic!("{read:?}") };
        assert_eq!(*path, there.join("image-0.img"));
        let again = portable_files(&there, &roots).unwrap();
        let PortableContent::Text(text) =
            &again.iter().find(|f| f.path == MANIFEST).unwrap().content
        else {
            panic!()
        };
        assert!(!String::from_utf8_lossy(text).contains(root.to_str().unwrap()));
    }

    #[test]
    fn image_outside_of_the_allowed_folders_does_not_travel() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        let (dir, image) = (root.join("snap"), root.join("secret"));
        snapshot(&dir, &image);
        let refused = portable_files(&dir, &Some(vec![root.join("snap")])).unwrap_err();
        assert!(format!("{refused:#}").contains("in no folder"), "{refused:#}");
    }

    #[test]
    fn h19_portable_manifest_that_names_a_file_of_this_host_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        let (dir, image) = (root.join("snap"), root.join("rootfs.img"));
        snapshot(&dir, &image);
        // As it is on this host, with an absolute path.
        let why = format!("{:#}", settle_portable(&dir, &root.join("there")).unwrap_err());
        assert!(why.contains("another host"), "{why}");
    }
}
