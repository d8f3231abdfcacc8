//! A jail for one monitor process: does everything that needs privileges, before the monitor runs
//! without any.
//!
//! The binary calls [`forget_caller`], parses its command line with [`arguments::parse`], and calls
//! [`run`]. If that succeeds, the process has become the program or has left it running in another.
//!
//! | file | responsibility |
//! | --- | --- |
//! | `arguments.rs` | the command line, validated |
//! | `jail.rs` | the root folder: its layout, the copied program, the device nodes |
//! | `cgroup.rs` | control groups, of version 1 or 2 |
//! | `confine.rs` | the layers around a monitor process that `pvmm` itself starts |
//! | `group.rs` | the control group of such a process |
//! | `process.rs` | this process: limits, session, PID namespace, user, exec of the program |
//! | `sys.rs` | the system calls |
//!
//! The order of steps is that of Firecracker's jailer, whose layout and command line are kept:
//! program copied → network joined → limits → control groups → new root → folders and nodes →
//! detached → program run. Further confinement of the program belongs after the last step that
//! needs a privilege, in `process.rs`.

pub mod arguments;
mod cgroup;
pub mod confine;
mod error;
pub mod group;
mod jail;
mod process;
mod sys;

pub use arguments::Options;
pub use error::JailError;
pub use process::Started;

use jail::Jail;

/// The umask of the jailer and of the program.
const UMASK: u32 = 0o077;

/// Closes inherited descriptors and sets the umask, because the caller's must not reach the
/// program. Environment and signals are reset when the program is executed.
pub fn forget_caller() -> Result<(), JailError> {
    sys::set_umask(UMASK);
    sys::close_from(3).map_err(JailError::io("cannot close what the caller left open"))
}

/// Builds the jail and executes the program in it. Returns only if the program runs in another
/// process, or on failure; what was created for the jail is then removed, unless it had already
/// become the root.
pub fn run(options: Options, started: Started) -> Result<(), JailError> {
    if let Some(line) = options.as_root()? {
        eprintln!("pvmm-jailer: {line}");
    }
    let jail = Jail::create(&options)?;
    if let Some(netns) = &options.netns {
        let act = || format!("cannot join the network namespace {}", netns.display());
        sys::join_network(netns).map_err(|error| JailError::new(act(), error))?;
    }
    process::limit(&options)?;
    let groups = cgroup::enter(&options)?;
    // Opened now for `--daemonize`: there is no /dev/null in the jail.
    let nowhere = options.daemonize.then(process::open_nowhere).transpose()?;
    let inside = jail.enter()?;
    groups.keep();
    inside.furnish()?;
    process::become_program(&options, started, nowhere)
}
