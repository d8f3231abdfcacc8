//! Mounting, moving and changing root: the system calls of a boot.
//!
//! They are separate from the boot so that the boot reads as its steps.
#![allow(unsafe_code)] // mount, chroot and their kin take C strings

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use crate::sys::check;

/// The parameters of a mount.
pub struct Mount<'a> {
    pub source: &'a str,
    pub target: &'a str,
    pub kind: &'a str,
    pub flags: libc::c_ulong,
    pub options: &'a str,
}

impl Mount<'_> {
    /// Mounts, and creates the directory if there is none.
    pub fn mount(&self) -> io::Result<()> {
        make_directory(self.target, 0o755)?;
        call(Some(self.source), self.target, Some(self.kind), self.flags, Some(self.options))
    }
}

fn call(
    source: Option<&str>,
    target: &str,
    kind: Option<&str>,
    flags: libc::c_ulong,
    options: Option<&str>,
) -> io::Result<()> {
    let text = |text: Option<&str>| text.map(CString::new).transpose();
    let (source, kind, options) = (text(source)?, text(kind)?, text(options)?);
    let target = CString::new(target)?;
    let pointer = |text: &Option<CString>| text.as_ref().map_or(std::ptr::null(), |it| it.as_ptr());
    // SAFETY: C strings that outlive the call, or null pointers where the flags make the kernel
    // ignore them.
    check(unsafe {
        libc::mount(
            pointer(&source),
            target.as_ptr(),
            pointer(&kind),
            flags,
            pointer(&options).cast(),
        )
    })
    .map(drop)
}

/// Creates a directory unless the name exists.
pub fn make_directory(path: &str, mode: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // On a read-only root an existing directory is enough.
        Err(_) if Path::new(path).is_dir() => Ok(()),
        other => other,
    }
}

/// Moves a mount.
pub fn move_mount(from: &str, to: &str) -> io::Result<()> {
    call(Some(from), to, None, libc::MS_MOVE, None)
}

/// Makes a file appear at another path as well.
pub fn bind(from: &str, to: &str) -> io::Result<()> {
    call(Some(from), to, None, libc::MS_BIND, None)
}

/// Makes a mounted filesystem read-only, which also writes it out.
pub fn make_read_only(target: &str) -> io::Result<()> {
    call(None, target, None, libc::MS_REMOUNT | libc::MS_RDONLY, None)
}

pub fn unmount(target: &Path) -> io::Result<()> {
    let target = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: one C string that outlives the call.
    check(unsafe { libc::umount2(target.as_ptr(), 0) }).map(drop)
}

/// Makes the mount at `new` the root.
pub fn switch_root(new: &str) -> io::Result<()> {
    std::env::set_current_dir(new)?;
    move_mount(".", "/")?;
    // SAFETY: a C string literal.
    check(unsafe { libc::chroot(c".".as_ptr()) })?;
    std::env::set_current_dir("/")
}

/// Returns whether the root is the kernel's first one, in memory, from an initramfs.
pub fn on_initramfs() -> io::Result<bool> {
    const RAMFS: i64 = 0x8584_58f6;
    const TMPFS: i64 = 0x0102_1994;
    // SAFETY: plain data, filled by the call; the path is a literal.
    let kind = unsafe {
        let mut facts: libc::statfs = std::mem::zeroed();
        check(libc::statfs(c"/".as_ptr(), &mut facts))?;
        facts.f_type
    };
    Ok(kind == RAMFS || kind == TMPFS)
}

/// Removes everything in a directory that is on the directory's own filesystem, to free its memory.
pub fn remove_contents(path: &Path) -> io::Result<()> {
    let device = fs::symlink_metadata(path)?.dev();
    for entry in fs::read_dir(path)?.flatten() {
        let Ok(facts) = entry.metadata() else { continue };
        if facts.dev() != device {
            continue;
        }
        // What cannot be removed only costs memory.
        if facts.is_dir() {
            let _ = remove_contents(&entry.path());
            let _ = fs::remove_dir(entry.path());
        } else {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}
