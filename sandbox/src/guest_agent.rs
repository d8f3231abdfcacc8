//! How the commands reach the agent of a running VM, and what they say when it refuses.

use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError};
use pvmm::exec::{ExecError, ExecRequest, ExecStatus, ExitStatus, Stage};

use crate::failure::{self, Failure, FailureKind};
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

/// Lets the guest write to its disks what it has only in memory.
pub fn sync(vsock: &Path, patience: Duration) -> Result<(), String> {
    let agent = connect_at(vsock, patience).map_err(|error| error.to_string())?;
    let request = ExecRequest::argv(["/bin/sync"]).user("root").timeout(patience);
    agent.exec(&request).map(drop).map_err(|error| error.to_string())
}

/// Builds the failure for a request that the agent did not carry out.
pub fn refuse(error: AgentError) -> Failure {
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
    let message = format!("{error}{}", cause.unwrap_or_default());
    match error {
        AgentError::InvalidRequest { .. } => Failure::usage(message),
        AgentError::Dial { .. } => Failure::fault(message).of_kind(FailureKind::Unreachable),
        _ => Failure::fault(message),
    }
}

/// Builds the failure for an exec that returned no exit status.
pub fn refuse_exec(error: ExecError) -> Failure {
    match error {
        ExecError::Agent(error) => refuse(error),
        ExecError::InvalidRequest { .. } => Failure::usage(error.to_string()),
        ExecError::NotStarted(status) => could_not_start(&status, &Names::default()),
        ExecError::Overdue(_) => Failure::fault(error.to_string()),
    }
}

/// Builds the failure for a command that could not be started; `names` are the user's own
/// arguments.
pub fn could_not_start(status: &ExitStatus, names: &Names) -> Failure {
    let code = status.shell_code();
    let ExecStatus::CouldNotStart { stage, errno } = status.status else {
        return Failure::silent(code);
    };
    let cause = failure::errno_text(errno);
    let Names { program, user, workdir } = names;
    let message = match stage {
        Stage::User => format!("--user: there is no '{user}' in the guest"),
        Stage::Credentials => format!("--user: cannot become '{user}' in the guest: {cause}"),
        Stage::Chdir => format!("--workdir: cannot enter {workdir} in the guest: {cause}"),
        Stage::Limits => format!("the guest cannot limit the command: {cause}"),
        Stage::Exec if code == failure::NOT_FOUND => {
            format!("'{program}' was not found in the guest")
        }
        Stage::Exec => format!("'{program}' cannot be executed in the guest: {cause}"),
        _ => format!("the guest cannot start a process: {cause}"),
    };
    Failure { code, ..Failure::fault(message) }
}

/// The user's arguments, for messages about them.
#[derive(Clone, Debug, Default)]
pub struct Names {
    pub program: String,
    pub user: String,
    pub workdir: String,
}
