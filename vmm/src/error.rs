//! The error that every public call returns: what failed, whose fault it is, whether to try again.
//!
//! Recipes and modules have error enums of their own beside their code; they meet here, so that a
//! caller can decide without knowing them.

use std::{error, fmt, iter};

use pvmm_devices::legacy::serial::SerialError;
use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::mmio::RestoreError;
use pvmm_devices::vmgenid::VmGenIdError;

/// Why a call failed.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    act: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The party at fault for an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller asked for something impossible; the message names the field.
    InvalidConfig,
    /// This host cannot do it.
    HostUnsupported,
    /// The host has no more memory, descriptors or disk; trying again later may help.
    HostResource,
    /// A snapshot that is whole, and not for this host or this pvmm; the message names the
    /// difference.
    SnapshotIncompatible,
    /// A snapshot that is not what was written; the message names the part.
    SnapshotCorrupt,
    /// The guest did something that ended it.
    GuestFault,
    /// The agent in the guest answered that it cannot do what was asked, such as for a file that is
    /// not there.
    GuestRefused,
    /// The agent in the guest went away, or is not ours.
    AgentLost,
    /// A deadline passed.
    Timeout,
    /// An earlier error left the machine between two states; it can only be ended.
    Broken,
    /// pvmm is wrong.
    Bug,
}

impl Error {
    /// An error of `kind` while doing `act`, caused by `source`.
    pub fn new(
        kind: ErrorKind,
        act: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { kind, act: act.into(), source: Some(source.into()) }
    }

    /// An error with no deeper cause.
    pub fn plain(kind: ErrorKind, act: impl Into<String>) -> Self {
        Self { kind, act: act.into(), source: None }
    }

    /// Returns whose fault the error is, for a caller that decides what to do about it.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the same call may succeed later without any change.
    pub fn is_retryable(&self) -> bool {
        matches!(self.kind, ErrorKind::HostResource | ErrorKind::Timeout)
    }
}

/// Writes what failed; as `{:#}` every cause too, in one line.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.act)?;
        if f.alternate() {
            let causes = iter::successors(error::Error::source(self), |error| error.source());
            causes.into_iter().try_for_each(|cause| write!(f, ": {cause}"))?;
        }
        Ok(())
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<VmGenIdError> for Error {
    fn from(error: VmGenIdError) -> Self {
        let kind = match error {
            VmGenIdError::Memory { .. } => ErrorKind::Bug,
            VmGenIdError::Random(_) => ErrorKind::HostResource,
        };
        Self::new(kind, "generation", error)
    }
}

impl From<RestoreError> for Error {
    fn from(error: RestoreError) -> Self {
        Self::new(ErrorKind::SnapshotCorrupt, "a device cannot go on", error)
    }
}

impl From<SerialError> for Error {
    fn from(error: SerialError) -> Self {
        Self::new(ErrorKind::SnapshotCorrupt, "the serial port cannot go on", error)
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        let kind = match error {
            DeviceError::Timeout { .. } => ErrorKind::Timeout,
            DeviceError::Update(_) => ErrorKind::InvalidConfig,
            DeviceError::Busy | DeviceError::Events(_) => ErrorKind::HostResource,
            DeviceError::Unknown
            | DeviceError::AlreadyActive
            | DeviceError::Superseded
            | DeviceError::NotQuiet
            | DeviceError::InFlight { .. }
            | DeviceError::Gone => ErrorKind::Bug,
        };
        Self::new(kind, "device thread", error)
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::io;

    use super::*;

    #[test]
    fn error_names_its_act_and_has_its_causes_as_sources() {
        let cause = io::Error::new(io::ErrorKind::NotFound, "no such tap");
        let inner = Error::new(ErrorKind::HostResource, "net 0", cause);
        let error = Error::new(ErrorKind::HostResource, "cannot boot", inner);
        assert_eq!(error.to_string(), "cannot boot");
        assert_eq!(format!("{error:#}"), "cannot boot: net 0: no such tap");
        let net = error.source().unwrap();
        assert_eq!(net.to_string(), "net 0");
        assert_eq!(net.source().unwrap().to_string(), "no such tap");
    }
}
