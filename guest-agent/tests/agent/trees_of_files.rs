//! Links, holes and watches: what `files.rs` leaves out.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::time::{Duration, Instant};

use pvmm::agent::{AgentError, Change, FileWriteOptions, Watch, WatchEvent};

use crate::fixture::{Fixture, wait_for};

fn next(watch: &mut Watch) -> WatchEvent {
    watch.next(Some(Instant::now() + Duration::from_secs(20))).unwrap().expect("an event in time")
}

/// The next event of that kind, whatever comes before it.
fn find(watch: &mut Watch, change: Change, path: &str) -> WatchEvent {
    loop {
        let event = next(watch);
        if event.change == change && &event.path[..] == path.as_bytes() {
            return event;
        }
    }
}

#[test]
fn symlink_is_made_and_replaces_a_file_but_no_folder() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    agent.symlink("../somewhere", fixture.path("link")).unwrap();
    assert_eq!(fs::read_link(fixture.path("link")).unwrap().to_str(), Some("../somewhere"));
    fs::write(fixture.path("file"), "old").unwrap();
    agent.symlink("new", fixture.path("file")).unwrap();
    assert_eq!(fs::read_link(fixture.path("file")).unwrap().to_str(), Some("new"));
    fs::create_dir(fixture.path("folder")).unwrap();
    let refused = agent.symlink("x", fixture.path("folder")).unwrap_err();
    assert_eq!(refused.errno(), Some(libc::EISDIR));
    assert!(agent.symlink("", fixture.path("empty")).is_err());
    assert!(agent.symlink("x", "relative").is_err());
    let names = fs::read_dir(fixture.folder.path()).unwrap().count();
    assert_eq!(names, 5, "no temporary names are left");
}

/// 1 MiB of data, 2 GiB of hole, 64 KiB of data, 100 MiB of hole.
fn sparse_file(path: &std::path::Path) {
    let file = File::create(path).unwrap();
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251 + 1) as u8).collect();
    file.write_all_at(&data, 0).unwrap();
    file.write_all_at(&data[..65536], 2 << 30).unwrap();
    file.set_len((2 << 30) + (100 << 20)).unwrap();
}

fn same_data(a: &std::path::Path, b: &std::path::Path) {
    let (a, b) = (File::open(a).unwrap(), File::open(b).unwrap());
    assert_eq!(a.metadata().unwrap().len(), b.metadata().unwrap().len());
    for (at, len) in [(0, 1 << 20), (1 << 20, 4096), (2 << 30, 65536), ((2 << 30) + 65536, 4096)] {
        let (mut x, mut y) = (vec![0; len], vec![1; len]);
        a.read_exact_at(&mut x, at).unwrap();
        b.read_exact_at(&mut y, at).unwrap();
        assert!(x == y, "at {at}");
    }
}

#[test]
fn sparse_file_stays_sparse_both_ways() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let (here, there, back) = (fixture.path("here"), fixture.path("there"), fixture.path("back"));
    sparse_file(&here);
    let begun = Instant::now();
    let options = FileWriteOptions { mode: Some(0o640), ..FileWriteOptions::default() };
    let mut writer = agent.open_write_sparse(&there, &options).unwrap();
    let (source, mut at) = (File::open(&here).unwrap(), 0);
    while let count @ 1.. = writer.copy_some(&source, at).unwrap() {
        at += count;
    }
    assert_eq!(writer.finish().unwrap(), (2 << 30) + (100 << 20));
    let mut reader = agent.open_read_sparse(&there).unwrap();
    assert_eq!(reader.metadata().unwrap().mode, 0o640);
    let file = File::create(&back).unwrap();
    let mut at = 0;
    loop {
        match reader.copy_some(&file, at).unwrap() {
            0 => break,
            count => at += count,
        }
    }
    same_data(&here, &there);
    same_data(&here, &back);
    for path in [&there, &back] {
        let blocks = fs::metadata(path).unwrap().blocks();
        assert!(blocks * 512 < 4 << 20, "{blocks} blocks");
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "holes do not travel");
    assert!(agent.open_read_sparse(fixture.path("none")).is_err());
    // Dropped without an end, nothing appears.
    let mut writer = agent.open_write_sparse(fixture.path("cut"), &options).unwrap();
    writer.data(b"x").unwrap();
    drop(writer);
    agent.info().unwrap();
    wait_for("the temporary to go", || {
        let names = fs::read_dir(fixture.folder.path()).unwrap();
        names.flatten().all(|it| !it.file_name().to_string_lossy().ends_with(".tmp"))
    });
    assert!(!fixture.path("cut").exists());
}

#[test]
fn watch_tells_what_happens_in_a_tree_also_in_new_folders() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let root = fixture.path("root");
    fs::create_dir_all(root.join("old")).unwrap();
    let mut watch = agent.watch(&root, true).unwrap();
    fs::write(root.join("old/file"), "x").unwrap();
    let event = next(&mut watch);
    assert_eq!((event.change, &event.path[..]), (Change::Created, &b"old/file"[..]));
    find(&mut watch, Change::Written, "old/file");
    // Everything below a folder that was made in one go is told, watched in time or not.
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    fs::write(root.join("a/b/c/deep"), "x").unwrap();
    assert!(find(&mut watch, Change::Created, "a").directory);
    find(&mut watch, Change::Created, "a/b/c/deep");
    fs::rename(root.join("old/file"), root.join("a/b/moved")).unwrap();
    let from = find(&mut watch, Change::MovedFrom, "old/file");
    let to = find(&mut watch, Change::MovedTo, "a/b/moved");
    assert_eq!(from.cookie, to.cookie);
    fs::remove_file(root.join("a/b/moved")).unwrap();
    find(&mut watch, Change::Deleted, "a/b/moved");
    fs::remove_dir_all(&root).unwrap();
    find(&mut watch, Change::Gone, "");
    assert!(matches!(watch.next(None), Err(AgentError::WatchEnded)));
}

