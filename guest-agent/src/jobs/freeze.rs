//! Freezes the whole workload, on a thread of the pool, because it may take long or never finish.
//!
//! From the request on no exec is started; a workload that could not be frozen in time is thawed
//! again.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::FREEZE_TIME;
use pvmm_guest_agent::message::{Answer, Code, Freeze, FrozenWorkload, Outcome, Refresh};

use super::worker;
use crate::agent::Agent;
use crate::cgroup::Freezer;
use crate::connection::StreamId;
use crate::job::{Jobs, Stream};
use crate::sys;

const POLL: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(600);

pub fn start(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, request: Freeze) {
    let execs = agent.execs();
    let Some(cgroups) = &mut agent.settings.cgroups else {
        let why = "this guest has no control groups to freeze";
        return agent.refuse(id, Code::Unsupported, why);
    };
    cgroups.tidy_now();
    let freezer = cgroups.freezer();
    cgroups.set_frozen(true);
    let frozen = FrozenWorkload { execs, secrets: agent.identity.had_secrets };
    let stream = Stream::new(agent.new_id(), id);
    worker::start(agent, jobs, stream, move |_| match freeze(&freezer, &request) {
        Ok(()) => Outcome::Ok(Answer::Frozen(frozen)),
        Err((error, doing)) => Outcome::failed(Code::Io, error.raw_os_error(), doing),
    });
}

pub fn thaw(agent: &mut Agent, id: StreamId) {
    let thawed = match &mut agent.settings.cgroups {
        Some(cgroups) => cgroups.thaw(),
        None => Ok(()),
    };
    match thawed {
        Ok(()) => agent.answer(id, Answer::Done {}),
        Err(e) => agent.fail(id, Code::Io, e.raw_os_error(), "cannot thaw"),
    }
}

/// Refreshes a fork of a frozen guest. All other connections belong to the guest it was forked from
/// and are dropped.
pub fn refresh(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, request: &Refresh) {
    if agent.is_frozen() && request.generation != agent.identity.generation {
        let others: Vec<u64> =
            agent.connections.keys().copied().filter(|other| *other != id.connection).collect();
        for other in others {
            jobs.drop_connection(agent, other);
        }
    }
    let report = agent.identity.refresh(request, &mut agent.settings.cgroups);
    agent.answer(id, Answer::Refreshed(report));
}

fn freeze(freezer: &Freezer, request: &Freeze) -> Result<(), (io::Error, &'static str)> {
    let patience = request.timeout_ms.map_or(FREEZE_TIME, Duration::from_millis).min(LONGEST);
    let deadline = Instant::now() + patience;
    let stopped = freezer.freeze().and_then(|()| {
        while !freezer.stands_still()? {
            if Instant::now() >= deadline {
                return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    });
    if let Err(error) = stopped {
        let _ = freezer.thaw();
        return Err((error, "the workload could not be frozen"));
    }
    if request.sync {
        sys::system::sync_disks();
    }
    if request.drop_caches {
        fs::write("/proc/sys/vm/drop_caches", "1")
            .map_err(|error| (error, "the page cache could not be dropped"))?;
    }
    Ok(())
}
