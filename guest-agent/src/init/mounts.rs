//! Mounting, moving, changing root: the system calls of a boot, with errors that name the place.
//! They are apart from the boot so that the boot reads as its steps.
#![allow(unsafe_code)] // mount, chroot and their kin take C strings

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use crate::sys::check;

/// What to mount where.
pub struct Mount<'a> {
    pub source: &'a str,
    pub target: &'a str,
    pub kind: &'a str,
    pub flags: libc::c_ulong,
    pub options: &'a str,
}

impl Mount<'_> {
    /// Mounts, making the directory if there is none.
    pub fn mount(&self) -> io::Result<()> {
        make_directory(self.target, 0o755)?;
        let source = c_string(self.source)?;
        let target = c_string(self.target)?;
        let kind = c_string(self.kind)?;
        let options = c_string(self.options)?;
        // SAFETY: four C strings that outlive the call.
        check(unsafe {
            libc::mount(
                source.as_ptr(),
                target.as_ptr(),
                kind.as_ptr(),
                self.flags,
                options.as_ptr().cast(),
            )
        })
        .map(drop)
    }
}

/// Makes a directory unless something of the name is there.
pub fn make_directory(path: &str, mode: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // On a read-only root, what is there has to do.
        Err(_) if Path::new(path).is_dir() => Ok(()),
        other => other,
    }
}

/// Moves a mount.
pub fn move_mount(from: &str, to: &str) -> io::Result<()> {
    let (from, to) = (c_string(from)?, c_string(to)?);
    // SAFETY: two C strings that outlive the call; the kernel ignores the null pointers.
    check(unsafe {
        libc::mount(from.as_ptr(), to.as_ptr(), std::ptr::null(), libc::MS_MOVE, std::ptr::null())
    })
    .map(drop)
}

/// Makes a file appear in another's place as well.
pub fn bind(from: &str, to: &str) -> io::Result<()> {
    let (from, to) = (c_string(from)?, c_string(to)?);
    // SAFETY: two C strings that outlive the call; the kernel ignores the null pointers.
    check(unsafe {
        libc::mount(from.as_ptr(), to.as_ptr(), std::ptr::null(), libc::MS_BIND, std::ptr::null())
    })
    .map(drop)
}

/// Makes a mounted filesystem read-only, which also writes it out.
pub fn make_read_only(target: &str) -> io::Result<()> {
    let target = c_string(target)?;
    let flags = libc::MS_REMOUNT | libc::MS_RDONLY;
    // SAFETY: one C string that outlives the call; the kernel ignores the null pointers.
    check(unsafe {
        libc::mount(std::ptr::null(), target.as_ptr(), std::ptr::null(), flags, std::ptr::null())
    })
    .map(drop)
}

pub fn unmount(target: &Path) -> io::Result<()> {
    let target = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: one C string that outlives the call.
    check(unsafe { libc::umount2(target.as_ptr(), 0) }).map(drop)
}

/// Makes the mount at `new` the root of everything.
pub fn switch_root(new: &str) -> io::Result<()> {
    std::env::set_current_dir(new)?;
    move_mount(".", "/")?;
    // SAFETY: a C string literal.
    check(unsafe { libc::chroot(c".".as_ptr()) })?;
    std::env::set_current_dir("/")
}

/// Whether the root is the kernel's first, in memory, from an initramfs.
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

/// Frees the memory of everything in a directory that is on the directory's own filesystem.
pub fn remove_contents(path: &Path) -> io::Result<()> {
    let device = fs::symlink_metadata(path)?.dev();
    for entry in fs::read_dir(path)?.flatten() {
        let Ok(facts) = entry.metadata() else { continue };
        if facts.dev() != device {
            continue;
        }
        // What cannot be removed costs memory and nothing else.
        if facts.is_dir() {
            let _ = remove_contents(&entry.path());
            let _ = fs::remove_dir(entry.path());
        } else {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

fn c_string(text: &str) -> io::Result<CString> {
    Ok(CString::new(text)?)
}
