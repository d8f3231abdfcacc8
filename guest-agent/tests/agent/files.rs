//! Files: what is written is what is read, errors name path and cause, replacing is atomic.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use pvmm::agent::{AgentError, FileKind, FileWriteOptions, Owner};

use crate::fixture::{Fixture, wait_for};

fn errno<T: std::fmt::Debug>(result: Result<T, AgentError>) -> i32 {
    result.unwrap_err().errno().unwrap()
}

#[test]
fn file_written_is_the_file_read() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    for len in [0, 1, 65536, 65537, 3_000_000] {
        let bytes: Vec<u8> = (0..len).map(|i: u32| (i % 251) as u8).collect();
        agent.write_file(fixture.path("f"), &bytes, &FileWriteOptions::default()).unwrap();
        assert_eq!(fs::read(fixture.path("f")).unwrap(), bytes);
        assert_eq!(agent.read_file(fixture.path("f"), 4_000_000).unwrap(), bytes);
    }
}

#[test]
fn file_range_is_read() {
    let fixture = Fixture::start();
    fs::write(fixture.path("f"), b"0123456789").unwrap();
    let agent = fixture.agent();
    for (range, expected) in [(2..5, "234"), (8..100, "89"), (20..30, ""), (3..3, "")] {
        let mut reader = agent.open_read(fixture.path("f"), Some(range)).unwrap();
        assert_eq!(reader.metadata().unwrap().size, 10);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, expected);
    }
}

#[test]
fn file_over_the_limit_is_refused_not_buffered() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let refused = agent.read_file("/dev/zero", 1 << 20);
    assert!(matches!(refused, Err(AgentError::TooLarge { limit: 1048576, .. })), "{refused:?}");
    let kernel = agent.read_file("/proc/sys/kernel/ostype", 100).unwrap();
    assert_eq!(kernel, b"Linux\n");
}

#[test]
fn file_of_256_mb_streams_in_and_out_with_flat_memory() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let before = fixture.private_kib();
    let mut writer = agent.open_write(fixture.path("f"), &FileWriteOptions::default()).unwrap();
    let block = vec![7u8; 1 << 20];
    for _ in 0..256 {
        writer.write_all(&block).unwrap();
    }
    assert!(!fixture.path("f").exists(), "the file appeared before it was whole");
    assert_eq!(writer.finish().unwrap(), 256 << 20);
    let mut reader = agent.open_read(fixture.path("f"), None).unwrap();
    let mut total = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = reader.read(&mut buffer).unwrap();
        if count == 0 {
            break;
        }
        assert!(buffer[..count].iter().all(|byte| *byte == 7));
        total += count;
    }
    assert_eq!(total, 256 << 20);
    let grown = fixture.private_kib().saturating_sub(before);
    assert!(grown < 4096, "the agent grew by {grown} KiB");
}

#[test]
fn file_replaced_keeps_mode_unless_told() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let path = fixture.path("f");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let inode = fs::metadata(&path).unwrap().ino();
    agent.write_file(&path, b"new", &FileWriteOptions::default()).unwrap();
    let facts = fs::metadata(&path).unwrap();
    assert_eq!(facts.mode() & 0o7777, 0o640);
    assert_ne!(facts.ino(), inode);
    let options =
        FileWriteOptions { mode: Some(0o4755), sync: true, ..FileWriteOptions::default() };
    agent.write_file(&path, b"new", &options).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o4755);
}

#[test]
fn file_has_the_owner_it_is_given_and_keeps_it() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let path = fixture.path("f");
    let owner = Some(Owner { uid: 12345, gid: 54321 });
    for options in
        [FileWriteOptions { owner, ..FileWriteOptions::default() }, FileWriteOptions::default()]
    {
        agent.write_file(&path, b"new", &options).unwrap();
        let facts = fs::metadata(&path).unwrap();
        assert_eq!((facts.uid(), facts.gid()), (12345, 54321));
    }
}

#[test]
fn file_given_up_in_the_middle_leaves_the_old_one() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    fs::write(fixture.path("f"), "old").unwrap();
    let mut writer = agent.open_write(fixture.path("f"), &FileWriteOptions::default()).unwrap();
    writer.write_all(b"half").unwrap();
    drop(writer);
    // The same when the whole connection goes.
    let mut writer =
        fixture.agent().open_write(fixture.path("f"), &FileWriteOptions::default()).unwrap();
    writer.write_all(b"half").unwrap();
    drop(writer);
    let names = || {
        let mut names: Vec<_> = agent.list(fixture.folder.path()).unwrap();
        names.retain(|entry| entry.metadata.kind != FileKind::Socket);
        names.into_iter().map(|entry| entry.name.into_vec()).collect::<Vec<_>>()
    };
    wait_for("the temporary files to go", || names() == [b"f"]);
    assert_eq!(fs::read(fixture.path("f")).unwrap(), b"old");
}

#[test]
fn file_written_through_a_link_goes_where_it_leads() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    fs::write(fixture.path("real"), "old").unwrap();
    symlink(fixture.path("real"), fixture.path("link")).unwrap();
    agent.write_file(fixture.path("link"), b"new", &FileWriteOptions::default()).unwrap();
    assert!(fs::symlink_metadata(fixture.path("link")).unwrap().is_symlink());
    assert_eq!(fs::read(fixture.path("real")).unwrap(), b"new");
}

