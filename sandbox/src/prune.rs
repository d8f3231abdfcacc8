//! Removes from the cache what nothing needs any more: outdated warm templates, images without a
//! template, snapshots of old build steps, fetched parts of container images.
//!
//! What a snapshot names, wherever it is, and what a process has open stays.

use std::collections::HashSet;
use std::fs;
use std::io;
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
/// The name of a template that `run --image` makes: this, and so many digits of a digest.
const OF_IMAGES: &str = "image-";
const DIGITS: usize = 16;

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
    let mut sweep = Sweep { cache, options, pruned: Vec::new() };
    if options.all {
        sweep.image_templates(progress)?;
    }
    sweep.warm_templates(progress)?;
    sweep.steps()?;
    sweep.parts();
    // Last, because they are needed by what went before.
    sweep.images()?;
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
    fn is_image(&self, path: &Path) -> bool {
        self.images.contains(&resolved(path))
    }

    fn is_base(&self, folder: &Path) -> bool {
        self.bases.contains(&resolved(folder))
    }

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

/// Returns a path as snapshots have it, with symbolic links resolved.
fn resolved(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

struct Sweep<'a> {
    cache: &'a Cache,
    options: PruneOptions,
    pruned: Vec<Pruned>,
}

impl Sweep<'_> {
    /// Removes a file or folder with `remove`, or only lists it.
    fn remove(&mut self, kind: &'static str, path: &Path, remove: impl FnOnce() -> io::Result<()>) {
        let bytes = disk_bytes(path);
        let removed = if self.options.dry_run { Ok(()) } else { remove() };
        match removed {
            Ok(()) => self.pruned.push(Pruned { kind, path: path.to_owned(), bytes }),
            Err(error) => log::warn!("{} stays: {error}", path.display()),
        }
    }

    /// Removes a file or folder, unless a process has it open or `is_needed` finds it among what
    /// snapshots need.
    fn remove_unused(
        &mut self,
        kind: &'static str,
        path: &Path,
        is_needed: fn(&Needed, &Path) -> bool,
    ) -> Result<(), Failure> {
        let unused = match store::claim_unused(path) {
            Ok(Some(unused)) => unused,
            Ok(None) => return Ok(()),
            Err(error) => {
                log::warn!("{} stays: {error}", path.display());
                return Ok(());
            }
        };
        // After the claim, because a VM has its files open until its snapshot is written.
        if !is_needed(&Needed::find(self.cache)?, path) {
            let whole =
                || if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            self.remove(kind, path, whole);
        }
        drop(unused);
        Ok(())
    }

    fn image_templates(&mut self, progress: &mut dyn Progress) -> Result<(), Failure> {
        let cache = self.cache;
        for template in Template::list(cache).map_err(prepare::refuse)? {
            let name = template.name().to_owned();
            let digits = name.strip_prefix(OF_IMAGES).unwrap_or_default();
            // A user may have given a template a name that begins so.
            if digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                self.remove("template", &template.rootfs, || {
                    Template::remove(cache, &name, progress).map_err(io::Error::other)
                });
            }
        }
        Ok(())
    }

    fn warm_templates(&mut self, progress: &mut dyn Progress) -> Result<(), Failure> {
        for folder in warm::folders(self.cache) {
            let _lock = warm::lock(self.cache, &folder, progress)?;
            if self.options.all || !warm::is_current(self.cache, &folder) {
                self.remove_unused("warm template", &folder, Needed::is_base)?;
            }
        }
        Ok(())
    }

    fn steps(&mut self) -> Result<(), Failure> {
        let steps = dockerfile::unneeded_steps(self.cache, self.options.all);
        steps.iter().try_for_each(|it| self.remove_unused("build step", it, Needed::is_base))
    }

    fn parts(&mut self) {
        let now = SystemTime::now();
        let max_age = if self.options.all { Duration::ZERO } else { PARTS_MAX_AGE };
        for path in files_below(&self.cache.root().join(PARTS), DEPTH) {
            let fetched = fs::symlink_metadata(&path).and_then(|facts| facts.modified());
            let age = fetched.map(|at| now.duration_since(at).unwrap_or_default());
            if age.is_ok_and(|age| age >= max_age) {
                self.remove("part of an image", &path, || fs::remove_file(&path));
            }
        }
    }

    fn images(&mut self) -> Result<(), Failure> {
        let images = store::without_template(self.cache);
        images.iter().try_for_each(|it| self.remove_unused("image", it, Needed::is_image))
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
