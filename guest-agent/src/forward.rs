//! Connections to TCP ports of the guest's own loopback, each a stream of its client.
//! A forwarded port needs no network in the guest: the agent connects from inside.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Instant;

use pvmm_guest_agent::limits::CONNECT_TIME;
use pvmm_guest_agent::message::{Answer, Code, Connect, Failure, Outcome, Started};
use pvmm_guest_agent::{Channel, Kind};

use crate::channel::{Sink, Source};
use crate::job::{Job, Work};
use crate::server::Server;
use crate::sys::tcp;
use crate::token::Token;

/// Where a server that listens on "localhost" may be, in the order to try.
const LOOPBACKS: [IpAddr; 2] = [IpAddr::V6(Ipv6Addr::LOCALHOST), IpAddr::V4(Ipv4Addr::LOCALHOST)];

/// How far a connection has come.
pub enum Tcp {
    Connecting {
        socket: OwnedFd,
        /// Addresses to try if this one refuses, last first.
        left: Vec<SocketAddr>,
    },
    Connected,
}

impl Server {
    pub(crate) fn start_connect(&mut self, connection: u64, stream: u32, connect: Connect) {
        let id = self.new_id();
        let mut left = LOOPBACKS.map(|ip| SocketAddr::new(ip, connect.port)).to_vec();
        let socket = match self.try_addresses(id, &mut left) {
            Ok(socket) => socket,
            Err(e) => return self.conclude(connection, stream, &failed(&e)),
        };
        let job = Job {
            connection: Some(connection),
            stream,
            work: Work::Tcp(Tcp::Connecting { socket, left }),
            sink: None,
            sources: Vec::new(),
            deadline: None,
        };
        self.jobs.insert(id, job);
        self.set_deadline(Token::Job(id), Some(Instant::now() + CONNECT_TIME));
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.streams.insert(stream, id);
        }
    }

    /// Begins to connect to the first address that does not refuse at once.
    fn try_addresses(&self, id: u64, left: &mut Vec<SocketAddr>) -> io::Result<OwnedFd> {
        let mut refused = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        while let Some(address) = left.pop() {
            let begun = tcp::connect(&address)
                .and_then(|socket| self.watch(&socket, Token::Input(id)).map(|()| socket));
            match begun {
                Ok(socket) => return Ok(socket),
                // A guest without IPv6 says so for the second address; the first one's word counts.
                Err(e) if address.is_ipv6() && is_absent(&e) => {}
                Err(e) => refused = e,
            }
        }
        Err(refused)
    }

    /// The kernel has something to say about a connection that was begun; whether it was one.
    pub(crate) fn advance_connect(&mut self, id: u64) -> bool {
        let Some(job) = self.jobs.get_mut(&id) else { return false };
        let Work::Tcp(Tcp::Connecting { socket, left }) = &mut job.work else { return false };
        match tcp::connect_result(socket) {
            Ok(false) => {}
            Ok(true) => {
                if let Err(e) = self.connected(id) {
                    self.end_connect(id, &e);
                }
            }
            Err(e) => {
                let mut left = std::mem::take(left);
                match self.try_addresses(id, &mut left) {
                    Ok(socket) => {
                        if let Some(job) = self.jobs.get_mut(&id) {
                            job.work = Work::Tcp(Tcp::Connecting { socket, left });
                        }
                    }
                    Err(_) => self.end_connect(id, &e),
                }
            }
        }
        true
    }

    fn connected(&mut self, id: u64) -> io::Result<()> {
        let Some(job) = self.jobs.get_mut(&id) else { return Ok(()) };
        let Work::Tcp(tcp) = &mut job.work else { return Ok(()) };
        let Tcp::Connecting { socket, .. } = std::mem::replace(tcp, Tcp::Connected) else {
            return Ok(());
        };
        let reading = socket.try_clone()?;
        job.sink = Some(Sink::socket(socket));
        self.epoll.watch_edges(&reading, Token::Output(id).bits())?;
        job.sources.push(Source::new(Channel::Output, reading, None));
        let (connection, stream) = (job.connection, job.stream);
        self.set_deadline(Token::Job(id), None);
        if let Some(connection) = connection.and_then(|id| self.connections.get_mut(&id)) {
            connection.out.control(Kind::Started, stream, &Started::default());
        }
        Ok(())
    }

    /// A connection that was not made in time.
    pub(crate) fn connect_deadline(&mut self, id: u64) {
        let connecting = self
            .jobs
            .get(&id)
            .is_some_and(|job| matches!(job.work, Work::Tcp(Tcp::Connecting { .. })));
        if connecting {
            self.end_connect(id, &io::Error::from_raw_os_error(libc::ETIMEDOUT));
        }
    }

    fn end_connect(&mut self, id: u64, error: &io::Error) {
        self.end_tcp(id, &failed(error));
    }

    pub(crate) fn cancel_tcp(&mut self, id: u64) {
        let message = String::new();
        let failure = Failure { code: Code::Cancelled, errno: None, path: None, message };
        self.end_tcp(id, &Outcome::Failed(failure));
    }

    fn end_tcp(&mut self, id: u64, outcome: &Outcome) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (connection, stream) = (job.connection, job.stream);
        self.forget(id);
        if let Some(connection) = connection {
            self.conclude(connection, stream, outcome);
        }
    }
}

/// What a connection that is over came to; `None` while one direction is open.
pub fn outcome(tcp: &Tcp, job: &Job) -> Option<Outcome> {
    if !matches!(tcp, Tcp::Connected) {
        return None;
    }
    if let Some(errno) = job.sources.iter().find_map(Source::errno) {
        return Some(failed(&io::Error::from_raw_os_error(errno)));
    }
    let written = job.sink.as_ref().is_none_or(Sink::is_closed);
    written.then_some(Outcome::Ok(Answer::Done {}))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::ENETUNREACH)
    )
}

fn failed(error: &io::Error) -> Outcome {
    Outcome::Failed(Failure {
        code: Code::Io,
        errno: error.raw_os_error(),
        path: None,
        message: "connect".into(),
    })
}
