//! File requests as jobs: which pipes they need, and what becomes of their reports.
//! The work itself is in `file_work.rs`, on a thread of the pool.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pvmm_guest_agent::limits::FILE_WINDOW;
use pvmm_guest_agent::message::{Code, Failure, Outcome, Request, Started};
use pvmm_guest_agent::{Channel, Kind};

use crate::channel::{Sink, Source};
use crate::file_work::{self, Context};
use crate::job::{Job, Work};
use crate::pool::Report;
use crate::server::Server;
use crate::sys;
use crate::token::Token;

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
        Request::Symlink(it) => vec![&it.path],
        Request::Watch(it) => vec![&it.path],
        Request::ReadTar(it) => vec![&it.path],
        Request::WriteTar(it) => vec![&it.path],
        Request::Freeze(_) | Request::Refresh(_) | Request::Thaw {} => vec![],
        Request::Processes {} | Request::Attach(_) | Request::Metrics {} => vec![],
        Request::SignalProcess(_) | Request::ForgetProcess(_) => vec![],
        Request::Exec(_)
        | Request::Connect(_)
        | Request::OpenSession(_)
        | Request::RunCode(_)
        | Request::CloseSession(_)
        | Request::ListSessions {}
        | Request::Shutdown(_)
        | Request::Info {}
        | Request::Ping {} => vec![],
    }
}

impl Server {
    pub(crate) fn start_file_work(&mut self, connection: u64, stream: u32, request: Request) {
        if let Err(e) = self.try_file_work(connection, stream, request) {
            let failure = Failure {
                code: Code::Io,
                errno: e.raw_os_error(),
                path: None,
                message: "cannot make a pipe".into(),
            };
            self.conclude(connection, stream, &Outcome::Failed(failure));
        }
    }

    fn try_file_work(&mut self, connection: u64, stream: u32, request: Request) -> io::Result<()> {
        let id = self.new_id();
        let mut job = Job {
            connection: Some(connection),
            stream,
            work: Work::File(None),
            sink: None,
            sources: Vec::new(),
            deadline: None,
        };
        let mut context = Context { id, pipe: None, committed: Arc::new(AtomicBool::new(false)) };
        match &request {
            Request::ReadFile(_) | Request::ReadTar(_) | Request::List(_) | Request::Watch(_) => {
                let (ours, theirs) = sys::pipe()?;
                if !matches!(request, Request::Watch(_)) {
                    sys::widen_pipe(&ours, FILE_WINDOW);
                }
                sys::set_nonblocking(&ours)?;
                self.watch(&ours, Token::Output(id))?;
                job.sources.push(Source::new(Channel::Output, ours, None));
                context.pipe = Some(theirs.into());
            }
            Request::WriteFile(_) | Request::WriteTar(_) => {
                let (theirs, ours) = sys::pipe()?;
                sys::widen_pipe(&ours, FILE_WINDOW);
                sys::set_nonblocking(&ours)?;
                self.watch(&ours, Token::Input(id))?;
                job.sink = Some(Sink::file(ours, Arc::clone(&context.committed)));
                context.pipe = Some(theirs.into());
            }
            _ => {}
        }
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.streams.insert(stream, id);
        }
        self.jobs.insert(id, job);
        let task = move |reporter: &_| file_work::carry_out(request, context, reporter);
        self.pool.submit(id, Box::new(task));
        Ok(())
    }

    /// Breaks the worker's pipe; what it then reports ends the stream.
    pub(crate) fn cancel_file_work(&mut self, id: u64) {
        if let Some(job) = self.jobs.get_mut(&id) {
            job.sink = None;
            job.sources.clear();
            self.finish_if_over(id);
        }
    }

    pub(crate) fn take_worker_reports(&mut self) {
        while let Some(report) = self.pool.next_report() {
            match report {
                Report::Started(id, metadata) => {
                    let Some(job) = self.jobs.get(&id) else { continue };
                    let connection = job.connection.and_then(|id| self.connections.get_mut(&id));
                    if let Some(connection) = connection {
                        let started = Started { metadata: Some(metadata), ..Started::default() };
                        connection.out.control(Kind::Started, job.stream, &started);
                    }
                }
                Report::Begun(id) => {
                    let Some(job) = self.jobs.get(&id) else { continue };
                    let connection = job.connection.and_then(|id| self.connections.get_mut(&id));
                    if let Some(connection) = connection {
                        connection.out.control(Kind::Started, job.stream, &Started::default());
                    }
                }
                Report::Done(id, outcome) => {
                    if let Some(job) = self.jobs.get_mut(&id) {
                        match &mut job.work {
                            Work::Code(_, slot) => *slot = Some(outcome),
                            work => *work = Work::File(Some(outcome)),
                        }
                        self.finish_if_over(id);
                    }
                }
            }
        }
    }
}