#[test]
fn watch_of_one_folder_leaves_those_below_alone_and_ends_with_its_client() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    fs::create_dir_all(fixture.path("root/below")).unwrap();
    symlink("/etc", fixture.path("root/link")).unwrap();
    let mut watch = agent.watch(fixture.path("root"), false).unwrap();
    fs::write(fixture.path("root/below/unseen"), "x").unwrap();
    fs::write(fixture.path("root/seen"), "x").unwrap();
    let event = next(&mut watch);
    assert_eq!((event.change, &event.path[..]), (Change::Created, &b"seen"[..]));
    assert_eq!(agent.watch(fixture.path("none"), true).err().unwrap().errno(), Some(libc::ENOENT));
    drop(watch);
    // Each ends with its client and gives its place back.
    for _ in 0..3 {
        let mut watches = Vec::new();
        wait_for("the places of the round before", || {
            while watches.len() < 32 {
                match agent.watch(fixture.path("root"), true) {
                    Ok(watch) => watches.push(watch),
                    Err(_) => return false,
                }
            }
            true
        });
        let full = agent.watch(fixture.path("root"), true).err().unwrap();
        assert_eq!(full.errno(), Some(libc::EAGAIN), "{full}");
    }
}

#[test]
fn watch_that_nobody_reads_tells_what_was_lost() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let root = fixture.path("root");
    fs::create_dir(&root).unwrap();
    let mut watch = agent.watch(&root, false).unwrap();
    let before = fixture.private_kib();
    for number in 0..40_000 {
        let name = root.join(format!("a-rather-long-name-to-fill-buffers-{}", number % 100));
        File::create(&name).unwrap().write_all(b"x").unwrap();
        fs::remove_file(&name).unwrap();
    }
    assert!(fixture.private_kib() < before + 2048);
    loop {
        if next(&mut watch).change == Change::Overflow {
            break;
        }
    }
}

#[test]
fn tree_travels_as_an_archive_both_ways() {
    use pvmm::agent::trees::{self, MAX_ENTRIES, Unpack};

    let fixture = Fixture::start();
    let agent = fixture.agent();
    let here = fixture.path("here");
    fs::create_dir_all(here.join("sub/empty")).unwrap();
    for number in 0..300 {
        fs::write(here.join(format!("sub/{number}")), format!("file {number}")).unwrap();
    }
    symlink("sub/1", here.join("link")).unwrap();
    fs::hard_link(here.join("sub/2"), here.join("two")).unwrap();
    sparse_file(&here.join("sparse"));

    let there = fixture.path("there");
    let mut writer = agent.open_write_tar(&there, false).unwrap();
    let sent = trees::pack(&here, &mut writer, &mut |_| {}).unwrap();
    writer.finish().unwrap();
    let back = fixture.path("back");
    let mut reader = agent.open_read_tar(&there).unwrap();
    let options = Unpack { owners: false, modes: 0o777, max_entries: MAX_ENTRIES };
    let received = trees::unpack(&mut reader, &back, options, &mut |_| {}).unwrap();
    assert_eq!((sent, received), (306, 306));
    for copy in [&there, &back] {
        assert_eq!(fs::read(copy.join("sub/299")).unwrap(), b"file 299");
        assert_eq!(fs::read_link(copy.join("link")).unwrap().to_str(), Some("sub/1"));
        let inode = |name: &str| fs::metadata(copy.join(name)).unwrap().ino();
        assert_eq!(inode("two"), inode("sub/2"));
        same_data(&here.join("sparse"), &copy.join("sparse"));
        assert!(fs::metadata(copy.join("sparse")).unwrap().blocks() * 512 < 8 << 20);
        assert!(fs::read_dir(copy.join("sub/empty")).unwrap().next().is_none());
    }
    // A tree that is not there, and one that is a file.
    let missing = agent.open_read_tar(fixture.path("missing")).err().unwrap();
    assert_eq!(missing.errno(), Some(libc::ENOENT));
    let file = agent.open_read_tar(here.join("two")).err().unwrap();
    assert_eq!(file.errno(), Some(libc::ENOTDIR));
}

#[test]
fn archive_that_is_dropped_or_wants_out_changes_nothing_outside() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let there = fixture.path("there");
    let mut writer = agent.open_write_tar(&there, false).unwrap();
    // Half a header, and then the client is gone.
    writer.write_all(&[b'x'; 300]).unwrap();
    drop(writer);
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..8].copy_from_slice(b"../theft");
    header.set_size(1);
    header.set_cksum();
    let mut writer = agent.open_write_tar(&there, false).unwrap();
    writer.write_all(header.as_bytes()).unwrap();
    // The agent may refuse it before all is sent.
    let refused = match writer.write_all(&[0; 1536]) {
        Ok(()) => writer.finish().unwrap_err(),
        Err(early) => early.downcast().unwrap(),
    };
    assert_eq!(refused.errno(), Some(libc::EINVAL));
    assert!(!fixture.path("theft").exists());
    wait_for("scratch to be gone", || fs::read_dir(&there).unwrap().next().is_none());
}
