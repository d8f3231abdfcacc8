//! The snapshots of finished steps, by their keys, in the cache.
//!
//! They only save time, so there are few of them, none is old, and each may be missing.

use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use pvmm_images::Cache;

const KIND: &str = "steps";
/// The most snapshots that are kept, besides those of the present build.
const MAX_KEPT: usize = 16;
const MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Returns the folder of a step's snapshot.
pub fn place(cache: &Cache, key: &str) -> PathBuf {
    cache.path(KIND, key)
}

/// Returns the folder of a step's snapshot, if there is one, and marks it as used now.
pub fn find(cache: &Cache, key: &str) -> Option<PathBuf> {
    let place = place(cache, key);
    place.join("manifest.json").exists().then(|| {
        let now = FileTimes::new().set_modified(SystemTime::now());
        // Without the mark the snapshot is only removed earlier.
        let _ = File::open(&place).and_then(|folder| folder.set_times(now));
        place
    })
}

/// Makes the folder in which snapshots are kept.
pub fn prepare(cache: &Cache) -> std::io::Result<()> {
    fs::create_dir_all(cache.root().join(KIND))
}

/// Removes snapshots that are old or too many, oldest first; never those of `needed`.
pub fn prune(cache: &Cache, needed: &[String]) {
    for path in unneeded(&cache.root().join(KIND), needed, SystemTime::now()) {
        let _ = fs::remove_dir_all(path);
    }
}

/// Lists the snapshots that are old or too many, or all of them.
pub fn unneeded_steps(cache: &Cache, all: bool) -> Vec<PathBuf> {
    let now = if all { SystemTime::now() + MAX_AGE * 2 } else { SystemTime::now() };
    unneeded(&cache.root().join(KIND), &[], now)
}

fn unneeded(folder: &Path, needed: &[String], now: SystemTime) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let used = entry.metadata().and_then(|facts| facts.modified());
        if !needed.contains(&name) {
            found.push((used.unwrap_or(now), entry.path()));
        }
    }
    found.sort_unstable();
    let excess = found.len().saturating_sub(MAX_KEPT);
    let is_unneeded = |(number, (used, _)): &(usize, (SystemTime, PathBuf))| {
        *number < excess || now.duration_since(*used).unwrap_or_default() > MAX_AGE
    };
    found.into_iter().enumerate().filter(is_unneeded).map(|(_, (_, path))| path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prune_keeps_the_newest_and_the_needed_and_nothing_old() {
        let dir = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        for number in 0..MAX_KEPT as u64 + 3 {
            let path = dir.path().join(number.to_string());
            fs::create_dir(&path).unwrap();
            let used = now - Duration::from_secs(1000 - number);
            let times = FileTimes::new().set_modified(used);
            File::open(&path).unwrap().set_times(times).unwrap();
        }
        let prune_at = |now| {
            for path in unneeded(dir.path(), &["0".to_owned()], now) {
                fs::remove_dir_all(path).unwrap();
            }
        };
        prune_at(now);
        let left = |name: &str| dir.path().join(name).exists();
        assert!(left("0") && !left("1") && !left("2") && left("3") && left("18"));
        prune_at(now + MAX_AGE * 2);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
