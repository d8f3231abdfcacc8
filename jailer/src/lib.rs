//! A jail for one monitor: everything that needs a privilege is done here, before the monitor runs without any.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `arguments.rs` | what can be asked for, checked |
//! | `jail.rs` | the root folder: its layout, the copied program, the device nodes |
//! | `cgroup.rs` | control groups, of version 1 or 2 |
//! | `process.rs` | what becomes of this process: limits, session, process namespace, user, the program |
//! | `sys.rs` | the system calls |
//!
//! The order is that of Firecracker's jailer, whose layout and command line this keeps: program copied →
//! network joined → limits → control groups → new root → folders and nodes → detached → program run. Whatever
//! further confines the program belongs after the last step that needs a privilege, in `process.rs`.

pub mod arguments;
mod cgroup;
mod error;
mod jail;
mod process;
mod sys;

pub use arguments::Options;
pub use error::JailError;
pub use process::Started;

use jail::Jail;

/// The umask of the jailer and of the program.
const UMASK: u32 = 0o077;

/// Lets go of what the caller had open or has set: none of it is the jailed program's business. Its
/// environment and its signals go when the program is run.
pub fn forget_caller() -> Result<(), JailError> {
    sys::set_umask(UMASK);
    sys::close_from(3).map_err(JailError::io("cannot close what the caller left open"))
}

/// Builds the jail and becomes the program in it. Returns only if the program runs as another process, or if
/// something failed; then what was made for the jail is gone again, up to the moment when it became the root.
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
    // For those who want no output: there is no such device in the jail.
    let nowhere = options.daemonize.then(process::open_nowhere).transpose()?;
    let inside = jail.enter()?;
    groups.keep();
    inside.furnish()?;
    process::become_program(&options, started, nowhere)
}
