//! The root folder of a jail: `<base>/<name of the program>/<id>/root`, with the program and the
//! devices that it needs.
//!
//! Callers put images and sockets into that folder before and after, so an existing one is used.
//! The program is copied, not linked, so that two monitor processes never share the memory of one
//! file.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use crate::arguments::Options;
use crate::error::JailError;
use crate::sys;

/// The folders of the jail, parents first; the program's user owns all of them.
const FOLDERS: [&str; 4] = ["/", "/dev", "/dev/net", "/run"];
const FOLDER_MODE: u32 = 0o700;
/// The mode of the folders around the root, and the number of levels below the base.
const OUTER_MODE: u32 = 0o755;
const LEVELS: usize = 3;
/// The temporary mount point of the old root.
const OLD_ROOT: &str = "old_root";
const MISC: u32 = 10;

/// A device node of the jail.
struct Node {
    path: &'static str,
    major: u32,
    minor: u32,
    /// Whether a failure to create it is fatal.
    needed: bool,
}

/// The kernel's permanently assigned device numbers.
const NODES: [Node; 3] = [
    Node { path: "/dev/net/tun", major: MISC, minor: 200, needed: true },
    Node { path: "/dev/kvm", major: MISC, minor: 232, needed: true },
    Node { path: "/dev/urandom", major: 1, minor: 9, needed: false },
];

/// A jail under construction, seen from outside. Removed on drop, unless it has been entered.
pub struct Jail {
    root: PathBuf,
    program: PathBuf,
    owner: (u32, u32),
    /// The base and the folders below it down to the root, open: a folder that is swapped for a
    /// link meanwhile leads nowhere else.
    folders: Vec<File>,
    /// Created files and folders, innermost last: the folder that each is in, and its name.
    made: Vec<(usize, OsString)>,
    entered: bool,
}

impl Jail {
    /// Creates the folder and copies the program into it. Fails if the jail has been used before.
    pub fn create(options: &Options) -> Result<Self, JailError> {
        let root = options.chroot_base.join(options.exec_name()).join(&options.id).join("root");
        let program = root.join(options.exec_name());
        let owner = (options.uid, options.gid);
        let (folders, made) = (Vec::new(), Vec::new());
        let mut jail = Self { root, program, owner, folders, made, entered: false };
        jail.make_root()?;
        for node in &NODES {
            if jail.inside(LEVELS, node.path.trim_start_matches('/')).symlink_metadata().is_ok() {
                let root = jail.root.display();
                let what = format!(
                    "{root}: is the jail of an earlier run; remove it, or use another --id"
                );
                return Err(JailError::plain(what));
            }
        }
        jail.copy_program(&options.exec_file)?;
        Ok(jail)
    }

    /// Creates the missing folders below the base. None may be a symbolic link: it could lead to
    /// any folder of the host, which the program would then own.
    fn make_root(&mut self) -> Result<(), JailError> {
        let root = self.root.clone();
        let mut paths: Vec<_> = root.ancestors().take(LEVELS + 1).collect();
        paths.reverse();
        for (level, path) in paths.into_iter().enumerate() {
            if level == 0 {
                self.folders.push(File::open(path).map_err(|e| failed("open", path, e))?);
                continue;
            }
            let name = path.file_name().unwrap_or_default();
            let place = self.inside(level - 1, name);
            let made = DirBuilder::new().mode(OUTER_MODE).create(&place);
            match &made {
                Ok(()) => self.made.push((level - 1, name.to_owned())),
                // It belongs to the caller, or to other jails of this program.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let error = error.raw_os_error().map(io::Error::from_raw_os_error);
                    return Err(failed(
                        "make",
                        path,
                        error.unwrap_or_else(|| io::ErrorKind::Other.into()),
                    ));
                }
            }
            let folder = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
                .open(&place);
            let folder = folder.map_err(|error| match error.raw_os_error() {
                Some(libc::ENOTDIR | libc::ELOOP) => {
                    JailError::plain(format!("{}: is not a folder; remove it", path.display()))
                }
                _ => failed("open", path, error),
            })?;
            if made.is_ok() {
                folder
                    .set_permissions(Permissions::from_mode(OUTER_MODE))
                    .map_err(|e| failed("set the mode of", path, e))?;
            }
            self.folders.push(folder);
        }
        Ok(())
    }

    /// Returns a path of `name` in the open folder `level` below the base.
    fn inside(&self, level: usize, name: impl AsRef<Path>) -> PathBuf {
        let fd = self.folders.get(level).map_or(-1, AsRawFd::as_raw_fd);
        Path::new("/proc/self/fd").join(fd.to_string()).join(name)
    }

    fn copy_program(&mut self, from: &Path) -> Result<(), JailError> {
        let mut source = File::open(from).map_err(|e| failed("open", from, e))?;
        let mode = source.metadata().map_err(|e| failed("look at", from, e))?.mode();
        let name = self.program.file_name().unwrap_or_default().to_owned();
        let place = self.inside(LEVELS, &name);
        let existed = place.symlink_metadata().is_ok();
        let mut options = OpenOptions::new();
        // A symbolic link could lead out of the jail.
        options.write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW);
        let mut copy = options
            .mode(mode & 0o777)
            .open(&place)
            .map_err(|e| failed("write", &self.program, e))?;
        if !existed {
            self.made.push((LEVELS, name));
        }
        let facts = copy.metadata().map_err(|e| failed("look at", &self.program, e))?;
        if !facts.is_file() || facts.nlink() > 1 {
            let what = format!("{}: has other names; remove it", self.program.display());
            return Err(JailError::plain(what));
        }
        copy.set_len(0)
            .and_then(|()| io::copy(&mut source, &mut copy).map(drop))
            .and_then(|()| fchown(&copy, Some(self.owner.0), Some(self.owner.1)))
            .and_then(|()| copy.set_permissions(Permissions::from_mode(mode & 0o777)))
            .map_err(|e| failed("write", &self.program, e))
    }

    /// Makes the folder this process's root, in a new mount namespace without any other mount.
    pub fn enter(mut self) -> Result<Inside, JailError> {
        // Read now: /proc is not visible in the jail.
        let userfault = userfault_minor();
        let at = |act: &str| format!("{}: cannot {act}", self.root.display());
        let step = |act: &'static str, done: io::Result<()>| {
            done.map_err(|error| JailError::new(at(act), error))
        };
        step("leave the mounts of the host", sys::unshare_mounts())?;
        step("mount it on itself", sys::bind_on_itself(&self.root))?;
        step("go there", std::env::set_current_dir(&self.root))?;
        let old = DirBuilder::new().mode(0o700).create(OLD_ROOT);
        step("make a place for the old root", old)?;
        if let Err(error) = sys::pivot_root(Path::new("."), Path::new(OLD_ROOT)) {
            let _ = fs::remove_dir(OLD_ROOT);
            return step("make it the root", Err(error)).map(|()| unreachable!());
        }
        self.entered = true;
        // An open folder of the host would be a way out.
        self.folders.clear();
        step("go to the new root", std::env::set_current_dir("/"))?;
        step("let go of the old root", sys::detach(Path::new(OLD_ROOT)))?;
        step("remove the place of the old root", fs::remove_dir(OLD_ROOT))?;
        Ok(Inside { owner: self.owner, userfault })
    }
}

