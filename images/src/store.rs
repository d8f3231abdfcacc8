//! The images of templates, by the digests of their contents.
//!
//! A VM or snapshot names the image that it was made from. The store keeps that image when the
//! template of its name is built again or removed, until nothing needs it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cache::Cache;
use crate::sys;

const KIND: &str = "images";

/// Returns where the image of this digest is kept.
pub(crate) fn place(cache: &Cache, digest: &str) -> PathBuf {
    cache.path(KIND, &format!("{digest}.ext4"))
}

/// Keeps the file `image`, whose contents have this digest, and makes `image` a link to the one
/// kept file of these contents, so that equal images are one file.
pub(crate) fn keep(cache: &Cache, image: &Path, digest: &str) -> io::Result<()> {
    let (kept, folder) = (place(cache, digest), cache.root().join(KIND));
    fs::create_dir_all(&folder)?;
    // After a power cut, a file of this name has these contents.
    File::open(image)?.sync_all()?;
    match fs::hard_link(image, &kept) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        linked => return linked.and_then(|()| File::open(folder)?.sync_all()),
    }
    if fs::metadata(&kept)?.len() == fs::metadata(image)?.len() {
        return replace_by_link(&kept, image);
    }
    // The kept file was cut off: the new one takes its name.
    replace_by_link(image, &kept)
}

fn replace_by_link(from: &Path, to: &Path) -> io::Result<()> {
    let link = to.with_extension(format!("link-{}", std::process::id()));
    let _ = fs::remove_file(&link);
    fs::hard_link(from, &link)?;
    fs::rename(&link, to)
}

/// Returns the name of `image` in the store, if it is kept there as the same file.
pub(crate) fn kept(cache: &Cache, image: &Path, digest: &str) -> Option<PathBuf> {
    let kept = place(cache, digest);
    let (one, other) = (fs::metadata(&kept).ok()?, fs::metadata(image).ok()?);
    (one.dev() == other.dev() && one.ino() == other.ino()).then_some(kept)
}

/// Lists the kept images that belong to no template.
pub fn without_template(cache: &Cache) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache.root().join(KIND)).into_iter().flatten().flatten();
    let alone = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|facts| facts.nlink() == 1);
    entries.map(|entry| entry.path()).filter(alone).collect()
}

/// Files that no process has open. Whoever opens one waits until this is dropped.
#[derive(Debug)]
pub struct Unused(#[allow(dead_code)] Vec<File>); // held open for their leases

/// Claims a file, or all files in a folder; `None` if a process has one open. A kernel that cannot
/// tell is an error.
pub fn claim_unused(path: &Path) -> io::Result<Option<Unused>> {
    let mut files = vec![path.to_owned()];
    if fs::symlink_metadata(path)?.is_dir() {
        files = fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    }
    let claimed: Option<Vec<File>> =
        files.iter().map(|file| sys::claim_unused(file)).collect::<io::Result<_>>()?;
    Ok(claimed.map(Unused))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("pvmm")).unwrap();
        (dir, cache)
    }

    #[test]
    fn equal_images_are_one_file_and_a_cut_one_is_replaced() {
        let (dir, cache) = cache();
        let image = |name: &str| dir.path().join(name);
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        fs::write(image("one"), "image").unwrap();
        keep(&cache, &image("one"), "d").unwrap();
        fs::write(image("two"), "image").unwrap();
        assert_eq!(kept(&cache, &image("two"), "d"), None);
        keep(&cache, &image("two"), "d").unwrap();
        assert_eq!(inode(&image("one")), inode(&image("two")));
        assert_eq!(kept(&cache, &image("two"), "d"), Some(place(&cache, "d")));

        fs::write(place(&cache, "d"), "im").unwrap();
        fs::write(image("three"), "image").unwrap();
        keep(&cache, &image("three"), "d").unwrap();
        assert_eq!(fs::read_to_string(place(&cache, "d")).unwrap(), "image");
    }

    #[test]
    fn image_is_alone_once_its_template_is_gone() {
        let (dir, cache) = cache();
        let image = dir.path().join("image");
        fs::write(&image, "image").unwrap();
        keep(&cache, &image, "d").unwrap();
        assert!(without_template(&cache).is_empty());
        fs::remove_file(&image).unwrap();
        assert_eq!(without_template(&cache), [place(&cache, "d")]);
    }

    #[test]
    fn file_that_is_open_is_in_use_and_so_is_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, "image").unwrap();
        let open = File::open(&path).unwrap();
        assert!(claim_unused(&path).unwrap().is_none());
        assert!(claim_unused(dir.path()).unwrap().is_none());
        drop(open);
        assert!(claim_unused(dir.path()).unwrap().is_some());
        assert!(claim_unused(&path).unwrap().is_some());
    }
}
