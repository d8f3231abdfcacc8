//! An interpreter that was started before anybody asked for it, and what it is told then.
//!
//! It has the defaults of the guest. Environment and working directory of a request are handed to
//! its driver, in the form of [`crate::defaults`]; what must be known when a process starts cannot
//! be handed over.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pvmm_guest_agent::message::OpenSession;

/// The variable that tells a driver to wait for its settings.
pub const VARIABLE: &str = "PVMM_SPARE";
/// The longest settings; they must fit into the buffer of a socket.
const MAX_SETTINGS: usize = 16 << 10;
/// Variables that an interpreter or its libraries read when they start.
const READ_AT_START: [&[u8]; 8] =
    [b"PATH", b"PYTHON", b"LD_", b"LC_", b"LANG", b"TZ", b"MALLOC", b"GLIBC"];

/// Returns whether a running interpreter can become what the request asks for.
pub fn fits(request: &OpenSession) -> bool {
    let at_start = |name: &[u8]| READ_AT_START.iter().any(|start| name.starts_with(start));
    let cwd = request.cwd.as_ref().map(|cwd| Path::new(OsStr::from_bytes(cwd)));
    request.program.is_none()
        && request.user.is_none()
        && !request.env.iter().any(|(name, _)| at_start(name))
        // One that is not there is an error of the start.
        && cwd.is_none_or(Path::is_dir)
        && settings(request).len() <= MAX_SETTINGS
}

/// Returns the settings of a request, with their length.
pub fn settings(request: &OpenSession) -> Vec<u8> {
    let cwd = request.cwd.iter().map(|cwd| [b"cwd ", &cwd[..], b"\0"].concat());
    let env = request.env.iter();
    let env = env.map(|(name, value)| [b"env ", &name[..], b"=", value, b"\0"].concat());
    let records = cwd.chain(env).collect::<Vec<_>>().concat();
    [&(records.len() as u32).to_le_bytes()[..], &records].concat()
}
