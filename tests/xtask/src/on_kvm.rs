//! `cargo xtask on-kvm`: runs a command where guests run, here or in a nested host.
//!
//! One line says where the command runs. All other output and the exit code are those of the
//! command.

use std::ffi::OsString;
use std::io::{self, PipeReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode};

use crate::nested_host::image::{self, Image, ImageError};
use crate::nested_host::session::{self, End};
use crate::nested_host::{Clock, HostError, NestedHost, background};
use crate::probe::{self, Found};
use crate::{report, sys};

/// The exit code for an error of this tool.
pub const OWN_FAULT: u8 = 125;

#[derive(Debug, thiserror::Error)]
pub enum OnKvmError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("the nested host was lost; its console ended with:\n{console}")]
    HostLost { console: String },
    #[error(
        "the nested host was lost after the command had read from stdin, so it is not run again"
    )]
    HostLostMidway,
    #[error("cannot pass the command on")]
    Pass(#[source] io::Error),
}

pub fn run(argv: &[OsString]) -> ExitCode {
    // The command line has at least one word; see main.rs.
    let Some((program, arguments)) = argv.split_first() else { return ExitCode::from(OWN_FAULT) };
    match probe::find() {
        Found::Here(what) => {
            eprintln!("on-kvm: {what}; running directly");
            let error = Command::new(program).args(arguments).exec();
            ExitCode::from(not_started(program, &error))
        }
        Found::NotHere(reason) => {
            eprintln!("on-kvm: no usable KVM here ({reason}); running in the nested host");
            ExitCode::from(code(NestedPlace::open().and_then(|place| place.run(argv))))
        }
    }
}

/// Runs a command on this machine and returns the exit code that a shell would report.
pub fn run_here(argv: &[OsString]) -> u8 {
    let Some((program, arguments)) = argv.split_first() else { return OWN_FAULT };
    match Command::new(program).args(arguments).status() {
        Ok(status) => status.code().unwrap_or(128 + status.signal().unwrap_or(0)) as u8,
        Err(error) => not_started(program, &error),
    }
}

fn not_started(program: &OsString, error: &io::Error) -> u8 {
    eprintln!("on-kvm: {}: {error}", program.display());
    if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
}

/// Returns the exit code of a command that ran, or prints an error of this tool and returns its
/// code.
pub fn code(result: Result<u8, OnKvmError>) -> u8 {
    result.unwrap_or_else(|e| match e {
        OnKvmError::Host(HostError::Interrupted(signal)) => 128 + signal,
        e => {
            eprintln!("on-kvm: {}", report::chain(&e));
            OWN_FAULT
        }
    })
}

/// How a command in a nested host ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ran {
    Exited(u8),
    /// The host hung or died during the command, which says nothing about the command.
    HostLost {
        stdin_used: bool,
        console: String,
    },
}

/// A nested host to run commands in: the background host if it is up, otherwise a new one.
pub struct NestedPlace {
    image: Image,
    signals: PipeReader,
    clock: Clock,
    own: Option<NestedHost>,
    background: bool,
}

impl NestedPlace {
    pub fn open() -> Result<Self, OnKvmError> {
        let mut place = Self::prepare(Clock::Outer)?;
        place.background = background::connect(&place.image).is_some();
        if !place.background {
            place.own = Some(place.boot()?);
        }
        Ok(place)
    }

    /// Boots a new host with the given clock.
    pub fn own(clock: Clock) -> Result<Self, OnKvmError> {
        let mut place = Self::prepare(clock)?;
        place.own = Some(place.boot()?);
        Ok(place)
    }

    fn prepare(clock: Clock) -> Result<Self, OnKvmError> {
        let image = image::prepare()?;
        let mut signals = session::ENDING.to_vec();
        signals.push(session::RESIZED);
        let signals = sys::signals_as_bytes(&signals).map_err(OnKvmError::Pass)?;
        Ok(NestedPlace { image, signals, clock, own: None, background: false })
    }

    /// Boots a host, and tries once more if it does not come up.
    fn boot(&self) -> Result<NestedHost, HostError> {
        let host = match NestedHost::boot(&self.image, &self.signals, self.clock) {
            Err(e @ (HostError::BootDied { .. } | HostError::BootLate { .. })) => {
                eprintln!("on-kvm: {e}\non-kvm: booting another host");
                NestedHost::boot(&self.image, &self.signals, self.clock)?
            }
            other => other?,
        };
        host.watch().map_err(HostError::Channels)?;
        Ok(host)
    }

    /// Runs the command, and runs it once more if the host is lost. Ends a host that this value has
    /// booted.
    pub fn run(mut self, argv: &[OsString]) -> Result<u8, OnKvmError> {
        match self.run_once(argv)? {
            Ran::Exited(code) => return Ok(code),
            Ran::HostLost { stdin_used: true, .. } => return Err(OnKvmError::HostLostMidway),
            Ran::HostLost { console, .. } => {
                eprintln!("on-kvm: the nested host was lost, its console ended with:\n{console}");
                eprintln!("on-kvm: running the command once more");
            }
        }
        match self.run_once(argv)? {
            Ran::Exited(code) => Ok(code),
            Ran::HostLost { console, .. } => Err(OnKvmError::HostLost { console }),
        }
    }

    /// Runs the command once. If the host is lost, the next command gets another.
    pub fn run_once(&mut self, argv: &[OsString]) -> Result<Ran, OnKvmError> {
        if self.own.is_none() && !self.background {
            self.own = Some(self.boot()?);
        }
        let request = session::request(argv).map_err(OnKvmError::Pass)?;
        let port = match &self.own {
            Some(host) => host.port(0),
            None => background::connect(&self.image).ok_or(io::ErrorKind::NotConnected.into()),
        };
        let port = port.map_err(OnKvmError::Pass)?;
        match session::run(port, &request, &self.signals).map_err(OnKvmError::Pass)? {
            End::Exited(code) => Ok(Ran::Exited(code)),
            End::HostLost { stdin_used } => {
                self.background = false;
                let console = self.own.take().map(|host| host.console()).unwrap_or_default();
                Ok(Ran::HostLost { stdin_used, console })
            }
        }
    }

    /// Pauses a host that this value has booted, because its processor is never idle.
    pub fn pause(&self) -> Result<(), OnKvmError> {
        self.own.as_ref().map_or(Ok(()), NestedHost::pause).map_err(OnKvmError::Pass)
    }

    pub fn resume(&self) -> Result<(), OnKvmError> {
        self.own.as_ref().map_or(Ok(()), NestedHost::resume).map_err(OnKvmError::Pass)
    }

    /// Returns whether the background host is used, which stays up.
    pub fn is_background(&self) -> bool {
        self.background
    }
}
