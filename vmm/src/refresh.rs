//! Refresh: a machine that lives a second time is handed out when its guest is somebody of its own.
//!
//! A copy has the random numbers, clock, machine-id and boot-id of its template, and so has every other copy.
//! Whoever wants one as it is has to say so.

use std::time::Instant;

use crate::agent::{Agent, Refresh};
use crate::error::{Error, ErrorKind};
use crate::vm::Vm;

/// A copy of a machine, paused, whose guest still takes itself for the machine that was copied.
#[must_use = "a copy runs only once it was refreshed, or taken without a refresh"]
pub struct Forked {
    vm: Vm,
}

impl Forked {
    pub(crate) fn new(vm: Vm) -> Self {
        Self { vm }
    }

    /// Lets the copy run, and its agent make it its own before the workload goes on.
    ///
    /// The workload waits for it only if the agent had frozen it when the template was made
    /// ([`Agent::freeze`]). A copy that cannot be refreshed by the deadline is ended.
    pub fn refreshed(mut self, refresh: &Refresh, deadline: Instant) -> Result<(Vm, Agent), Error> {
        let agent = self.vm.resume_refreshed(refresh, deadline)?;
        Ok((self.vm, agent))
    }

    /// The copy as it is, paused: for guests without our agent, and for callers who refresh it
    /// themselves. Programs in it may draw the same random numbers as those in every other copy.
    pub fn without_refresh(self) -> Vm {
        self.vm
    }
}

impl Vm {
    /// Lets a machine that was copied or rolled back run, and its agent make it its own. If that
    /// fails, the machine is paused again.
    pub fn resume_refreshed(
        &mut self,
        refresh: &Refresh,
        deadline: Instant,
    ) -> Result<Agent, Error> {
        let Some(path) = self.vsock_path().map(ToOwned::to_owned) else {
            let what = "refresh: the machine has no vsock device, so no agent can be reached";
            return Err(Error::plain(ErrorKind::InvalidConfig, what));
        };
        self.resume()?;
        let refresh = refresh.clone().clock_of(self);
        match Agent::connect_refreshed(&path, &refresh, deadline) {
            Ok(agent) => Ok(agent),
            Err(error) => {
                self.pause()?;
                Err(error.into())
            }
        }
    }
}
