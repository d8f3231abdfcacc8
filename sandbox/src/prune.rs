//! Removes from the cache what nothing needs any more: outdated warm templates, images without a
//! template, snapshots of old build steps, fetched parts of container images.
//!
//! What a snapshot names, wherever it is, and what a process has open stays.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use pvmm::snapshot::{DiskFacts, Manifest};
use pvmm_images::{Cache, Progress, Template, store};
use serde::Serialize;

use crate::dockerfile;
use crate::failure::Failure;
use crate::prepare;
use crate::snapshots;
use crate::warm;

/// How long parts of container images stay after they were fetched.
const PARTS_MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);
/// The folders of parts: layers and documents, and the names that were asked for.
const PARTS: &str = "oci";
/// How many folders deep snapshots are looked for: `service/hibernated/ID/snapshot` is three.
const DEPTH: usize = 4;
/// The start of the names of templates that `run --image` makes.
const OF_IMAGES: &str = "image-";

/// Options of [`prune`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PruneOptions {
    /// Only list it.
    pub dry_run: bool,
    /// Also everything that costs only time to make again: warm templates, steps, parts, and the
    /// templates of `run --image`.
    pub all: bool,
}

/// One thing that was removed, or would be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pruned {
    pub kind: &'static str,
    pub path: PathBuf,
    /// The disk space that it took, without what it shared with others.
    pub bytes: u64,
}

/// Removes from the cache what nothing needs, and returns what was removed. Something that cannot
/// be removed is logged and stays.
pub fn prune(
    cache: &Cache,
    options: PruneOptions,
    progress: &mut dyn Progress,
) -> Result<Vec<Pruned>, Failure> {
    let mut sweep = Sweep { needed: Needed::find(cache)?, options, pruned: Vec::new() };
    if options.all {
        sweep.image_templates(cache, progress)?;
    }
    sweep.warm_templates(cache, progress)?;
    sweep.steps(cache);
    sweep.parts(cache);
    // Last, because they are needed by what went before.
    sweep.images(cache);
    Ok(sweep.pruned)
}

/// The files that snapshots name.
#[derive(Debug, Default)]
struct Needed {
    images: HashSet<PathBuf>,
    /// Folders of snapshots that other snapshots build on.
    bases: HashSet<PathBuf>,
}

impl Needed {
    fn find(cache: &Cache) -> Result<Self, Failure> {
        let mut needed = Self::default();
        for root in snapshots::everywhere()? {
            needed.add_below(&root, DEPTH);
        }
        for kind in ["steps", "warm"] {
            needed.add_below(&cache.root().join(kind), 1);
        }
        Ok(needed)
    }

    fn add_below(&mut self, folder: &Path, depth: usize) {
        if let Ok(manifest) = Manifest::read(folder) {
            let outside = manifest.disks.iter().filter_map(|disk| match disk {
                DiskFacts::Outside { path, .. } => Some(PathBuf::from(path)),
                _ => None,
            });
            self.images.extend(outside);
            self.bases.extend(manifest.memory.base.map(|base| PathBuf::from(base.path)));
        }
        if depth == 0 {
            return;
        }
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            // A link is not followed: the folder behind it is looked at where it is.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.add_below(&entry.path(), depth - 1);
            }
        }
    }
}

struct Sweep {
    needed: Needed,
    options: PruneOptions,
    pruned: Vec<Pruned>,
}

impl Sweep {
    /// Removes a folder or file with `remove`, which returns false if it is in use.
    fn remove(
        &mut self,
        kind: &'static str,
        path: &Path,
        remove: impl FnOnce() -> std::io::Result<bool>,
    ) {
        let bytes = disk_bytes(path);
        let removed = if self.options.dry_run { Ok(true) } else { remove() };
        match removed {
            Ok(true) => self.pruned.push(Pruned { kind, path: path.to_owned(), bytes }),
            Ok(false) => {}
            Err(error) => log::warn!("{} stays: {error}", path.display()),
        }
    }

    fn image_templates(
        &mut self,
        cache: &Cache,
        progress: &mut dyn Progress,
    ) -> Result<(), Failure> {
        for template in Template::list(cache).map_err(prepare::refuse)? {
            let name = template.name().to_owned();
            if name.starts_with(OF_IMAGES) {
                self.remove("template", &template.rootfs, || {
                    Template::remove(cache, &name, progress).map_err(std::io::Error::other)?;
                    Ok(true)
                });
            }
        }
        Ok(())
    }

    fn warm_templates(
        &mut self,
        cache: &Cache,
        progress: &mut dyn Progress,
    ) -> Result<(), Failure> {
        for folder in warm::folders(cache) {
            if self.needed.bases.contains(&folder) {
                continue;
            }
            let _lock = warm::lock(cache, &folder, progress)?;
            if self.options.all || !warm::is_current(cache, &folder) {
                // VMs have its files open, and keep them until they end.
                self.remove("warm template", &folder, || {
                    fs::remove_dir_all(&folder).map(|()| true)
                });
            }
        }
        // Their images may now be needed by nothing.
        self.needed = Needed::find(cache)?;
        Ok(())
    }

    fn steps(&mut self, cache: &Cache) {
        for folder in dockerfile::unneeded_steps(cache, self.options.all) {
            if !self.needed.bases.contains(&folder) {
                self.remove("build step", &folder, || fs::remove_dir_all(&folder).map(|()| true));
            }
        }
    }

    fn parts(&mut self, cache: &Cache) {
        let now = SystemTime::now();
        let max_age = if self.options.all { Duration::ZERO } else { PARTS_MAX_AGE };
        for path in files_below(&cache.root().join(PARTS), DEPTH) {
            let fetched = fs::symlink_metadata(&path).and_then(|facts| facts.modified());
            let age = fetched.map(|at| now.duration_since(at).unwrap_or_default());
            if age.is_ok_and(|age| age >= max_age) {
                self.remove("part of an image", &path, || fs::remove_file(&path).map(|()| true));
            }
        }
    }

    fn images(&mut self, cache: &Cache) {
        for image in store::without_template(cache) {
            if !self.needed.images.contains(&image) {
                self.remove("image", &image, || store::remove_unused(&image));
            }
        }
    }
}

fn files_below(folder: &Path, depth: usize) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_file() => files.push(entry.path()),
            Ok(kind) if kind.is_dir() && depth > 0 => {
                files.extend(files_below(&entry.path(), depth - 1));
            }
            _ => {}
        }
    }
    files
}

/// Returns the disk space of a file or folder, without files that have other names too.
fn disk_bytes(path: &Path) -> u64 {
    let of = |path: &Path| match fs::symlink_metadata(path) {
        Ok(facts) if facts.nlink() == 1 => facts.blocks() * 512,
        _ => 0,
    };
    if path.is_dir() {
        files_below(path, DEPTH).iter().map(|file| of(file)).sum()
    } else {
        of(path)
    }
}
