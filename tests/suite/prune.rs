//! `pvmm prune`: what it removes from the cache, and what VMs and snapshots keep there.

use std::fs;
use std::path::Path;

use pvmm_tests::cli::User;
use serde_json::Value;
use tempfile::TempDir;

use crate::travel::make_system;

/// Returns the kinds of what was removed.
fn prune(user: &User, more: &[&str]) -> Vec<String> {
    let said = user.ok(&[&["-q", "prune", "--json"], more].concat());
    let pruned: Vec<Value> = serde_json::from_str(&said).unwrap();
    pruned.iter().map(|one| one["kind"].as_str().unwrap().to_owned()).collect()
}

/// Builds the template `tiny` with this text in a file.
fn build(user: &User, system: &Path, text: &str) {
    fs::write(system.join("etc/made"), text).unwrap();
    user.ok(&["-q", "template", "build", "tiny", "--dir", system.to_str().unwrap()]);
}

#[test]
fn image_of_a_hibernated_vm_outlives_its_template_and_goes_with_the_vm() {
    let (user, dir) = (User::with_home(), TempDir::new().unwrap());
    make_system(dir.path());
    build(&user, dir.path(), "first");
    user.ok(&["run", "-d", "--name", "web", "--template", "tiny"]);
    build(&user, dir.path(), "second");
    assert!(prune(&user, &[]).is_empty(), "the running VM has its warm template and image open");
    let snapshot = dir.path().join("snapshot");
    user.ok(&["-q", "snapshot", "web", snapshot.to_str().unwrap()]);
    user.ok(&["hibernate", "web"]);
    assert_eq!(prune(&user, &[]), ["warm template"]);
    user.ok(&["template", "rm", "tiny"]);
    // The second image is still needed by what would be removed.
    assert_eq!(prune(&user, &["--dry-run"]), ["warm template"]);
    assert_eq!(prune(&user, &[]), ["warm template", "image"]);
    user.ok(&["wake", "web"]);
    assert_eq!(user.shell("web", "cat /etc/made"), "first");
    user.ok(&["kill", "web"]);
    assert!(prune(&user, &[]).is_empty(), "the snapshot in another folder names the image");
    fs::remove_dir_all(&snapshot).unwrap();
    assert_eq!(prune(&user, &[]), ["image"]);
    assert_eq!(fs::read_dir(user.home().join("images")).unwrap().count(), 0);
}
