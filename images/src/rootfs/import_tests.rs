//! Tests of root filesystems from elsewhere: what is kept, and what is refused by name.

use std::process::Command;

use tar::{Builder, Header};

use super::*;
use crate::progress::Silent;
use crate::tool;

/// Adds an entry past the builder's checks, which would refuse what these tests need.
fn entry(tar: &mut Builder<Vec<u8>>, path: &str, kind: EntryType, target: &str, data: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(if kind.is_dir() { 0o755 } else { 0o4755 });
    header.set_uid(7);
    header.set_gid(8);
    header.set_mtime(u64::MAX >> 8);
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target.as_bytes());
    header.set_size(data.len() as u64);
    header.set_cksum();
    tar.append(&header, data).unwrap();
}

fn archive(entries: &[(&str, EntryType, &str, &str)]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (path, kind, target, data) in entries {
        entry(&mut tar, path, *kind, target, data.as_bytes());
    }
    tar.into_inner().unwrap()
}

/// Unpacks an archive beside a folder that nothing may touch.
fn unpack(archive: &[u8]) -> (tempfile::TempDir, Result<(), ImportError>) {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("outside")).unwrap();
    let mut silent = Silent;
    let mut import = Import::begin(&dir.path().join("tree"), &mut silent).unwrap();
    let result = import.tar(Path::new(""), archive);
    assert_eq!(fs::read_dir(dir.path().join("outside")).unwrap().count(), 0);
    (dir, result)
}

const FILE: EntryType = EntryType::Regular;
const DIR: EntryType = EntryType::Directory;
const LINK: EntryType = EntryType::Symlink;
const HARD: EntryType = EntryType::Link;

#[test]
fn hostile_entry_is_refused_by_name() {
    for (path, kind, target, why) in [
        ("../x", FILE, "", "'..'"),
        ("a/../../x", FILE, "", "'..'"),
        ("/etc/x", FILE, "", "absolute"),
        ("hard", HARD, "../outside/x", "outside"),
        ("hard", HARD, "/etc/passwd", "outside"),
        ("hard", HARD, "missing", "does not come before"),
        ("null", EntryType::Char, "", "device"),
        ("disk", EntryType::Block, "", "device"),
        ("pipe", EntryType::Fifo, "", "pipe"),
        ("odd", EntryType::new(b'Z'), "", "unknown kind"),
        ("line\nbreak", FILE, "", "line break"),
    ] {
        let (_dir, result) = unpack(&archive(&[(path, kind, target, "")]));
        let error = result.unwrap_err().to_string();
        assert!(error.contains(why), "{path}: {error}");
        assert!(error.contains(&format!("{path:?}")), "{error}");
    }
}

#[test]
fn links_out_of_the_root_are_never_followed_by_the_host() {
    let link = ("a", LINK, "../outside", "");
    for entries in [
        vec![link, ("a/x", FILE, "", "data")],
        vec![link, ("a", DIR, "", ""), ("a/x", FILE, "", "data")],
        vec![("d", DIR, "", ""), ("d/a", LINK, "../../outside", ""), ("d/a/x", FILE, "", "data")],
        vec![link, ("a/x", LINK, "y", ""), ("a/x", FILE, "", "data")],
    ] {
        let (dir, result) = unpack(&archive(&entries));
        result.unwrap();
        let inside = dir.path().join("tree/outside/x");
        assert_eq!(fs::read_to_string(inside).unwrap(), "data", "{entries:?}");
    }
    // A hard link through such a link finds the file in the tree, of which there is none.
    let (_dir, result) = unpack(&archive(&[link, ("b", HARD, "a/x", "")]));
    assert!(result.unwrap_err().to_string().contains("does not come before"));
}

#[test]
fn header_without_end_is_refused() {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(1 << 40);
    header.set_cksum();
    let endless = io::Cursor::new(header.as_bytes().to_vec()).chain(io::repeat(b'x'));
    let dir = tempfile::tempdir().unwrap();
    let mut silent = Silent;
    let mut import = Import::begin(&dir.path().join("tree"), &mut silent).unwrap();
    let error = import.tar(Path::new(""), endless).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("too long"), "{cause}");
}

#[test]
fn more_bytes_or_entries_than_the_cap_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut silent = Silent;
    let mut import = Import::begin(&dir.path().join("tree"), &mut silent).unwrap();
    import.bytes = MAX_BYTES;
    let error = import.tar(Path::new(""), &archive(&[("x", FILE, "", "1")])[..]).unwrap_err();
    assert!(matches!(error, ImportError::TooLarge));
    import.bytes = 0;
    import.entries = MAX_ENTRIES;
    let error = import.tar(Path::new(""), &archive(&[("x", FILE, "", "1")])[..]).unwrap_err();
    assert!(matches!(error, ImportError::TooMany));
}

