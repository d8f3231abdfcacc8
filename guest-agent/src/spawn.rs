//! Starts one process, from a plan in which every string is already a C string.
//!
//! The child shares the agent's memory until it executes (as posix_spawn does), so that starting
//! costs no copy of page tables, dirties no pages, and a failed step is simply stored for the agent
//! to read.
#![allow(unsafe_code)] // clone3 with a stack of our own; the child runs on raw system calls

use std::arch::asm;
use std::ffi::CString;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use pvmm_guest_agent::message::Stage;

const STACK_BYTES: usize = 32 << 10;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The user and groups of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// Everything the child needs.
pub struct Plan {
    /// Paths to try in order, as a search in PATH gives them.
    pub programs: Vec<CString>,
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    pub cwd: CString,
    pub credentials: Option<Credentials>,
    /// The descriptors that become 0, 1 and 2; all must be above 2.
    pub stdio: [RawFd; 3],
    /// The descriptor that becomes 3; must be above 3.
    pub control: Option<RawFd>,
    /// The standard descriptors are a terminal, which becomes that of the new session.
    pub terminal: bool,
    pub open_files: libc::rlimit,
    /// Directory of the control group to start the process in.
    pub cgroup: Option<RawFd>,
}

/// The step that failed, and its error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpawnError {
    pub stage: Stage,
    pub errno: i32,
}

/// Holds the stack that children use between clone and exec, one at a time.
pub struct Spawner {
    stack: Vec<u128>,
}

/// The data that parent and child share; the child only reads it, except for the last three fields.
struct SpawnArguments<'a> {
    plan: &'a Plan,
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    /// `/bin/sh PROGRAM ARGUMENTS…`, for a script without an interpreter line.
    script_argv: Vec<*const libc::c_char>,
    stage: AtomicU8,
    errno: AtomicI32,
}

impl Spawner {
    pub fn new() -> Self {
        Self { stack: Vec::with_capacity(STACK_BYTES / size_of::<u128>()) }
    }

    /// Starts the process and returns once it has executed its program or failed to.
    pub fn spawn(&mut self, plan: &Plan) -> Result<libc::pid_t, SpawnError> {
        let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
            strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
        };
        let argv = pointers(&plan.argv);
        let mut script_argv = vec![c"/bin/sh".as_ptr(), ptr::null()];
        script_argv.extend(&argv[1.min(argv.len() - 1)..]);
        let mut shared = SpawnArguments {
            plan,
            argv,
            env: pointers(&plan.env),
            script_argv,
            stage: AtomicU8::new(0),
            errno: AtomicI32::new(0),
        };
        let pid = self.clone_child(&raw mut shared, plan.cgroup)?;
        match shared.errno.load(Ordering::Acquire) {
            0 => Ok(pid),
            errno => {
                // The child has exited by itself; it must not appear among the reaped processes.
                let mut status = 0;
                // SAFETY: `status` lives through the call.
                while unsafe { libc::waitpid(pid, &mut status, 0) } < 0
                    && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR)
                {
                }
                Err(SpawnError { stage: stage(shared.stage.load(Ordering::Acquire)), errno })
            }
        }
    }

    fn clone_child(
        &mut self,
        shared: *mut SpawnArguments<'_>,
        cgroup: Option<RawFd>,
    ) -> Result<libc::pid_t, SpawnError> {
        // SAFETY: clone_args is plain data for which zeroes are a valid value.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.flags = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
        args.exit_signal = libc::SIGCHLD as u64;
        args.stack = self.stack.as_mut_ptr() as u64;
        args.stack_size = (self.stack.capacity() * size_of::<u128>()) as u64;
        if let Some(fd) = cgroup {
            args.flags |= CLONE_INTO_CGROUP;
            args.cgroup = fd as u64;
        }
        let result: i64;
        // SAFETY: CLONE_VFORK stops this thread until the child has executed or exited, so `args`,
        // the stack and `shared` outlive the child's use of them, and nobody else uses that stack:
        // `self` is borrowed mutably. The child starts at the aligned top of its own stack with the
        // registers of this thread, calls `child`, which never returns, and so touches no frame of
        // this thread. No signal handler can run in it: the agent installs none.
        unsafe {
            asm!(
                "syscall",
                "test rax, rax",
                "jnz 2f",
                "xor ebp, ebp",
                "mov rdi, r12",
                "call r13",
                "ud2",
                "2:",
                inlateout("rax") libc::SYS_clone3 => result,
                in("rdi") &raw const args,
                in("rsi") size_of::<libc::clone_args>(),
                in("r12") shared,
                in("r13") child as extern "C" fn(*mut SpawnArguments<'_>) -> !,
                lateout("rcx") _,
                lateout("r11") _,
            );
        }
        if result < 0 {
            return Err(SpawnError { stage: Stage::Fork, errno: -result as i32 });
        }
        Ok(result as libc::pid_t)
    }
}

