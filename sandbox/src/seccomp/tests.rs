//! The policy as it is written, and a probe of each filter: forbidden calls kill, others do not.

use super::*;
use crate::sys::probe::{Call, WENT_ON, end_of};
use crate::sys::process::Ended;

#[allow(dead_code)] // The build script and the suite use the rest.
#[path = "../../seccomp/policy.rs"]
mod policy;

use policy::Policy;

const TEXT: &str = include_str!("../../seccomp/x86_64.policy");
const KILLED: Ended = Ended::Signal(libc::SIGSYS);

/// Every kind of thread with its filter.
fn kinds() -> Vec<(&'static str, SystemCallFilter)> {
    let Filters { threads, owner, log } = Filters::of_monitor().unwrap();
    let api = Filters::of_api_server().unwrap().owner;
    let threads = Arc::unwrap_or_clone(threads);
    vec![
        ("vcpu", threads.vcpu),
        ("devices", threads.devices),
        ("console", threads.console),
        ("pages", threads.pages),
        ("copier", threads.copier),
        ("log", log),
        ("control", owner),
        ("api", api),
    ]
}

fn call(number: libc::c_long, arguments: &[usize]) -> Call {
    let mut all = [0; 5];
    all[..arguments.len()].copy_from_slice(arguments);
    (number, all)
}

/// Calls by which a thread that a guest has taken over would reach the host.
fn escapes() -> Vec<Call> {
    let execute = libc::PROT_READ as usize | libc::PROT_EXEC as usize;
    let at = libc::AT_FDCWD as usize;
    vec![
        call(libc::SYS_execve, &[]),
        call(libc::SYS_execveat, &[]),
        call(libc::SYS_fork, &[]),
        call(libc::SYS_vfork, &[]),
        call(libc::SYS_clone, &[libc::SIGCHLD as usize]),
        call(libc::SYS_clone, &[libc::CLONE_NEWUSER as usize]),
        call(libc::SYS_open, &[]),
        call(libc::SYS_openat, &[at, 0, (libc::O_RDWR | libc::O_CREAT) as usize]),
        call(libc::SYS_socket, &[libc::AF_INET as usize, libc::SOCK_STREAM as usize]),
        call(libc::SYS_socket, &[libc::AF_NETLINK as usize, libc::SOCK_RAW as usize]),
        call(libc::SYS_mmap, &[0, 4096, execute, 0x22]),
        call(libc::SYS_mprotect, &[0, 4096, execute]),
        call(libc::SYS_ioctl, &[0, libc::TIOCSTI as usize]),
        call(libc::SYS_ptrace, &[]),
        call(libc::SYS_process_vm_writev, &[]),
        call(libc::SYS_prctl, &[libc::PR_SET_DUMPABLE as usize, 1]),
        call(libc::SYS_unshare, &[]),
        call(libc::SYS_setns, &[]),
        call(libc::SYS_mount, &[]),
        call(libc::SYS_chroot, &[]),
        call(libc::SYS_setuid, &[]),
        call(libc::SYS_bpf, &[]),
        call(libc::SYS_pidfd_getfd, &[]),
        call(libc::SYS_kill, &[0, 0]),
        call(libc::SYS_rt_sigaction, &[]),
    ]
}

#[test]
fn escape_from_a_thread_of_any_kind_kills_the_process() {
    for (kind, filter) in kinds() {
        for escape in escapes() {
            assert_eq!(end_of(&filter, escape), KILLED, "{kind}: {escape:?}");
        }
    }
}

#[test]
fn call_that_a_kind_needs_goes_on() {
    let bad = usize::MAX;
    let write = call(libc::SYS_write, &[bad]);
    for (kind, filter) in kinds() {
        let needed = match kind {
            "vcpu" => call(libc::SYS_ioctl, &[bad, 0xae80]),
            "devices" => call(libc::SYS_socket, &[libc::AF_UNIX as usize, 1]),
            "pages" => call(libc::SYS_poll, &[0, 0, 0]),
            "copier" => call(libc::SYS_pwrite64, &[bad]),
            _ => write,
        };
        assert_eq!(end_of(&filter, needed), WENT_ON, "{kind}");
    }
}

