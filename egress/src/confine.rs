//! Takes from this process what it does not need, once its descriptors are open.
//!
//! The order matters: privileges first, because dropping them may clear the signal that is asked
//! for last. The filter of system calls (`seccomp.rs`) comes after these steps.

use std::io;

use rustix::process::Resource;

use crate::associations::ASSOCIATIONS_MAX;
use crate::connections::CONNECTIONS_MAX;
use crate::resolver::QUESTIONS_MAX;
use crate::sys;

/// The descriptors beside those of connections, associations and questions: link, listener,
/// clients, log, and one to find out the host's own addresses.
const OTHER_FILES: usize = 48;
/// More than all capped buffers together; a net under them.
const ADDRESS_SPACE: u64 = 1 << 30;

/// A step of the confinement that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act}")]
pub struct ConfineError {
    act: &'static str,
    #[source]
    source: io::Error,
}

/// Confines this process. Called once, before the first frame is read.
pub fn confine() -> Result<(), ConfineError> {
    let step = |act, done: io::Result<()>| done.map_err(|source| ConfineError { act, source });
    step("give up new privileges", sys::forbid_new_privileges())?;
    step("drop capabilities", sys::drop_capabilities())?;
    step("forbid core dumps", sys::limit(Resource::Core, 0))?;
    step("forbid processes", sys::limit(Resource::Nproc, 0))?;
    let files = (CONNECTIONS_MAX + ASSOCIATIONS_MAX + QUESTIONS_MAX + OTHER_FILES) as u64;
    step("limit open files", sys::limit(Resource::Nofile, files))?;
    step("limit memory", sys::limit(Resource::As, ADDRESS_SPACE))?;
    step("forbid inspection", sys::forbid_dumps())?;
    step("tie its life to its parent's", sys::die_with_parent())
}
