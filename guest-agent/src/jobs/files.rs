//! File requests: the pipes they need. The work itself is in `file_work.rs`, on a thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::FILE_WINDOW;
use pvmm_guest_agent::message::{Code, Request};

use super::worker;
use crate::agent::Agent;
use crate::channel::{Sink, Source};
use crate::connection::StreamId;
use crate::file_work::{self, FileContext};
use crate::job::{Jobs, Stream};
use crate::sys;
use crate::token::Token;

pub fn start(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, request: Request) {
    let mut stream = Stream::new(agent.new_id(), id);
    match open_pipe(agent, &mut stream, &request) {
        Ok(context) => worker::start(agent, jobs, stream, move |reporter| {
            file_work::carry_out(request, context, reporter)
        }),
        Err(e) => agent.fail(id, Code::Io, e.raw_os_error(), "cannot make a pipe"),
    }
}

/// Makes the pipe between the client and the worker, if the request needs one.
fn open_pipe(agent: &Agent, stream: &mut Stream, request: &Request) -> io::Result<FileContext> {
    let job = stream.job;
    let mut context =
        FileContext { id: job, pipe: None, committed: Arc::new(AtomicBool::new(false)) };
    match request {
        Request::ReadFile(_) | Request::ReadTar(_) | Request::List(_) | Request::Watch(_) => {
            let (ours, theirs) = sys::pipe()?;
            if !matches!(request, Request::Watch(_)) {
                sys::widen_pipe(&ours, FILE_WINDOW);
            }
            sys::set_nonblocking(&ours)?;
            agent.watch(&ours, Token::Output(job))?;
            stream.sources.push(Source::new(Channel::Output, ours, None));
            context.pipe = Some(theirs.into());
        }
        Request::WriteFile(_) | Request::WriteTar(_) => {
            let (theirs, ours) = sys::pipe()?;
            sys::widen_pipe(&ours, FILE_WINDOW);
            sys::set_nonblocking(&ours)?;
            agent.watch(&ours, Token::Input(job))?;
            stream.sink = Some(Sink::file(ours, Arc::clone(&context.committed)));
            context.pipe = Some(theirs.into());
        }
        _ => {}
    }
    Ok(context)
}
