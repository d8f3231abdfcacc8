//! The system calls that the process may make once it is confined.
//!
//! The list is short because everything else was opened before. A call that is not on it fails; the
//! process is not ended, so a library that tries something new degrades and does not cut the guest
//! off.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Why the filter is not in place.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    #[error("no filter for this processor")]
    Build(#[from] seccompiler::BackendError),
    #[error("the kernel does not take the filter")]
    Apply(#[from] seccompiler::Error),
}

/// Calls that are allowed with any arguments.
const ALLOWED: &[libc::c_long] = &[
    // Waiting for events.
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_restart_syscall,
    // The link, questions, connections, associations over UDP and control clients. Those of UDP
    // need no call of their own: questions are datagrams on connected sockets too.
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_close,
    libc::SYS_fcntl,
    // Random ids and ports, and the seeds of hash tables.
    libc::SYS_getrandom,
    // The allocator.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    // Clocks, where the kernel's page for them is not used.
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    // The end, in order or by a signal.
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_tgkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Puts the filter in place for good. New privileges must have been given up.
pub fn apply() -> Result<(), SeccompError> {
    let mut rules: std::collections::BTreeMap<_, _> =
        ALLOWED.iter().map(|number| (*number, Vec::new())).collect();
    // Sockets of the Internet only: a Unix socket would reach services of the host.
    let families = [libc::AF_INET, libc::AF_INET6].map(|family| equals(0, family as u64));
    rules.insert(libc::SYS_socket, families.into_iter().collect::<Result<_, _>>()?);
    // The standard library makes sockets non-blocking this way.
    rules.insert(libc::SYS_ioctl, vec![equals(1, libc::FIONBIO)?]);
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let arch = std::env::consts::ARCH.try_into()?;
    let filter: BpfProgram =
        SeccompFilter::new(rules, refuse, SeccompAction::Allow, arch)?.try_into()?;
    Ok(seccompiler::apply_filter(&filter)?)
}

fn equals(argument: u8, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let len = SeccompCmpArgLen::Dword;
    SeccompRule::new(vec![SeccompCondition::new(argument, len, SeccompCmpOp::Eq, value)?])
}
