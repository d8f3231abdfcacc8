//! Trees that unpack as they were packed, and archives that try to leave their folder.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use super::{ArchiveError, Holes, MAX_ENTRIES, Unpack, pack, unpack};

const PLAIN: Unpack = Unpack { owners: false, modes: 0o777, max_entries: MAX_ENTRIES };

/// Reports data in every other 64 KiB, without asking the filesystem.
const EVERY_OTHER: Holes = Holes {
    next_data: |_, at| Ok(Some(if at >> 16 & 1 == 0 { (at | 0xffff) + 1 } else { at })),
    next_hole: |_, at| Ok(Some(if at >> 16 & 1 == 0 { at } else { (at | 0xffff) + 1 })),
};

fn packed(root: &Path) -> Vec<u8> {
    let mut archive = Vec::new();
    pack(root, &mut archive, EVERY_OTHER, None).unwrap();
    archive
}

/// A folder to unpack into, next to something that must not change.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        fs::create_dir(dir.path().join("target")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/file"), "mine").unwrap();
        Self { dir }
    }

    fn target(&self) -> std::path::PathBuf {
        self.dir.path().join("target")
    }

    fn takes(&self, archive: &[u8]) -> Result<u64, ArchiveError> {
        let result = unpack(archive, &self.target(), PLAIN, &mut |_| {});
        let outside: Vec<_> = fs::read_dir(self.dir.path().join("outside")).unwrap().collect();
        assert_eq!(outside.len(), 1, "something was made outside");
        let file = self.dir.path().join("outside/file");
        assert_eq!(fs::read(&file).unwrap(), b"mine", "something outside was written");
        assert_eq!(file.metadata().unwrap().nlink(), 1, "something outside was linked");
        assert_eq!(fs::read_dir(self.dir.path()).unwrap().count(), 2, "something was made beside");
        let left = fs::read_dir(self.target()).unwrap().flatten();
        let left = left.filter(|entry| entry.file_name().as_bytes().starts_with(b".pvmm"));
        assert_eq!(left.count(), 0, "scratch was left behind");
        result
    }
}

