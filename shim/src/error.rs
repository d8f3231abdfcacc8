//! Errors of the shim, and how containerd is told of them.

use std::io;

use containerd_shim_protos::ttrpc;
use pvmm::agent::AgentError;
use pvmm::exec::ExecError;
use pvmm_sandbox::Failure;
use pvmm_sandbox::guest_agent;

#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    #[error("{0}")]
    Invalid(String),
    #[error("there is no {0}")]
    NotFound(String),
    #[error("{0} is there already")]
    Exists(String),
    #[error("{0}")]
    Conflict(String),
    #[error("{0}")]
    Unimplemented(&'static str),
    #[error("{}", .0.message)]
    Sandbox(Failure),
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
}

impl ShimError {
    /// For `map_err` of a system call.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    fn code(&self) -> ttrpc::Code {
        match self {
            Self::Invalid(_) => ttrpc::Code::INVALID_ARGUMENT,
            Self::NotFound(_) => ttrpc::Code::NOT_FOUND,
            Self::Exists(_) => ttrpc::Code::ALREADY_EXISTS,
            Self::Conflict(_) => ttrpc::Code::FAILED_PRECONDITION,
            Self::Unimplemented(_) => ttrpc::Code::UNIMPLEMENTED,
            Self::Sandbox(_) | Self::Io { .. } => ttrpc::Code::UNKNOWN,
        }
    }
}

impl From<Failure> for ShimError {
    fn from(failure: Failure) -> Self {
        let message = match &failure.hint {
            Some(hint) => format!("{} ({hint})", failure.message),
            None => failure.message.clone(),
        };
        Self::Sandbox(Failure { message, ..failure })
    }
}

impl From<AgentError> for ShimError {
    fn from(error: AgentError) -> Self {
        Self::Sandbox(guest_agent::refuse(error))
    }
}

impl From<ExecError> for ShimError {
    fn from(error: ExecError) -> Self {
        Self::Sandbox(guest_agent::refuse_exec(error))
    }
}

impl From<ShimError> for ttrpc::Error {
    fn from(error: ShimError) -> Self {
        ttrpc::Error::RpcStatus(ttrpc::get_status(error.code(), error))
    }
}
