//! Control groups `<hierarchy>/<parent>/<id>`: created, configured and entered before the jail
//! hides them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::arguments::Options;
use crate::error::JailError;

const MOUNTS: &str = "/proc/mounts";

/// The created control groups. Empty ones are removed on drop, unless [`Groups::keep`] is called.
#[derive(Default)]
pub struct Groups {
    made: Vec<PathBuf>,
}

impl Groups {
    pub fn keep(mut self) {
        self.made.clear();
    }

    fn make(&mut self, folder: &Path) -> Result<(), JailError> {
        let missing: Vec<_> = folder.ancestors().take_while(|folder| !folder.exists()).collect();
        for folder in missing.into_iter().rev() {
            match fs::create_dir(folder) {
                Ok(()) => self.made.push(folder.to_owned()),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed("make", folder, error)),
            }
        }
        Ok(())
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for folder in self.made.iter().rev() {
            // It fails if this process is still in the group; then the caller removes it with the
            // jail.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Moves this process into the requested control groups.
pub fn enter(options: &Options) -> Result<Groups, JailError> {
    let mounts =
        || fs::read_to_string(MOUNTS).map_err(|error| failed("read", MOUNTS.as_ref(), error));
    let mut groups = Groups::default();
    match (options.cgroup_version, options.cgroups.is_empty()) {
        (2, true) => move_to_parent(&unified(&mounts()?)?, options)?,
        (2, false) => enter_unified(&unified(&mounts()?)?, options, &mut groups)?,
        (_, true) => {}
        (_, false) => enter_each(&mounts()?, options, &mut groups)?,
    }
    Ok(groups)
}

/// Enters the parent group that the caller has set up: without values there is no group to create.
fn move_to_parent(unified: &Path, options: &Options) -> Result<(), JailError> {
    let parent = unified.join(&options.parent_cgroup);
    if !parent.exists() {
        return Ok(());
    }
    let procs = parent.join("cgroup.procs");
    fs::write(&procs, format!("{}\n", std::process::id())).map_err(|error| {
        let path = parent.display();
        let hint = "give a --cgroup if a group below it is meant";
        JailError::new(format!("{path}: cannot move there ({hint})"), error)
    })
}

fn enter_unified(unified: &Path, options: &Options, groups: &mut Groups) -> Result<(), JailError> {
    let parent = unified.join(&options.parent_cgroup);
    let group = parent.join(&options.id);
    let available = fs::read_to_string(unified.join("cgroup.controllers")).unwrap_or_default();
    for (file, _) in &options.cgroups {
        let controller = controller(file);
        if !available.split_whitespace().any(|one| one == controller) {
            return Err(no_controller(controller));
        }
    }
    groups.make(&group)?;
    for (file, value) in &options.cgroups {
        // Each group on the path must delegate the controller; the topmost first.
        let way: Vec<_> =
            parent.ancestors().take_while(|folder| folder.starts_with(unified)).collect();
        for folder in way.into_iter().rev() {
            write(&folder.join("cgroup.subtree_control"), &format!("+{}", controller(file)))?;
        }
        write(&group.join(file), value)?;
    }
    write(&group.join("cgroup.procs"), &std::process::id().to_string())
}

fn enter_each(mounts: &str, options: &Options, groups: &mut Groups) -> Result<(), JailError> {
    let mut entered: Vec<PathBuf> = Vec::new();
    for (file, value) in &options.cgroups {
        let hierarchy = hierarchy_of(controller(file), mounts)?;
        let group = hierarchy.join(&options.parent_cgroup).join(&options.id);
        groups.make(&group)?;
        inherit(&hierarchy, &group, file)?;
        write(&group.join(file), value)?;
        if !entered.contains(&group) {
            entered.push(group);
        }
    }
    for group in entered {
        write(&group.join("tasks"), &std::process::id().to_string())?;
    }
    Ok(())
}

/// Copies the parent's value into files that are empty in a new group; they need one before they
/// can be set.
fn inherit(hierarchy: &Path, group: &Path, file: &str) -> Result<(), JailError> {
    let read = |folder: &Path| fs::read_to_string(folder.join(file));
    let way: Vec<_> = group.ancestors().take_while(|folder| *folder != hierarchy).collect();
    let mut above = read(hierarchy).unwrap_or_default();
    for folder in way.into_iter().rev() {
        let here = read(folder).map_err(|error| failed("read", &folder.join(file), error))?;
        if here.trim().is_empty() && !above.trim().is_empty() {
            // Another jailer may do this at once; the file only has to be non-empty afterwards.
            let _ = fs::write(folder.join(file), &above);
        }
        above = read(folder).unwrap_or(here);
    }
    Ok(())
}

fn controller(file: &str) -> &str {
    file.split_once('.').map_or(file, |(controller, _)| controller)
}

/// Returns the mount point of the version 2 hierarchy.
fn unified(mounts: &str) -> Result<PathBuf, JailError> {
    let mut mounts = parse(mounts).filter(|mount| mount.kind == "cgroup2");
    let missing = || JailError::plain("--cgroup-version 2: no such hierarchy is mounted here");
    mounts.next().map(|mount| mount.folder).ok_or_else(missing)
}

/// Returns the mount point of a version 1 controller's hierarchy.
fn hierarchy_of(controller: &str, mounts: &str) -> Result<PathBuf, JailError> {
    let has = |mount: &Mount| mount.options.split(',').any(|option| option == controller);
    let mut mounts = parse(mounts).filter(|mount| mount.kind == "cgroup").peekable();
    if mounts.peek().is_none() {
        let what = "--cgroup: this host has no control groups of version 1; use --cgroup-version 2";
        return Err(JailError::plain(what));
    }
    mounts.find(has).map(|mount| mount.folder).ok_or_else(|| no_controller(controller))
}

struct Mount<'a> {
    folder: PathBuf,
    kind: &'a str,
    options: &'a str,
}

fn parse(mounts: &str) -> impl Iterator<Item = Mount<'_>> {
    mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (folder, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        // The kernel escapes a space in a path this way.
        Some(Mount { folder: folder.replace("\\040", " ").into(), kind, options })
    })
}