#[test]
fn image_of_an_archive_has_its_owners_modes_and_mount_points() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let tar = archive(&[
        ("./", DIR, "", ""),
        ("./usr/bin/tool", FILE, "", "tool"),
        ("./bin", LINK, "usr/bin", ""),
        ("./usr/bin/same", HARD, "bin/tool", ""),
        ("./etc/os-release", FILE, "", "PRETTY_NAME=\"Some Linux 1\"\n"),
    ]);
    let mut silent = Silent;
    let mut import = Import::begin(&dir.path().join("tree"), &mut silent).unwrap();
    import.tar(Path::new(""), &tar[..]).unwrap();
    let (system, digest) = import.finish(&image).unwrap();
    assert_eq!(system, "Some Linux 1");
    assert_eq!(digest.len(), 64);
    let on_disk = fs::metadata(dir.path().join("tree/usr/bin/tool")).unwrap().mode();
    assert_eq!(on_disk & 0o7777, 0o755, "no set-id bits on this host");
    let said = |request: &str| {
        let mut command = Command::new("debugfs");
        command.args(["-R", request]).arg(&image);
        let said = tool::run(command, "e2fsprogs", Duration::from_secs(10), &mut Silent, |_| None);
        said.unwrap().out.join("\n")
    };
    let tool = said("stat /usr/bin/tool");
    assert!(tool.contains("Mode:  04755") && tool.contains("User:     7"), "{tool}");
    assert!(said("stat /usr/bin/same").contains("Mode:  04755"));
    assert!(said("stat /tmp").contains("Mode:  01777"));
    assert!(said("stat /proc").contains("Type: directory"));
}

#[test]
fn capabilities_and_attributes_of_users_are_kept_and_others_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let mut tar = Builder::new(Vec::new());
    let attributes = [
        ("SCHILY.xattr.security.capability", &b"\x01\0\0\x02\0\x20\0\0"[..]),
        ("SCHILY.xattr.user.note", b"a b"),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
    ];
    tar.append_pax_extensions(attributes).unwrap();
    entry(&mut tar, "ping", FILE, "", b"x");
    let mut silent = Silent;
    let mut import = Import::begin(&dir.path().join("tree"), &mut silent).unwrap();
    import.tar(Path::new(""), &tar.into_inner().unwrap()[..]).unwrap();
    import.finish(&image).unwrap();
    let said = Command::new("debugfs").args(["-R", "ea_list /ping"]).arg(&image).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("security.capability (8)") && said.contains("user.note (3)"), "{said}");
    assert!(!said.contains("trusted"), "{said}");
}

#[test]
fn digest_tells_contents_apart_and_not_compressions() {
    let digest = |bytes: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        let mut silent = Silent;
        let mut import = Import::begin(&dir.path().join("tree"), &mut silent).unwrap();
        import.tar(Path::new(""), bytes).unwrap();
        cache::hex(&import.hash.clone().finalize())
    };
    let one = archive(&[("a", FILE, "", "1")]);
    let mut packed = Vec::new();
    flate2::read::GzEncoder::new(&one[..], Default::default()).read_to_end(&mut packed).unwrap();
    assert_eq!(digest(&one), digest(&packed));
    assert_ne!(digest(&one), digest(&archive(&[("a", FILE, "", "2")])));
    assert_ne!(digest(&one), digest(&archive(&[("b", FILE, "", "1")])));
}

#[test]
fn folder_with_a_socket_is_refused_and_links_stay_links() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("folder");
    fs::create_dir_all(folder.join("etc")).unwrap();
    symlink("/etc/shadow", folder.join("etc/link")).unwrap();
    let mut silent = Silent;
    let mut import = Import::begin(&dir.path().join("tree"), &mut silent).unwrap();
    import.folder(&folder).unwrap();
    let link = fs::read_link(dir.path().join("tree/etc/link")).unwrap();
    assert_eq!(link, Path::new("/etc/shadow"));
    let _socket = std::os::unix::net::UnixListener::bind(folder.join("s")).unwrap();
    let mut import = Import::begin(&dir.path().join("tree2"), &mut silent).unwrap();
    assert!(import.folder(&folder).unwrap_err().to_string().contains("neither"));
}
