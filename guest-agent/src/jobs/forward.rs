//! A connection to a TCP port of the guest's loopback.
//!
//! A forwarded port needs no network in the guest: the agent connects from inside.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Instant;

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::CONNECT_TIME;
use pvmm_guest_agent::message::{Answer, Code, Connect, Outcome, Started};

use crate::agent::Agent;
use crate::channel::{Sink, Source};
use crate::connection::StreamId;
use crate::job::{Job, Jobs, Progress, Stream};
use crate::sys::tcp;
use crate::token::Token;

/// The loopback addresses of a server that listens on "localhost"; the last one is tried first.
const LOOPBACKS: [IpAddr; 2] = [IpAddr::V6(Ipv6Addr::LOCALHOST), IpAddr::V4(Ipv4Addr::LOCALHOST)];

struct ForwardJob {
    stream: Stream,
    /// `None` once the port has accepted.
    connecting: Option<Connecting>,
}

struct Connecting {
    socket: OwnedFd,
    /// Addresses to try if this one refuses; the last one is tried first.
    left: Vec<SocketAddr>,
}

pub fn start(agent: &mut Agent, jobs: &mut Jobs, id: StreamId, connect: Connect) {
    let job = agent.new_id();
    let left = LOOPBACKS.map(|ip| SocketAddr::new(ip, connect.port)).to_vec();
    match Connecting::start(agent, job, left) {
        Ok(connecting) => {
            let stream = Stream::new(job, id);
            jobs.open(agent, ForwardJob { stream, connecting: Some(connecting) });
            agent.deadlines.set(Token::Job(job), Some(Instant::now() + CONNECT_TIME));
        }
        Err(e) => agent.conclude(id, &failed(&e)),
    }
}

impl Connecting {
    /// Starts to connect to the first address that does not refuse at once.
    fn start(agent: &Agent, job: u64, mut left: Vec<SocketAddr>) -> io::Result<Self> {
        let mut refused = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        while let Some(address) = left.pop() {
            let begun = tcp::connect(&address)
                .and_then(|socket| agent.watch(&socket, Token::Input(job)).map(|()| socket));
            match begun {
                Ok(socket) => return Ok(Self { socket, left }),
                // A guest without IPv6 fails for that address; the error of the IPv4 address is
                // reported.
                Err(e) if address.is_ipv6() && is_absent(&e) => {}
                Err(e) => refused = e,
            }
        }
        Err(refused)
    }
}

impl ForwardJob {
    /// Handles an event of a socket that is connecting.
    fn connect(&mut self, connecting: Connecting, agent: &mut Agent) -> io::Result<()> {
        match tcp::connect_result(&connecting.socket) {
            Ok(false) => self.connecting = Some(connecting),
            Ok(true) => self.connected(connecting.socket, agent)?,
            Err(e) => {
                let next = Connecting::start(agent, self.stream.job, connecting.left);
                self.connecting = Some(next.map_err(|_| e)?);
            }
        }
        Ok(())
    }

    fn connected(&mut self, socket: OwnedFd, agent: &mut Agent) -> io::Result<()> {
        let reading = socket.try_clone()?;
        self.stream.sink = Some(Sink::socket(socket));
        agent.watch(&reading, Token::Output(self.stream.job))?;
        self.stream.sources.push(Source::new(Channel::Output, reading, None));
        agent.deadlines.set(Token::Job(self.stream.job), None);
        agent.started(self.stream.id, &Started::default());
        Ok(())
    }
}

impl Job for ForwardJob {
    fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Returns the outcome of a connection that is over; `None` while one direction is open.
    fn outcome(&mut self) -> Option<Outcome> {
        if self.connecting.is_some() {
            return None;
        }
        if let Some(errno) = self.stream.sources.iter().find_map(Source::errno) {
            return Some(failed(&io::Error::from_raw_os_error(errno)));
        }
        let written = self.stream.sink.as_ref().is_none_or(Sink::is_closed);
        written.then_some(Outcome::Ok(Answer::Done {}))
    }

    fn advance_input(&mut self, agent: &mut Agent) -> Progress {
        let Some(connecting) = self.connecting.take() else {
            let closed = self.stream.pump_input(agent);
            return if closed { self.progress() } else { Progress::Going };
        };
        match self.connect(connecting, agent) {
            Ok(()) => Progress::Going,
            Err(e) => Progress::Ended(failed(&e)),
        }
    }

    /// Ends a connection that was not made in time.
    fn deadline(&mut self, _agent: &mut Agent) -> Progress {
        if self.connecting.is_none() {
            return Progress::Going;
        }
        Progress::Ended(failed(&io::Error::from_raw_os_error(libc::ETIMEDOUT)))
    }

    fn cancel(&mut self, _agent: &mut Agent) -> Progress {
        Progress::Ended(Outcome::failed(Code::Cancelled, None, ""))
    }

    fn is_to_port(&self) -> bool {
        true
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::ENETUNREACH)
    )
}

fn failed(error: &io::Error) -> Outcome {
    Outcome::failed(Code::Io, error.raw_os_error(), "connect")
}