/// Builds an archive of raw entries, with unchecked names.
fn raw(entries: &[(EntryType, &str, &str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (kind, name, link, data) in entries {
        let mut header = Header::new_gnu();
        let old = header.as_old_mut();
        old.name[..name.len()].copy_from_slice(name.as_bytes());
        old.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_size(data.len() as u64);
        header.set_cksum();
        builder.append(&header, *data).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn tree_in_and_out_keeps_kinds_modes_links_and_long_names() {
    let from = TempDir::new().unwrap();
    let at = |name: &str| from.path().join(name);
    let deep = "n".repeat(120) + "/" + &"m".repeat(200);
    fs::create_dir_all(at(&deep)).unwrap();
    fs::write(at(&deep).join("file"), "deep").unwrap();
    fs::create_dir(at("empty")).unwrap();
    fs::write(at("run"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(at("run"), Permissions::from_mode(0o751)).unwrap();
    fs::hard_link(at("run"), at("same")).unwrap();
    symlink("../anywhere", at("link")).unwrap();
    symlink("t".repeat(300), at("long link")).unwrap();
    fs::write(from.path().join(OsStr::from_bytes(b"odd\xff\n")), "odd").unwrap();
    fs::create_dir(at("closed")).unwrap();
    fs::write(at("closed/in"), "in").unwrap();
    fs::set_permissions(at("closed"), Permissions::from_mode(0o555)).unwrap();

    let to = Place::new();
    let count = to.takes(&packed(from.path())).unwrap();
    assert_eq!(count, 12);
    let at = |name: &str| to.target().join(name);
    assert_eq!(fs::read(at(&deep).join("file")).unwrap(), b"deep");
    assert_eq!(fs::read_dir(at("empty")).unwrap().count(), 0);
    assert_eq!(fs::metadata(at("run")).unwrap().mode() & 0o7777, 0o751);
    assert_eq!(fs::metadata(at("run")).unwrap().ino(), fs::metadata(at("same")).unwrap().ino());
    assert_eq!(fs::read_link(at("link")).unwrap(), Path::new("../anywhere"));
    assert_eq!(fs::read_link(at("long link")).unwrap().as_os_str().len(), 300);
    assert_eq!(fs::read(to.target().join(OsStr::from_bytes(b"odd\xff\n"))).unwrap(), b"odd");
    assert_eq!(fs::read(at("closed/in")).unwrap(), b"in");
    assert_eq!(fs::metadata(at("closed")).unwrap().mode() & 0o777, 0o555);
    // Unpacks again over the existing files; the modes also let the folders be removed.
    for path in [at("closed"), from.path().join("closed")] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    to.takes(&packed(from.path())).unwrap();
}

#[test]
fn file_with_many_holes_stays_sparse_and_does_not_travel() {
    let from = TempDir::new().unwrap();
    let file = File::create(from.path().join("sparse")).unwrap();
    for piece in (1..61).step_by(2) {
        file.write_all_at(&[piece as u8; 1 << 16], piece << 16).unwrap();
    }
    file.set_len(1 << 30).unwrap();
    // The test's map, not the filesystem, defines the end of the data.
    let holes = Holes {
        next_data: |_, at| {
            let data = (EVERY_OTHER.next_data)(&File::open("/dev/null")?, at)?;
            Ok(data.filter(|data| *data < 61 << 16))
        },
        next_hole: EVERY_OTHER.next_hole,
    };
    let mut archive = Vec::new();
    pack(from.path(), &mut archive, holes, None).unwrap();
    assert!(archive.len() < 3 << 20, "{} bytes travel", archive.len());
    let to = Place::new();
    to.takes(&archive).unwrap();
    let copy = File::open(to.target().join("sparse")).unwrap();
    let facts = copy.metadata().unwrap();
    assert_eq!(facts.len(), 1 << 30);
    assert!(facts.blocks() * 512 < 4 << 20, "{} blocks", facts.blocks());
    for piece in 0..61u64 {
        let mut bytes = [0xee; 1 << 16];
        copy.read_exact_at(&mut bytes, piece << 16).unwrap();
        let expected = if piece % 2 == 1 { piece as u8 } else { 0 };
        assert!(bytes.iter().all(|byte| *byte == expected), "piece {piece}");
    }
}

#[test]
fn file_that_shrinks_while_it_is_packed_leaves_the_archive_whole() {
    let from = TempDir::new().unwrap();
    fs::write(from.path().join("a"), vec![1; 200_000]).unwrap();
    fs::write(from.path().join("b"), "after").unwrap();
    // Truncates the file once the first bytes of the archive are written.
    struct Cutter<'a>(Vec<u8>, &'a Path);
    impl Write for Cutter<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0.len() > 1000 {
                fs::write(self.1, "short")?;
            }
            self.0.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let path = from.path().join("a");
    let mut cutter = Cutter(Vec::new(), &path);
    pack(from.path(), &mut cutter, EVERY_OTHER, None).unwrap();
    let to = Place::new();
    to.takes(&cutter.0).unwrap();
    assert_eq!(fs::metadata(to.target().join("a")).unwrap().len(), 200_000);
    assert_eq!(fs::read(to.target().join("b")).unwrap(), b"after");
}

#[test]
fn names_that_lead_up_or_out_are_refused() {
    for name in ["../outside/new", "/etc/pvmm-was-here", "a/../../outside/new", "..", ""] {
        let place = Place::new();
        let refused = place.takes(&raw(&[(EntryType::Regular, name, "", b"x")]));
        assert_eq!(refused.unwrap_err().errno(), Some(libc::EINVAL), "{name:?}");
    }
}

#[test]
fn links_below_the_folder_are_never_followed() {
    let through = |link: &str| {
        let place = Place::new();
        let archive = raw(&[
            (EntryType::Symlink, "way", link, b""),
            (EntryType::Regular, "way/file", "", b"theirs"),
        ]);
        let refused = place.takes(&archive).unwrap_err();
        assert_eq!(refused.errno(), Some(libc::ENOTDIR), "{refused}");
    };
    through("../outside");
    through("/tmp");
    through(".");
    // A link that was there before is not followed, either.
    let place = Place::new();
    symlink("../outside", place.target().join("way")).unwrap();
    place.takes(&raw(&[(EntryType::Directory, "way/in", "", b"")])).unwrap_err();
    // A link in the place of a file is replaced, and its target stays.
    symlink("../outside/file", place.target().join("f")).unwrap();
    place.takes(&raw(&[(EntryType::Regular, "f", "", b"theirs")])).unwrap();
    assert_eq!(fs::read(place.target().join("f")).unwrap(), b"theirs");
}

#[test]
fn hard_links_to_anything_outside_are_refused() {
    for target in ["../outside/file", "/etc/passwd", "way/file", "link", "missing", "."] {
        let place = Place::new();
        let archive = raw(&[
            (EntryType::Symlink, "way", "../outside", b""),
            (EntryType::Symlink, "link", "../outside/file", b""),
            (EntryType::Link, "mine", target, b""),
            (EntryType::Regular, "mine", "", b"theirs"),
        ]);
        place.takes(&archive).unwrap_err();
    }
}

#[test]
fn what_is_neither_file_nor_folder_nor_link_is_left_out() {
    let place = Place::new();
    let archive = raw(&[
        (EntryType::Fifo, "fifo", "", b""),
        (EntryType::Char, "null", "", b""),
        (EntryType::Block, "disk", "", b""),
        (EntryType::Regular, "file", "", b"x"),
    ]);
    let mut left_out = Vec::new();
    let name = |path: &Path| path.file_name().unwrap().to_owned();
    unpack(&archive[..], &place.target(), PLAIN, &mut |path| left_out.push(name(path))).unwrap();
    assert_eq!(left_out, ["fifo", "null", "disk"]);
    assert_eq!(fs::read_dir(place.target()).unwrap().count(), 1);
}

#[test]
fn set_id_bits_arrive_only_where_they_are_asked_for() {
    let place = Place::new();
    let mut header = Header::new_gnu();
    header.set_mode(0o4755);
    header.set_size(0);
    let mut builder = Builder::new(Vec::new());
    builder.append_data(&mut header, "tool", io::empty()).unwrap();
    let archive = builder.into_inner().unwrap();
    let mode = || fs::metadata(place.target().join("tool")).unwrap().mode() & 0o7777;
    place.takes(&archive).unwrap();
    assert_eq!(mode(), 0o755);
    let all = Unpack { modes: 0o7777, ..PLAIN };
    unpack(&archive[..], &place.target(), all, &mut |_| {}).unwrap();
    assert_eq!(mode(), 0o4755);
}

#[test]
fn name_without_end_costs_no_memory() {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(1 << 40);
    header.set_cksum();
    let endless = io::Read::chain(&header.as_bytes()[..], io::repeat(b'a'));
    let place = Place::new();
    let refused = unpack(endless, &place.target(), PLAIN, &mut |_| {}).unwrap_err();
    assert_eq!(refused.errno(), Some(libc::E2BIG), "{refused}");
}

#[test]
fn archive_cut_anywhere_leaves_no_half_file() {
    let from = TempDir::new().unwrap();
    fs::write(from.path().join("a"), vec![7; 3000]).unwrap();
    fs::write(from.path().join("b"), vec![8; 3000]).unwrap();
    let archive = packed(from.path());
    for len in (0..archive.len()).step_by(97) {
        let place = Place::new();
        let _ = place.takes(&archive[..len]);
        for name in ["a", "b"] {
            let len = fs::metadata(place.target().join(name)).map_or(3000, |facts| facts.len());
            assert_eq!(len, 3000, "{name} is there and is not whole");
        }
    }
}