#[test]
fn file_written_in_place_keeps_what_lies_beyond() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    fs::write(fixture.path("f"), "0123456789").unwrap();
    let options =
        FileWriteOptions { in_place: true, offset: Some(3), ..FileWriteOptions::default() };
    agent.write_file(fixture.path("f"), b"abc", &options).unwrap();
    assert_eq!(fs::read(fixture.path("f")).unwrap(), b"012abc6789");
    let options = FileWriteOptions { in_place: true, ..FileWriteOptions::default() };
    agent.write_file(fixture.path("f"), b"x", &options).unwrap();
    assert_eq!(fs::read(fixture.path("f")).unwrap(), b"x");
    agent.write_file("/dev/null", b"gone", &options).unwrap();
}

#[test]
fn file_in_a_missing_folder_needs_parents() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let path = fixture.path("a/b/c");
    let failed = agent.write_file(&path, b"x", &FileWriteOptions::default());
    assert_eq!(errno(failed), libc::ENOENT);
    let options = FileWriteOptions { parents: true, ..FileWriteOptions::default() };
    agent.write_file(&path, b"x", &options).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"x");
}

#[test]
fn file_errors_carry_errno_and_path() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let missing = fixture.path("missing");
    fs::create_dir(fixture.path("dir")).unwrap();
    fs::write(fixture.path("dir/f"), "").unwrap();
    assert_eq!(errno(agent.read_file(&missing, 10)), libc::ENOENT);
    assert_eq!(errno(agent.read_file(fixture.path("dir"), 10)), libc::EISDIR);
    assert_eq!(errno(agent.list(&missing)), libc::ENOENT);
    assert_eq!(errno(agent.list(fixture.path("dir/f"))), libc::ENOTDIR);
    assert_eq!(errno(agent.stat(&missing, true)), libc::ENOENT);
    assert_eq!(errno(agent.remove(&missing, true)), libc::ENOENT);
    assert_eq!(errno(agent.remove(fixture.path("dir"), false)), libc::ENOTEMPTY);
    assert_eq!(errno(agent.remove("/", true)), libc::EBUSY);
    assert_eq!(errno(agent.mkdir(fixture.path("dir"), None, false)), libc::EEXIST);
    assert_eq!(
        errno(agent.write_file("/dev/null", b"", &FileWriteOptions::default())),
        libc::EINVAL
    );
    let error = agent.stat(&missing, false).unwrap_err();
    assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
}

#[test]
fn fifo_is_refused_and_blocks_nobody() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let fifo = fixture.path("fifo");
    std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert_eq!(errno(agent.read_file(&fifo, 10)), libc::EINVAL);
    let options = FileWriteOptions { in_place: true, ..FileWriteOptions::default() };
    assert_eq!(errno(agent.write_file(&fifo, b"x", &options)), libc::ENXIO);
}

#[test]
fn path_that_no_guest_could_open_is_refused_g13() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    for path in ["", "relative", "/nul\0", &format!("/{}", "x".repeat(5000))] {
        let refused = agent.stat(path, false);
        assert!(matches!(refused, Err(AgentError::InvalidRequest { field: "path", .. })), "{path}");
    }
}

#[test]
fn folders_are_made_listed_moved_and_removed() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let folder = fixture.path("x");
    agent.mkdir(folder.join("y/z"), Some(0o700), true).unwrap();
    agent.mkdir(folder.join("y/z"), None, true).unwrap();
    assert_eq!(fs::metadata(folder.join("y/z")).unwrap().mode() & 0o7777, 0o700);
    agent.write_file(folder.join("f"), b"12345", &FileWriteOptions::default()).unwrap();
    symlink("f", folder.join("link")).unwrap();
    let entries = agent.list(&folder).unwrap();
    let seen: Vec<_> =
        entries.iter().map(|e| (&e.name[..], e.metadata.kind, e.metadata.size)).collect();
    assert_eq!(seen[0], (&b"f"[..], FileKind::File, 5));
    assert_eq!(seen[1].1, FileKind::Symlink);
    assert_eq!(entries[1].metadata.target.as_ref().unwrap()[..], b"f"[..]);
    assert_eq!(seen[2].1, FileKind::Directory);
    assert_eq!(agent.stat(folder.join("link"), true).unwrap().kind, FileKind::File);
    assert_eq!(agent.stat(folder.join("link"), false).unwrap().kind, FileKind::Symlink);
    agent.rename(folder.join("f"), folder.join("y/g")).unwrap();
    assert_eq!(fs::read(folder.join("y/g")).unwrap(), b"12345");
    agent.remove(folder.join("link"), false).unwrap();
    agent.remove(&folder, true).unwrap();
    assert!(!folder.exists());
}

#[test]
fn removing_a_tree_does_not_follow_links_out_of_it() {
    let fixture = Fixture::start();
    fs::create_dir(fixture.path("keep")).unwrap();
    fs::write(fixture.path("keep/f"), "").unwrap();
    fs::create_dir(fixture.path("tree")).unwrap();
    symlink(fixture.path("keep"), fixture.path("tree/link")).unwrap();
    fixture.agent().remove(fixture.path("tree"), true).unwrap();
    assert!(fixture.path("keep/f").exists());
}

#[test]
fn folder_of_many_entries_is_listed_whole() {
    let fixture = Fixture::start();
    let folder = fixture.path("many");
    fs::create_dir(&folder).unwrap();
    for number in 0..5000 {
        fs::write(folder.join(format!("{number:04}-{}", "x".repeat(100))), "").unwrap();
    }
    let entries = fixture.agent().list(&folder).unwrap();
    assert_eq!(entries.len(), 5000);
    assert!(entries[4999].name.starts_with(b"4999-"));
}
