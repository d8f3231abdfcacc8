//! Tests of the cache, including the files that it leaves on disk.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::progress::{Event, Silent};

fn cache() -> (tempfile::TempDir, Cache) {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(&dir.path().join("pvmm")).unwrap();
    (dir, cache)
}

fn put(cache: &Cache, name: &str, content: &str) -> Result<PathBuf, CacheError> {
    cache.publish(
        "things",
        name,
        &mut Silent,
        |_| false,
        |dir, _| {
            fs::write(dir.join("file"), content).unwrap();
            Ok(())
        },
    )
}

fn names(cache: &Cache) -> Vec<String> {
    let entries = fs::read_dir(cache.root().join("things")).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn root_without_home_or_xdg_is_none() {
    assert_eq!(root_from(None, None), None);
    assert_eq!(root_from(Some("relative".into()), None), None);
}

#[test]
fn root_with_xdg_goes_before_home() {
    let root = root_from(Some("/x".into()), Some("/h".into()));
    assert_eq!(root, Some("/x/pvmm".into()));
    assert_eq!(root_from(None, Some("/h".into())), Some("/h/.cache/pvmm".into()));
}

#[test]
fn key_of_shifted_parts_differs() {
    assert_ne!(key([&b"ab"[..], b"c"]), key([&b"a"[..], b"bc"]));
    assert_eq!(key([&b"ab"[..]]).len(), 64);
}

#[test]
fn publish_of_new_entry_leaves_only_it() {
    let (_dir, cache) = cache();
    let path = put(&cache, "one", "1").unwrap();
    assert_eq!(fs::read_to_string(path.join("file")).unwrap(), "1");
    assert_eq!(names(&cache), ["one"]);
}

#[test]
fn publish_over_old_entry_keeps_open_files_readable() {
    let (_dir, cache) = cache();
    let path = put(&cache, "one", "old").unwrap();
    let held = File::open(path.join("file")).unwrap();
    put(&cache, "one", "new").unwrap();
    assert_eq!(fs::read_to_string(path.join("file")).unwrap(), "new");
    assert_eq!(io::read_to_string(held).unwrap(), "old");
    assert_eq!(names(&cache), ["one"]);
}

#[test]
fn publish_that_fails_leaves_nothing() {
    let (_dir, cache) = cache();
    let full = io::Error::from_raw_os_error(libc::ENOSPC);
    let result = cache.publish(
        "things",
        "one",
        &mut Silent,
        |_| false,
        |dir, _| {
            fs::write(dir.join("half"), "x").unwrap();
            Err(CacheError::Sync { path: dir.to_owned(), source: full })
        },
    );
    assert!(result.is_err());
    assert!(names(&cache).is_empty());
}

#[test]
fn publish_after_a_dead_builder_sweeps_its_directory() {
    let (_dir, cache) = cache();
    put(&cache, "one", "1").unwrap();
    let things = cache.root().join("things");
    fs::create_dir(things.join(".building-one.1")).unwrap();
    fs::create_dir(things.join(".building-other.999999999")).unwrap();
    let living = format!(".building-third.{}", std::process::id());
    fs::create_dir(things.join(&living)).unwrap();
    put(&cache, "one", "2").unwrap();
    assert_eq!(names(&cache), [living.as_str(), "one"]);
}

#[test]
fn publish_by_two_builders_does_the_work_once() {
    let (_dir, cache) = cache();
    let (builds, waits) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let build = || {
        let mut progress = |event: Event<'_>| {
            if matches!(event, Event::Step(text) if text.starts_with("Waiting for process")) {
                waits.fetch_add(1, Ordering::SeqCst);
            }
        };
        let made = cache.publish(
            "things",
            "one",
            &mut progress,
            |path| path.exists(),
            |_, _| {
                std::thread::sleep(Duration::from_millis(300));
                builds.fetch_add(1, Ordering::SeqCst);
                Ok::<(), CacheError>(())
            },
        );
        made.unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(build);
        scope.spawn(build);
    });
    assert_eq!((builds.load(Ordering::SeqCst), waits.load(Ordering::SeqCst)), (1, 1));
}

#[test]
fn lock_held_past_the_deadline_says_so() {
    let (_dir, cache) = cache();
    let _held = cache.lock("things", "one", &mut Silent).unwrap();
    let err = cache.lock_until("things", "one", Duration::from_millis(10), &mut Silent);
    assert!(matches!(err, Err(CacheError::Locked { .. })));
}

#[test]
fn need_of_more_than_the_disk_has_is_refused() {
    let (_dir, cache) = cache();
    cache.need_mib(0).unwrap();
    let err = cache.need_mib(u64::MAX - 1).unwrap_err();
    assert!(matches!(err, CacheError::Full { .. }), "{err}");
}

#[test]
fn remove_of_entry_tells_whether_it_was_there() {
    let (_dir, cache) = cache();
    put(&cache, "one", "1").unwrap();
    assert!(cache.remove("things", "one", &mut Silent).unwrap());
    assert!(!cache.remove("things", "one", &mut Silent).unwrap());
    assert!(names(&cache).is_empty());
}