impl Drop for Jail {
    fn drop(&mut self) {
        if !self.entered {
            for (level, name) in self.made.iter().rev() {
                let path = self.inside(*level, name);
                // A folder with files of others is not empty and stays.
                let _ = fs::remove_dir(&path).or_else(|_| fs::remove_file(&path));
            }
        }
    }
}

/// The jail seen from inside, after it has become the root.
pub struct Inside {
    owner: (u32, u32),
    userfault: Option<u32>,
}

impl Inside {
    /// Creates folders and device nodes, all owned by the program's user.
    pub fn furnish(&self) -> Result<(), JailError> {
        for folder in FOLDERS {
            self.make_folder(Path::new(folder)).map_err(|e| failed("make", folder.as_ref(), e))?;
        }
        for node in &NODES {
            match self.make_node(node.path, node.major, node.minor) {
                Err(error) if node.needed => return Err(error),
                Err(error) => eprintln!("pvmm-jailer: {error}; going on without it"),
                Ok(()) => {}
            }
        }
        match self.userfault {
            Some(minor) => self.make_node("/dev/userfaultfd", MISC, minor),
            None => Ok(()),
        }
    }

    fn make_folder(&self, folder: &Path) -> io::Result<()> {
        match DirBuilder::new().mode(FOLDER_MODE).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // A symbolic link here must not give away what it points to.
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW);
        let folder = options.open(folder)?;
        folder.set_permissions(Permissions::from_mode(FOLDER_MODE))?;
        fchown(&folder, Some(self.owner.0), Some(self.owner.1))
    }

    fn make_node(&self, path: &str, major: u32, minor: u32) -> Result<(), JailError> {
        let path = Path::new(path);
        sys::make_node(path, major, minor)
            .and_then(|()| std::os::unix::fs::lchown(path, Some(self.owner.0), Some(self.owner.1)))
            .map_err(|error| failed("make", path, error))
    }
}

/// Returns the minor number of the userfaultfd device, if the kernel has one.
fn userfault_minor() -> Option<u32> {
    minor_of("userfaultfd", &fs::read_to_string("/proc/misc").ok()?)
}

fn minor_of(name: &str, misc: &str) -> Option<u32> {
    let mut devices = misc.lines().filter_map(|line| line.trim().split_once(' '));
    devices.find(|(_, device)| device.trim() == name)?.0.parse().ok()
}

