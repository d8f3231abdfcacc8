//! Boots from the kernel's hand-over to a system in which programs can run.
//!
//! The root image is never written: writes go to an overlay on a disk or in memory.
#![allow(unsafe_code)] // loopback and standard descriptors have no safe calls

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use super::words::Words;
use super::{device, modules};
use crate::mounts::{self, Mount};
use crate::sys::{self, check};

/// The time limit for a disk to appear.
const DEVICE_TIME: Duration = Duration::from_secs(10);
const LOWER: &str = "/.lower";
const UPPER: &str = "/.upper";
const ROOT: &str = "/.root";
const DEFAULT_HOSTNAME: &str = "pvmm";
const MACHINE_ID: &str = "/etc/machine-id";
/// Filesystems tried in order when the host does not name the root's.
const ROOT_TYPES: [&str; 5] = ["ext4", "erofs", "squashfs", "xfs", "btrfs"];

/// A failed step of the boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    #[error("cannot mount {what} as {kind} on {target}")]
    Mount { what: String, kind: String, target: String, source: io::Error },
    #[error("cannot mount {device} as the root: no filesystem that this kernel knows is on it")]
    UnknownRoot { device: String },
    #[error("{name}={device}: no such device came within {} s", DEVICE_TIME.as_secs())]
    NoDevice { name: &'static str, device: String },
    #[error("cannot make the directory {path}")]
    Directory { path: String, source: io::Error },
    #[error("cannot read the kernel command line")]
    CommandLine(#[source] io::Error),
    #[error("cannot look at the root")]
    Root(#[source] io::Error),
    #[error("cannot switch to the new root")]
    Switch(#[source] io::Error),
}

/// The part of the boot's result that the shutdown needs.
#[derive(Default)]
pub struct System {
    /// The writable disk below the overlay.
    pub upper: Option<OwnedFd>,
}

/// Boots the system and returns what the shutdown needs.
pub fn boot() -> Result<System, BootError> {
    mount_kernel_views()?;
    open_console();
    let words = fs::read_to_string("/proc/cmdline").map_err(BootError::CommandLine)?;
    let words = Words::parse(&words);
    let mut system = System::default();
    if mounts::on_initramfs().map_err(BootError::Root)? {
        modules::load_all();
        if let Some(root) = &words.root {
            system.upper = mount_root(root, &words)?;
            enter_root()?;
        }
    }
    furnish()?;
    give_machine_id();
    let _ = sys::system::set_hostname(words.hostname.as_deref().unwrap_or(DEFAULT_HOSTNAME));
    raise_loopback();
    sleep_deeply();
    Ok(system)
}

/// Creates a machine-id if the image leaves it empty; a fork gets another one by its refresh.
fn give_machine_id() {
    let named = fs::read(MACHINE_ID).is_ok_and(|id| !id.is_empty() && id != b"uninitialized\n");
    let mut random = [0; 16];
    let drawn = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random));
    if named || drawn.is_err() {
        return;
    }
    // On a read-only root it stays empty, as in the image.
    let id: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let _ = fs::write(MACHINE_ID, format!("{id}\n"));
}

/// Keeps an idle guest from waking up every half second: an idle fork should cost neither time nor
/// pages.
fn sleep_deeply() {
    for (setting, value) in [
        // Memory is still compacted on demand.
        ("/proc/sys/vm/compaction_proactiveness", "0"),
        // Statistics counters.
        ("/proc/sys/vm/stat_interval", "10"),
    ] {
        // A kernel without the setting does not have the behaviour, either.
        let _ = fs::write(setting, value);
    }
}

/// Mounts /dev, /proc and /sys, which are needed first.
fn mount_kernel_views() -> Result<(), BootError> {
    let plain = libc::MS_NOSUID | libc::MS_NOEXEC | libc::MS_NODEV;
    for (kind, target, flags, options) in [
        ("devtmpfs", "/dev", libc::MS_NOSUID, "mode=0755"),
        ("proc", "/proc", plain, ""),
        ("sysfs", "/sys", plain, ""),
    ] {
        mount_view(&Mount { source: kind, target, kind, flags, options })?;
    }
    Ok(())
}

/// Mounts `wish` and names it in an error.
fn mount(wish: &Mount<'_>) -> Result<(), BootError> {
    wish.mount().map_err(|source| BootError::Mount {
        what: wish.source.to_owned(),
        kind: wish.kind.to_owned(),
        target: wish.target.to_owned(),
        source,
    })
}

/// Mounts a pseudo-filesystem of the kernel; an existing mount is accepted. For a disk it would not
/// be, since the disk would be in use by somebody else.
fn mount_view(wish: &Mount<'_>) -> Result<(), BootError> {
    match mount(wish) {
        Err(BootError::Mount { source, .. }) if source.raw_os_error() == Some(libc::EBUSY) => {
            Ok(())
        }
        other => other,
    }
}

/// Mounts the image, the writable layer above it, and both as an overlay at `ROOT`.
fn mount_root(root: &str, words: &Words) -> Result<Option<OwnedFd>, BootError> {
    await_device("pvmm.root", root)?;
    mount_image(root, words.root_fs_type.as_deref())?;
    let upper = match &words.upper {
        Some(disk) => {
            await_device("pvmm.upper", disk)?;
            let flags = libc::MS_NOATIME;
            mount(&Mount { source: disk, target: UPPER, kind: "ext4", flags, options: "" })?;
            // Held to make it read-only at shutdown, when its path is no longer reachable.
            let folder = fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(UPPER);
            Some(folder.map_err(|source| BootError::Directory { path: UPPER.into(), source })?)
        }
        None => {
            let options = "mode=0755";
            mount(&Mount { source: "tmpfs", target: UPPER, kind: "tmpfs", flags: 0, options })?;
            None
        }
    };
    let (data, work) = (format!("{UPPER}/data"), format!("{UPPER}/work"));
    make_directory(&data, 0o755)?;
    make_directory(&work, 0o755)?;
    // With redirects, renaming a directory of the image works as on any disk.
    let plain = format!("lowerdir={LOWER},upperdir={data},workdir={work}");
    let options = format!("{plain},redirect_dir=on");
    let flags = libc::MS_NOATIME;
    let overlay =
        |options| Mount { source: "overlay", target: ROOT, kind: "overlay", flags, options };
    mount(&overlay(&options)).or_else(|_| mount(&overlay(&plain)))?;
    Ok(upper.map(OwnedFd::from))
}

fn await_device(name: &'static str, path: &str) -> Result<(), BootError> {
    match device::wait_for(path, DEVICE_TIME) {
        Ok(true) => Ok(()),
        _ => Err(BootError::NoDevice { name, device: path.to_owned() }),
    }
}

fn mount_image(root: &str, kind: Option<&str>) -> Result<(), BootError> {
    let flags = libc::MS_RDONLY | libc::MS_NOATIME;
    let image = |kind| Mount { source: root, target: LOWER, kind, flags, options: "" };
    match kind {
        Some(kind) => mount(&image(kind)),
        None => ROOT_TYPES
            .iter()
            .any(|kind| image(kind).mount().is_ok())
            .then_some(())
            .ok_or_else(|| BootError::UnknownRoot { device: root.to_owned() }),
    }
}

/// Leaves the initramfs: moves the kernel's pseudo-filesystems to the new root and frees the rest.
fn enter_root() -> Result<(), BootError> {
    for view in ["/dev", "/proc", "/sys"] {
        let target = format!("{ROOT}{view}");
        make_directory(&target, 0o755)?;
        mounts::move_mount(view, &target).map_err(BootError::Switch)?;
    }
    mounts::remove_contents(Path::new("/")).map_err(BootError::Switch)?;
    mounts::switch_root(ROOT).map_err(BootError::Switch)
}

/// Mounts and creates the directories that programs expect.
fn furnish() -> Result<(), BootError> {
    let shared = libc::MS_NOSUID | libc::MS_NODEV;
    let plain = shared | libc::MS_NOEXEC;
    let pts = "gid=5,mode=620,ptmxmode=666";
    mount_view(&Mount {
        source: "devpts",
        target: "/dev/pts",
        kind: "devpts",
        flags: libc::MS_NOSUID | libc::MS_NOEXEC,
        options: pts,
    })?;
    for (target, options) in [("/dev/shm", "mode=1777"), ("/run", "mode=0755")] {
        mount_view(&Mount { source: "tmpfs", target, kind: "tmpfs", flags: shared, options })?;
    }
    make_open_directory("/run/lock")?;
    make_open_directory("/tmp").or_else(|_| {
        // The root is read-only and has no overlay.
        let options = "mode=1777";
        mount_view(&Mount {
            source: "tmpfs",
            target: "/tmp",
            kind: "tmpfs",
            flags: shared,
            options,
        })
    })?;
    // A kernel without control groups still runs programs; the agent then ends them in other ways.
    let _ = mount_view(&Mount {
        source: "cgroup2",
        target: "/sys/fs/cgroup",
        kind: "cgroup2",
        flags: plain,
        options: "nsdelegate",
    });
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, link);
    }
    Ok(())
}

