//! Tells the caller of a build how it goes, and lets the caller end it.

use pvmm_images::Progress;

use crate::failure::Failure;

/// Receives what a build does and what its commands print.
pub trait Log: Progress {
    /// Takes a line of output, without control characters.
    fn line(&mut self, text: &str);
}

/// Fails if the caller wants the build to stop.
pub(super) fn stop_if_interrupted(log: &mut dyn Log) -> Result<(), Failure> {
    if log.interrupted() { Err(Failure::fault("the build was interrupted")) } else { Ok(()) }
}
