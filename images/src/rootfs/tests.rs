//! Tests of unpacking and of the image, with made-up packages; `tests/build.rs` uses Debian's.

use std::os::unix::fs::{MetadataExt, symlink};
use std::process::Command;
use std::time::Duration;

use tar::{Builder, EntryType, Header};

use super::*;
use crate::deb::tests::write_package;
use crate::progress::Silent;
use crate::tool;

/// A package under construction.
struct Package(Builder<Vec<u8>>);

impl Package {
    fn new() -> Package {
        Package(Builder::new(Vec::new()))
    }

    fn entry(
        mut self,
        path: &str,
        kind: EntryType,
        mode: u32,
        ids: (u64, u64),
        data: &str,
    ) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(ids.0);
        header.set_gid(ids.1);
        header.set_mtime(1_000_000_000);
        // Written past the builder's checks, which would refuse a path that leaves the root.
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        let content = if kind.is_file() { data.as_bytes() } else { &[] };
        if !kind.is_file() {
            header.as_mut_bytes()[157..157 + data.len()].copy_from_slice(data.as_bytes());
        }
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.entry(path, EntryType::Regular, 0o644, (0, 0), content)
    }

    fn link(self, path: &str, target: &str) -> Self {
        self.entry(path, EntryType::Symlink, 0o777, (0, 0), target)
    }

    fn unpack(self, tree: &mut Tree, dir: &Path) -> Result<(), RootfsError> {
        let path = dir.join("package.deb");
        write_package(&path, "data.tar", &self.0.into_inner().unwrap());
        tree.unpack(&path)
    }
}

fn tree() -> (tempfile::TempDir, Tree) {
    let dir = tempfile::tempdir().unwrap();
    let tree = Tree::create(&dir.path().join("root")).unwrap();
    (dir, tree)
}

fn debugfs(image: &Path, request: &str) -> String {
    let mut command = Command::new("debugfs");
    command.arg("-R").arg(request).arg(image);
    tool::run_quietly(command, "e2fsprogs", Duration::from_secs(30)).unwrap().out.join("\n")
}

#[test]
fn package_with_bin_lands_in_usr() {
    let (dir, mut tree) = tree();
    let package = Package::new().file("./bin/tool", "x").file("./lib/x.so", "y");
    package.unpack(&mut tree, dir.path()).unwrap();
    assert_eq!(fs::read_to_string(tree.path("usr/bin/tool")).unwrap(), "x");
    assert_eq!(fs::read_to_string(tree.path("bin/tool")).unwrap(), "x");
    assert_eq!(fs::metadata(tree.path("usr/lib/x.so")).unwrap().mtime(), 1_000_000_000);
}

#[test]
fn package_with_manuals_loses_them() {
    let (dir, mut tree) = tree();
    let package = Package::new()
        .file("usr/share/man/man1/a.1", "x")
        .file("usr/share/doc/a/copyright", "x")
        .file("usr/lib/python3.11/EXTERNALLY-MANAGED", "x")
        .file("usr/share/documents", "kept");
    package.unpack(&mut tree, dir.path()).unwrap();
    assert!(!tree.has("usr/share/man") && !tree.has("usr/share/doc"));
    assert!(!tree.has("usr/lib/python3.11/EXTERNALLY-MANAGED"));
    assert!(tree.has("usr/share/documents"));
}

#[test]
fn package_that_climbs_out_is_refused() {
    let (dir, mut tree) = tree();
    let err = Package::new().file("../evil", "x").unpack(&mut tree, dir.path()).unwrap_err();
    assert!(matches!(err, RootfsError::Escapes { .. }), "{err}");
    assert!(!dir.path().join("evil").exists());
}

#[test]
fn package_that_writes_through_a_link_stays_in_the_tree() {
    let (dir, mut tree) = tree();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let absolute = outside.to_str().unwrap();
    let package = Package::new()
        .link("etc/abs", absolute)
        .file("etc/abs/a", "x")
        .link("etc/up", "../../../../outside")
        .file("etc/up/b", "x");
    package.unpack(&mut tree, dir.path()).unwrap();
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    assert!(tree.has(&format!("{}/a", absolute.trim_start_matches('/'))));
    assert!(tree.has("outside/b"));
}

#[test]
fn package_with_a_directory_in_the_place_of_its_link_stays_in_the_tree() {
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let mut tree = Tree::create(&dir.path().join("tree")).unwrap();
    let package = Package::new()
        .link("a", "/outside")
        .entry("a", EntryType::Directory, 0o755, (0, 0), "")
        .file("a/x", "inside")
        .link("b", "../outside")
        .entry("b", EntryType::Directory, 0o755, (0, 0), "")
        .file("b/y", "inside");
    package.unpack(&mut tree, dir.path()).unwrap();
    assert_eq!(fs::read_dir(outside).unwrap().count(), 0);
    assert!(tree.has("outside/x") && tree.has("outside/y"));
}

#[test]
fn package_with_links_in_a_circle_is_refused() {
    let (dir, mut tree) = tree();
    let package = Package::new().link("a", "b").link("b", "a").file("a/x", "x");
    let err = package.unpack(&mut tree, dir.path()).unwrap_err();
    assert!(matches!(err, RootfsError::Unpack { .. }), "{err}");
}

#[test]
fn write_over_a_link_replaces_the_link() {
    let (dir, mut tree) = tree();
    let outside = dir.path().join("outside");
    fs::write(&outside, "kept").unwrap();
    fs::create_dir_all(tree.path("etc")).unwrap();
    symlink(&outside, tree.path("etc/hosts")).unwrap();
    tree.write("etc/hosts", "new", 0o644).unwrap();
    assert_eq!(fs::read_to_string(&outside).unwrap(), "kept");
    assert_eq!(fs::read_to_string(tree.path("etc/hosts")).unwrap(), "new");
}

#[test]
fn image_of_tree_has_owners_modes_and_odd_names() {
    let (dir, mut tree) = tree();
    let package = Package::new()
        .entry("usr/bin/su", EntryType::Regular, 0o4111, (0, 42), "elf")
        .entry("srv", EntryType::Directory, 0o2555, (7, 8), "")
        .file("srv/a \"b\" c", "spaced");
    package.unpack(&mut tree, dir.path()).unwrap();
    tree.directory("tmp", 0o1777).unwrap();
    let image = dir.path().join("image");
    image::write(&tree, &image, &mut Silent).unwrap();
    let su = debugfs(&image, "stat /usr/bin/su");
    assert!(su.contains("Mode:  04111") && su.contains("Group:    42"), "{su}");
    assert!(su.contains("User:     0 "), "{su}");
    let srv = debugfs(&image, "stat /srv");
    assert!(srv.contains("Mode:  02555") && srv.contains("User:     7"), "{srv}");
    assert!(debugfs(&image, "stat /tmp").contains("Mode:  01777"));
    assert_eq!(debugfs(&image, "cat \"/srv/a \"\"b\"\" c\""), "spaced");
    let mut fsck = Command::new("e2fsck");
    fsck.arg("-fn").arg(&image);
    tool::run_quietly(fsck, "e2fsprogs", Duration::from_secs(30)).unwrap();
}

#[test]
fn image_of_name_with_line_break_is_refused() {
    let (dir, tree) = tree();
    fs::write(tree.path("a\nb"), "").unwrap();
    let err = image::write(&tree, &dir.path().join("image"), &mut Silent).unwrap_err();
    assert!(matches!(err, RootfsError::LineBreak { .. }), "{err}");
}