#[test]
fn call_of_one_kind_from_another_kills_the_process() {
    let run = call(libc::SYS_ioctl, &[usize::MAX, 0xae80]);
    let connect = call(libc::SYS_connect, &[]);
    for (kind, filter) in kinds() {
        assert_eq!(end_of(&filter, run) == WENT_ON, kind == "vcpu", "{kind}");
        let connects = ["devices", "control", "api"].contains(&kind);
        assert_eq!(end_of(&filter, connect) == WENT_ON, connects, "{kind}");
    }
}

#[test]
fn clone3_of_an_owner_is_not_there_so_that_clone_is_used() {
    let refused = call(libc::SYS_clone3, &[]);
    for (kind, filter) in kinds() {
        let owner = ["control", "api"].contains(&kind);
        assert_eq!(end_of(&filter, refused) == WENT_ON, owner, "{kind}");
    }
}

#[test]
fn every_thread_of_the_policy_has_a_filter_and_every_rule_a_reason() {
    let policy = Policy::parse(TEXT).unwrap();
    let mut named: Vec<_> = policy.threads.iter().map(|thread| thread.name.as_str()).collect();
    let mut known: Vec<_> = kinds().into_iter().map(|(kind, _)| kind).collect();
    named.sort_unstable();
    known.sort_unstable();
    assert_eq!(named, known);
    let rules = || policy.threads.iter().flat_map(|thread| &thread.rules);
    assert!(rules().all(|rule| rule.reason.len() > 5));
    let forbidden = ["execve", "execveat", "fork", "vfork", "open"];
    assert!(rules().all(|rule| !forbidden.contains(&rule.call.as_str())));
}

#[test]
fn policy_with_a_rule_that_is_unclear_is_refused() {
    let text = |rule: &str| format!("[arguments]\nioctl fd request\n[thread a]\n{rule}\n");
    let refused = |rule: &str| Policy::parse(&text(rule)).unwrap_err();
    assert!(Policy::parse(&text("ioctl (request & 0xff = 0x80): runs")).is_ok());
    assert!(refused("read").contains("line 4: a rule needs a reason"));
    assert!(refused("read:  ").contains("needs a reason"));
    assert!(refused("read: a\nread: b").contains("line 4 says as much"));
    assert!(refused("ioctl (flags = 1): a").contains("no such argument"));
    assert!(refused("ioctl (request = KVM_RUN): a").contains("is no number"));
    assert!(refused("socket (domain = 1): a").contains("[arguments]"));
    assert!(Policy::parse("read: a").unwrap_err().contains("outside of a section"));
    assert!(Policy::parse("[thread a: none]").unwrap_err().contains("no such group"));
}

/// Calls without conditions cost less: the kernel notes that they are always allowed, and runs no
/// program for them.
#[test]
fn filter_of_a_hot_call_is_short() {
    let (run, interrupt) = (0xae80, 0x4020_aea5);
    for (program, request) in [(programs::VCPU, run), (programs::DEVICES, interrupt)] {
        let steps = steps(program, libc::SYS_ioctl as u32, request);
        assert!(steps <= 30, "{request:#x}: {steps} instructions");
    }
}

/// Runs a program and returns how many instructions it took until it allowed the call.
fn steps(program: &[u64], number: u32, request: u32) -> usize {
    let (mut at, mut accumulator, mut steps) = (0, 0u32, 0);
    loop {
        let word = program[at];
        let (code, jt, jf) = (word as u16, (word >> 16) as u8, (word >> 24) as u8);
        let k = (word >> 32) as u32;
        steps += 1;
        at += 1;
        let mut jump = |condition: bool| at += usize::from(if condition { jt } else { jf });
        match (code, k) {
            (0x20, 0) => accumulator = number,
            (0x20, 4) => accumulator = 0xc000_003e,
            (0x20, 24) => accumulator = request,
            (0x20, _) => accumulator = 0,
            (0x15, _) => jump(accumulator == k),
            (0x25, _) => jump(accumulator > k),
            (0x35, _) => jump(accumulator >= k),
            (0x54, _) => accumulator &= k,
            (0x05, _) => at += k as usize,
            (0x06, 0x7fff_0000) => return steps,
            other => panic!("{other:x?}"),
        }
    }
}