fn make_directory(path: &str, mode: u32) -> Result<(), BootError> {
    mounts::make_directory(path, mode)
        .map_err(|source| BootError::Directory { path: path.to_owned(), source })
}

/// Makes a directory in which everybody may create files, like /tmp.
fn make_open_directory(path: &str) -> Result<(), BootError> {
    make_directory(path, 0o755)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o1777))
        .map_err(|source| BootError::Directory { path: path.to_owned(), source })
}

/// Makes sure that descriptors 0, 1 and 2 are open: on the console if there is one.
fn open_console() {
    let open = |path| {
        fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path)
    };
    let Ok(console) = open("/dev/console").or_else(|_| open("/dev/null")) else { return };
    for target in 0..=2 {
        // SAFETY: duplicates a descriptor owned here over one that nobody else uses yet.
        let _ = check(unsafe { libc::dup2(console.as_raw_fd(), target) });
    }
    if console.as_raw_fd() <= 2 {
        // The descriptor is one of the three and must stay open.
        std::mem::forget::<File>(console);
    }
}

/// Brings `lo` up. A kernel without a network has none, which is no error.
fn raise_loopback() {
    // SAFETY: an interface request is plain data; its name is filled with a terminated string, and
    // the two calls read and write its flags only. The socket is owned here and closed at the end.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return;
        }
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        if libc::ioctl(socket, libc::SIOCGIFFLAGS, &mut request) == 0 {
            request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
            libc::ioctl(socket, libc::SIOCSIFFLAGS, &request);
        }
        libc::close(socket);
    }
}
