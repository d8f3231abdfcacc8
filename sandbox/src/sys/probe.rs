//! A process that makes one system call under a filter, for tests of the filters.
#![allow(unsafe_code)] // fork, a raw system call, waitpid.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pvmm::SystemCallFilter;

use super::process::Ended;

/// The exit code of a process that its filter has let go on.
pub const WENT_ON: Ended = Ended::Code(7);

/// A system call by its number, with numbers and null pointers as arguments.
pub type Call = (libc::c_long, [usize; 5]);

/// Keeps other tests from forking, for a test of file locks: a child would hold them for a moment
/// longer than the test does.
pub fn without_forks() -> MutexGuard<'static, ()> {
    static FORKS: Mutex<()> = Mutex::new(());
    FORKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how a process ends that installs the filter, makes the call, and then exits.
pub fn end_of(filter: &SystemCallFilter, (number, arguments): Call) -> Ended {
    let [a, b, c, d, e] = arguments;
    let _forks = without_forks();
    // SAFETY: the child only makes system calls, which use no lock and no memory of the parent, and
    // never returns; `status` outlives the wait.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            if filter.install().is_err() {
                libc::_exit(1);
            }
            libc::syscall(number, a, b, c, d, e);
            libc::_exit(7);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        if libc::WIFEXITED(status) {
            Ended::Code(libc::WEXITSTATUS(status))
        } else {
            Ended::Signal(libc::WTERMSIG(status))
        }
    }
}
