//! How the commands reach the agent of a running VM, and what they say when it refuses.

use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError};

use crate::exit::Failure;
use crate::vm_dir::VmDir;

/// How long the agent of a running VM may take to answer: a hundred clients at once on a small host
/// do take long.
pub const PATIENCE: Duration = Duration::from_secs(60);
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// Connects to a VM's agent, and retries while the agent has too many clients.
pub fn connect(dir: &VmDir, patience: Duration) -> Result<Agent, AgentError> {
    connect_at(&dir.run().vsock(), patience)
}

/// Connects as [`connect`] does, at the path of a VM's vsock socket.
pub fn connect_at(vsock: &Path, patience: Duration) -> Result<Agent, AgentError> {
    let busy_until = Instant::now() + PATIENCE;
    loop {
        match Agent::connect(vsock, Instant::now() + patience) {
            Err(AgentError::TooMany) if Instant::now() < busy_until => {
                std::thread::sleep(BUSY_PAUSE);
            }
            connected => return connected,
        }
    }
}

/// Builds the failure for a request that the agent did not carry out.
pub fn refuse(error: AgentError) -> Failure {
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
    let message = format!("{error}{}", cause.unwrap_or_default());
    match error {
        AgentError::InvalidRequest { .. } => Failure::usage(message),
        _ => Failure::fault(message),
    }
}
