//! Keeps this process out of core dumps: its heap holds commands, environments and secrets of
//! guests.
//!
//! Guest memory itself is excluded by the library, in any program.

#![allow(unsafe_code)] // setrlimit, prctl, geteuid.

use std::io;
use std::path::Path;

/// Disables core files for this process and its children, and lets no one but root trace it.
///
/// The latter only for root and in a jail: the kernel changes the owner of an untraceable process's
/// /proc files to root, so an ordinary user's process could no longer read its own page tables.
pub fn forbid() -> io::Result<()> {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel reads `none`, which outlives the call.
    check(unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) })?;
    // SAFETY: no memory is passed.
    let is_root = unsafe { libc::geteuid() } == 0;
    if is_root || !Path::new("/proc/self").exists() {
        // SAFETY: no memory is passed.
        check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) })?;
    }
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_forbids_dumps_has_no_room_for_one_and_root_has_none_traced() {
        forbid().unwrap();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().filter(|word| *word == "0").count(), 2, "{core}");
        // SAFETY: no memory is passed.
        let (dumpable, user) = unsafe { (libc::prctl(libc::PR_GET_DUMPABLE), libc::geteuid()) };
        assert_eq!(dumpable == 0, user == 0);
    }
}
