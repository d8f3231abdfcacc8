//! Freezing the workload as a whole, on a thread of the pool: it may take a while, or for ever.
//! From the request on no exec is started; what could not be frozen in time is thawed again.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::FREEZE_TIME;
use pvmm_guest_agent::message::{Answer, Code, Failure, Freeze, Frozen, Outcome, Refresh};

use crate::cgroup::Freezer;
use crate::job::{Job, Work};
use crate::pool::Report;
use crate::server::Server;
use crate::sys;

const POLL: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(600);

impl Server {
    pub(crate) fn start_freeze(&mut self, connection: u64, stream: u32, request: Freeze) {
        let Some(cgroups) = &mut self.settings.cgroups else {
            let why = "this guest has no control groups to freeze";
            return self.refuse(connection, stream, Code::Unsupported, why);
        };
        cgroups.tidy_now();
        let freezer = cgroups.freezer();
        cgroups.set_frozen(true);
        let frozen = Frozen { execs: self.pids.len() as u32, secrets: self.identity.had_secrets };
        let id = self.new_id();
        let job = Job {
            connection: Some(connection),
            stream,
            work: Work::File(None),
            sink: None,
            sources: Vec::new(),
            deadline: None,
        };
        self.jobs.insert(id, job);
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.streams.insert(stream, id);
        }
        let task = move |reporter: &crate::pool::Reporter| {
            let outcome = match freeze(&freezer, &request) {
                Ok(()) => Outcome::Ok(Answer::Frozen(frozen)),
                Err((error, doing)) => Outcome::Failed(Failure {
                    code: Code::Io,
                    errno: error.raw_os_error(),
                    path: None,
                    message: doing.into(),
                }),
            };
            reporter.send(Report::Done(id, outcome));
        };
        self.pool.submit(id, Box::new(task));
    }

    pub(crate) fn thaw(&mut self, connection: u64, stream: u32) {
        let thawed = match &mut self.settings.cgroups {
            Some(cgroups) => cgroups.thaw(),
            None => Ok(()),
        };
        let outcome = match thawed {
            Ok(()) => Outcome::Ok(Answer::Done {}),
            Err(e) => Outcome::Failed(Failure {
                code: Code::Io,
                errno: e.raw_os_error(),
                path: None,
                message: "cannot thaw".into(),
            }),
        };
        self.conclude(connection, stream, &outcome);
    }

    /// A copy of a frozen guest is told who it is. Whoever else was connected is of another life.
    pub(crate) fn take_refresh(&mut self, connection: u64, stream: u32, request: &Refresh) {
        if self.is_frozen() && request.generation != self.identity.generation {
            let others: Vec<u64> =
                self.connections.keys().copied().filter(|id| *id != connection).collect();
            for id in others {
                self.drop_connection(id);
            }
        }
        let report = self.refresh(request);
        self.answer(connection, stream, Answer::Refreshed(report));
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.settings.cgroups.as_ref().is_some_and(crate::cgroup::Cgroups::is_frozen)
    }
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
        sys::sync_disks();
    }
    if request.drop_caches {
        fs::write("/proc/sys/vm/drop_caches", "1")
            .map_err(|error| (error, "the page cache could not be dropped"))?;
    }
    Ok(())
}
