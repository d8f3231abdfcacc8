//! Tests of creating, finding, sweeping and refusing VM directories.

use std::os::unix::fs::PermissionsExt;
use std::sync::MutexGuard;

use super::*;
use crate::sys::probe::without_forks;

struct Fixture {
    base: Base,
    _home: tempfile::TempDir,
    /// Locks are tested.
    _forks: MutexGuard<'static, ()>,
}

impl Fixture {
    /// Leaves a VM whose process was killed: the lock is free and nothing was removed.
    fn abandoned(&self, record: Record) -> VmDir {
        let mut claim = self.base.create(record, None).unwrap();
        claim.keep();
        claim.dir.clone()
    }
}

fn fixture() -> Fixture {
    let home = tempfile::tempdir().unwrap();
    // The base is created by the first VM, inside a private home.
    let base = Base::at(home.path().join("pvmm")).unwrap();
    Fixture { base, _home: home, _forks: without_forks() }
}

fn named(name: &str) -> Record {
    Record { name: Some(name.to_owned()), ..Record::default() }
}

#[test]
fn create_makes_private_directories() {
    let fixture = fixture();
    let claim = fixture.base.create(Record::default(), None).unwrap();
    for path in [fixture.base.path(), claim.dir.path.as_path()] {
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o700);
    }
    assert!(claim.dir.is_alive());
    assert_eq!(fixture.base.list().unwrap()[0].state, VmStatus::Starting);
}

#[test]
fn create_with_taken_name_is_refused_and_leaves_nothing() {
    let fixture = fixture();
    let _first = fixture.base.create(named("web"), None).unwrap();
    let second = fixture.base.create(named("web"), None);
    assert!(matches!(second, Err(VmDirError::NameTaken { .. })));
    assert_eq!(fixture.base.list().unwrap().len(), 1);
}

#[test]
fn create_with_one_name_from_many_threads_succeeds_once() {
    let fixture = fixture();
    let claims: Vec<_> = std::thread::scope(|scope| {
        let makers: Vec<_> =
            (0..8).map(|_| scope.spawn(|| fixture.base.create(named("x"), None))).collect();
        makers.into_iter().map(|maker| maker.join().unwrap()).collect()
    });
    assert_eq!(claims.iter().filter(|claim| claim.is_ok()).count(), 1);
}

#[test]
fn claim_dropped_removes_its_directory() {
    let fixture = fixture();
    drop(fixture.base.create(Record::default(), None).unwrap());
    assert!(fixture.base.list().unwrap().is_empty());
    assert!(!fixture.base.path().exists(), "the last one takes the base with it");
}

#[test]
fn create_and_drop_from_many_threads_never_fails() {
    let fixture = fixture();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    drop(fixture.base.create(Record::default(), None).unwrap());
                }
            });
        }
    });
}

#[test]
fn list_after_maker_died_sweeps_ephemeral_and_keeps_detached_as_dead() {
    let fixture = fixture();
    for ephemeral in [true, false] {
        fixture.abandoned(Record { ephemeral, ..Record::default() });
    }
    fs::create_dir(fixture.base.path().join("0123456789ab")).unwrap();
    let left = fixture.base.list().unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].state, VmStatus::Dead);
    assert_eq!(fs::read_dir(fixture.base.path()).unwrap().count(), 1);
}

#[test]
fn entry_with_ending_is_exited() {
    let fixture = fixture();
    let dir = fixture.abandoned(Record::default());
    let ending = Ending { exit_code: Some(3), reason: "the command ended".to_owned(), at: now() };
    dir.write_ending(&ending).unwrap();
    assert_eq!(fixture.base.list().unwrap()[0].state, VmStatus::Exited(ending));
}

#[test]
fn find_by_id_name_or_unique_start_finds_it() {
    let fixture = fixture();
    let claim = fixture.base.create(named("web"), None).unwrap();
    let id = claim.dir.read_record().unwrap().id;
    for reference in [&id, "web", &id[..3]] {
        assert_eq!(fixture.base.find(reference).unwrap().record.id, id);
    }
    for reference in ["", "we", "webb", "../x"] {
        assert!(matches!(fixture.base.find(reference), Err(VmDirError::Unknown(_))));
    }
}

#[test]
fn find_by_shared_start_is_ambiguous() {
    let fixture = fixture();
    for id in ["aaaaaaaaaaa1", "aaaaaaaaaaa2"] {
        let dir = VmDir { path: fixture.base.path().join(id) };
        fs::create_dir_all(&dir.path).unwrap();
        dir.write_record(&Record::default()).unwrap();
    }
    let found = fixture.base.find("aaa");
    assert!(matches!(found, Err(VmDirError::Ambiguous { count: 2, .. })));
}

#[test]
fn base_that_others_can_read_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let open = home.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(matches!(Base::at(open.clone()), Err(VmDirError::NotOurs { .. })));
    let link = home.path().join("link");
    std::os::unix::fs::symlink(&open, &link).unwrap();
    assert!(matches!(Base::at(link), Err(VmDirError::NotOurs { .. })));
}

#[test]
fn base_too_long_for_a_socket_is_refused() {
    let path = Path::new("/tmp").join("x".repeat(80));
    assert!(matches!(Base::at(path.clone()), Err(VmDirError::TooLong { .. })));
    assert!(!path.exists());
    assert!(matches!(Base::at("pvmm".into()), Err(VmDirError::Relative(_))));
}

#[test]
fn command_of_endless_line_is_cut() {
    let argv: Vec<std::ffi::OsString> = vec!["a".into(), "x".repeat(5000).into()];
    assert_eq!(Record::command_of(&argv), ["a", "…"]);
}

#[test]
fn user_of_a_vm_is_one_of_the_range_that_no_other_vm_has() {
    let fixture = fixture();
    let users = UidRange(70_000..=70_002);
    for user in [70_000, 70_002] {
        fixture.abandoned(Record { user: Some(user), ..Record::default() });
    }
    assert_eq!(fixture.base.free_user(&users).unwrap(), 70_001);
    fixture.abandoned(Record { user: Some(70_001), ..Record::default() });
    assert!(matches!(fixture.base.free_user(&users), Err(VmDirError::NoUser)));
}