const STAGES: [Stage; 4] = [Stage::Stdio, Stage::Credentials, Stage::Chdir, Stage::Exec];

fn stage(index: u8) -> Stage {
    STAGES.get(index as usize).copied().unwrap_or(Stage::Other)
}

/// Runs in the child until its program is executed. It allocates nothing and takes no lock.
extern "C" fn child(shared: *mut SpawnArguments<'_>) -> ! {
    // SAFETY: the parent waits, so this is the only use of `shared`; all pointers in it are to
    // terminated arrays of C strings that the parent keeps alive.
    unsafe {
        let shared = &mut *shared;
        let plan = shared.plan;
        libc::setsid();
        libc::setpriority(libc::PRIO_PROCESS, 0, crate::sys::ORDINARY_PRIORITY);
        for (target, fd) in plan.stdio.iter().enumerate() {
            if libc::dup2(*fd, target as libc::c_int) < 0 {
                fail(shared, 0);
            }
        }
        if plan.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            fail(shared, 0);
        }
        let mut first_unused = 3u32;
        if let Some(control) = plan.control {
            if libc::dup2(control, 3) < 0 {
                fail(shared, 0);
            }
            first_unused = 4;
        }
        libc::syscall(libc::SYS_close_range, first_unused, u32::MAX, 0u32);
        libc::setrlimit(libc::RLIMIT_NOFILE, &plan.open_files);
        if let Some(who) = &plan.credentials {
            // Raw system calls: the C library would change the user of every thread of the agent.
            let (uid, gid) = (who.uid, who.gid);
            let groups = who.groups.as_ptr();
            if libc::syscall(libc::SYS_setgroups, who.groups.len(), groups) < 0
                || libc::syscall(libc::SYS_setresgid, gid, gid, gid) < 0
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) < 0
            {
                fail(shared, 1);
            }
        }
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            fail(shared, 2);
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
        execute(shared)
    }
}

/// Tries each program path the way execvp does.
///
/// # Safety
/// Must be called only in the child, with the pointers of `shared` as `child` needs them.
unsafe fn execute(shared: &mut SpawnArguments<'_>) -> ! {
    let mut denied = false;
    for program in &shared.plan.programs {
        // SAFETY: terminated arrays of C strings, kept alive by the parent.
        unsafe {
            libc::execve(program.as_ptr(), shared.argv.as_ptr(), shared.env.as_ptr());
            let mut errno = *libc::__errno_location();
            if errno == libc::ENOEXEC {
                shared.script_argv[1] = program.as_ptr();
                libc::execve(c"/bin/sh".as_ptr(), shared.script_argv.as_ptr(), shared.env.as_ptr());
                errno = libc::ENOEXEC;
            }
            match errno {
                libc::EACCES => denied = true,
                libc::ENOENT | libc::ENOTDIR | libc::ENODEV | libc::ESTALE => {}
                _ => {
                    *libc::__errno_location() = errno;
                    fail(shared, 3)
                }
            }
            // A candidate that exists but may not be executed takes precedence over missing ones.
            *libc::__errno_location() = if denied { libc::EACCES } else { errno };
        }
    }
    // SAFETY: as above.
    unsafe { fail(shared, 3) }
}

/// Stores the failed step with the current errno and ends the child.
///
/// # Safety
/// Must be called only in the child: it ends the calling process.
unsafe fn fail(shared: &SpawnArguments<'_>, stage: u8) -> ! {
    // SAFETY: errno is readable; _exit runs no code of the agent.
    unsafe {
        shared.stage.store(stage, Ordering::Release);
        shared.errno.store((*libc::__errno_location()).max(1), Ordering::Release);
        libc::_exit(127)
    }
}