fn no_controller(controller: &str) -> JailError {
    JailError::plain(format!("--cgroup: this host has no controller {controller:?}"))
}

fn write(path: &Path, value: &str) -> Result<(), JailError> {
    fs::write(path, format!("{value}\n")).map_err(|error| failed("write", path, error))
}

fn failed(act: &str, path: &Path, error: io::Error) -> JailError {
    JailError::new(format!("{}: cannot {act} it", path.display()), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/with\\040blank cgroup rw,memory 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,nsdelegate 0 0
";

    #[test]
    fn hierarchies_are_found_by_version_and_controller() {
        assert_eq!(unified(MOUNTS).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        let cpu = hierarchy_of("cpuacct", MOUNTS).unwrap();
        assert_eq!(cpu, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        let memory = hierarchy_of("memory", MOUNTS).unwrap();
        assert_eq!(memory, Path::new("/sys/fs/cgroup/with blank"));
        let error = hierarchy_of("rw2", MOUNTS).unwrap_err().to_string();
        assert!(error.contains("no controller \"rw2\""), "{error}");
        assert!(unified("").is_err());
        let error = hierarchy_of("cpu", "").unwrap_err().to_string();
        assert!(error.contains("use --cgroup-version 2"), "{error}");
    }

    #[test]
    fn empty_files_get_their_parents_value_first() {
        let place = tempfile::tempdir().unwrap();
        let group = place.path().join("firecracker/one");
        fs::create_dir_all(&group).unwrap();
        fs::write(place.path().join("cpuset.mems"), "0\n").unwrap();
        for folder in [&group, group.parent().unwrap()] {
            fs::write(folder.join("cpuset.mems"), "\n").unwrap();
        }
        inherit(place.path(), &group, "cpuset.mems").unwrap();
        assert_eq!(fs::read_to_string(group.join("cpuset.mems")).unwrap(), "0\n");
        assert!(inherit(place.path(), &group, "cpuset.none").is_err());
    }

    #[test]
    fn groups_that_were_made_in_vain_go_again() {
        let place = tempfile::tempdir().unwrap();
        let mut groups = Groups::default();
        groups.make(&place.path().join("a/b")).unwrap();
        drop(groups);
        assert!(!place.path().join("a").exists());
        let mut groups = Groups::default();
        groups.make(&place.path().join("a/b")).unwrap();
        groups.keep();
        assert!(place.path().join("a/b").exists());
    }
}
