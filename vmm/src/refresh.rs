//! Refresh: a machine that lives a second time is handed out when its guest is somebody of its own.
//!
//! A copy has the random numbers, clock, machine-id and boot-id of its template, and so has every
//! other copy. Whoever wants one as it is has to say so.

use std::time::Instant;

use crate::agent::{Agent, Refresh};
use crate::error::{Error, ErrorKind};
use crate::machine::Machine;

/// Lets a machine that was copied or rolled back run, and its agent make it its own. If that
/// fails, the machine is paused again.
pub fn resume_refreshed(
    machine: &mut Machine,
    refresh: &Refresh,
    deadline: Instant,
) -> Result<Agent, Error> {
    let Some(path) = machine.resources.vsock_path.clone() else {
        let what = "refresh: the machine has no vsock device, so no agent can be reached";
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    };
    machine.resume()?;
    let refresh = refresh.clone().clock_mark(machine.clock_mark);
    match Agent::connect_refreshed(&path, &refresh, deadline) {
        Ok(agent) => Ok(agent),
        Err(error) => {
            machine.pause()?;
            Err(error.into())
        }
    }
}