fn failed(act: &str, path: &Path, error: io::Error) -> JailError {
    JailError::new(format!("{}: cannot {act} it", path.display()), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(base: &Path, program: &Path) -> Options {
        let line = format!(
            "--id one --exec-file {} --uid {} --gid {} --chroot-base-dir {}",
            program.display(),
            sys::user(),
            sys::group(),
            base.display()
        );
        let words = line.split_whitespace().map(Into::into);
        match crate::arguments::parse(words).unwrap() {
            crate::arguments::JailerCommand::Run(options) => *options,
            other => panic!("{other:?}"),
        }
    }

    fn place() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("firecracker");
        fs::write(&program, "#!/bin/true").unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let base = place.path().join("jails");
        fs::create_dir(&base).unwrap();
        (place, base, program)
    }

    #[test]
    fn jail_has_the_layout_of_the_original_and_a_program_of_its_own() {
        let (_place, base, program) = place();
        let mut jail = Jail::create(&options(&base, &program)).unwrap();
        let copy = base.join("firecracker/one/root/firecracker");
        assert_eq!(fs::read(&copy).unwrap(), b"#!/bin/true");
        let facts = fs::metadata(&copy).unwrap();
        assert_eq!((facts.mode() & 0o777, facts.nlink()), (0o755, 1));
        assert_ne!(facts.ino(), fs::metadata(&program).unwrap().ino());
        jail.entered = true;
    }

    #[test]
    fn jail_that_comes_to_nothing_leaves_what_was_there_and_no_more() {
        let (_place, base, program) = place();
        drop(Jail::create(&options(&base, &program)).unwrap());
        assert_eq!(fs::read_dir(&base).unwrap().count(), 0);
        let root = base.join("firecracker/one/root");
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("rootfs.ext4"), "image").unwrap();
        drop(Jail::create(&options(&base, &program)).unwrap());
        assert_eq!(fs::read(root.join("rootfs.ext4")).unwrap(), b"image");
        assert!(!root.join("firecracker").exists());
    }

    #[test]
    fn k2_links_in_a_jail_are_not_followed() {
        let (place, base, program) = place();
        let root = base.join("firecracker/one/root");
        fs::create_dir_all(&root).unwrap();
        let victim = place.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, root.join("firecracker")).unwrap();
        assert!(Jail::create(&options(&base, &program)).is_err());
        fs::remove_file(root.join("firecracker")).unwrap();
        fs::hard_link(&victim, root.join("firecracker")).unwrap();
        let error = Jail::create(&options(&base, &program)).err().unwrap().to_string();
        assert!(error.contains("has other names"), "{error}");
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        // The root itself must not be a link either.
        fs::remove_dir_all(&root).unwrap();
        std::os::unix::fs::symlink(place.path(), &root).unwrap();
        assert!(Jail::create(&options(&base, &program)).is_err());
    }

    #[test]
    fn k1_link_at_a_folder_of_the_jails_own_is_refused_and_nothing_is_written_behind_it() {
        for link in ["firecracker", "firecracker/one", "firecracker/one/root"] {
            let (place, base, program) = place();
            let elsewhere = place.path().join("elsewhere");
            fs::create_dir_all(elsewhere.join("one/root")).unwrap();
            fs::create_dir_all(elsewhere.join("root")).unwrap();
            let link = base.join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
            let error = Jail::create(&options(&base, &program)).err().unwrap().to_string();
            assert!(error.contains("is not a folder"), "{error}");
            assert!(link.symlink_metadata().unwrap().is_symlink());
            for root in ["one/root", "root"] {
                assert_eq!(fs::read_dir(elsewhere.join(root)).unwrap().count(), 0, "{link:?}");
            }
        }
    }

    #[test]
    fn k3_folder_that_is_swapped_while_a_jail_is_made_never_leads_outside() {
        let (place, base, program) = place();
        let (outside, root) = (place.path().join("outside"), base.join("firecracker/one/root"));
        fs::create_dir_all(&outside).unwrap();
        fs::write(outside.join("firecracker"), "precious").unwrap();
        let (link, aside) = (base.join("link"), base.join("aside"));
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        fs::create_dir_all(&root).unwrap();
        let (options, done) = (options(&base, &program), std::sync::atomic::AtomicBool::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    // The folder and a link out of the jail take turns at its place.
                    let _ = fs::rename(&root, &aside);
                    let _ = fs::rename(&link, &root);
                    let _ = fs::rename(&root, &link);
                    let _ = fs::rename(&aside, &root);
                }
            });
            for _ in 0..10_000 {
                drop(Jail::create(&options));
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(fs::read(outside.join("firecracker")).unwrap(), b"precious");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    }

    #[test]
    fn k9_jail_of_an_earlier_run_is_refused_by_name() {
        let (_place, base, program) = place();
        fs::create_dir_all(base.join("firecracker/one/root/dev/kvm")).unwrap();
        let error = Jail::create(&options(&base, &program)).err().unwrap().to_string();
        assert!(error.contains("one/root: is the jail of an earlier run"), "{error}");
    }

    #[test]
    fn number_of_a_device_is_found_by_its_name() {
        let misc = " 59 userfaultfd\n232 kvm\nx broken\n";
        assert_eq!(minor_of("userfaultfd", misc), Some(59));
        assert_eq!(minor_of("kvm", misc), Some(232));
        assert_eq!((minor_of("tun", misc), minor_of("broken", misc)), (None, None));
    }
}
