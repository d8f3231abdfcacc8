//! Asks upstream resolvers for addresses, without waiting for any of them.
//!
//! Each question has a random id and a socket of its own, hence a random port, and is connected to
//! its resolver: a forged reply has to guess both. Attempts, replies and time are bounded.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::dns::{self, Outcome, Reply};
use crate::sys::{self, Interest, Poller};
use crate::token::Token;

/// The most questions that are open at once.
pub const QUESTIONS_MAX: usize = 64;
const ATTEMPTS: u32 = 3;
const ATTEMPT_TIME: Duration = Duration::from_millis(1500);
// Replies to other questions that are read before an attempt is given up.
const FOREIGN_MAX: u32 = 16;
const UPSTREAMS_MAX: usize = 3;
// Some servers send more than they are asked to.
const DATAGRAM_MAX: usize = 4096;
const DNS_PORT: u16 = 53;

/// The open questions.
#[derive(Debug)]
pub struct Resolver {
    upstreams: Vec<SocketAddr>,
    questions: HashMap<u32, Asked>,
    last: u32,
}

#[derive(Debug)]
struct Asked {
    name: String,
    id: u16,
    attempt: u32,
    foreign: u32,
    deadline: Instant,
    transport: Transport,
}

#[derive(Debug)]
enum Transport {
    Udp(UdpSocket),
    Tcp { stream: TcpStream, request: Vec<u8>, sent: usize, received: Vec<u8>, interest: Interest },
}

/// A name and the result of asking for it.
pub type Resolved = (String, Outcome);

enum Step {
    Wait,
    Retry,
    OverTcp,
    Done(Outcome),
}

impl Resolver {
    pub fn new(mut upstreams: Vec<SocketAddr>) -> Self {
        upstreams.truncate(UPSTREAMS_MAX);
        Self { upstreams, questions: HashMap::new(), last: 0 }
    }

    /// Asks for the addresses of a name. Returns false if too many questions are open or no
    /// resolver can be asked; true also if the name is being asked for already.
    pub fn ask(&mut self, name: &str, poller: &Poller, now: Instant) -> bool {
        if self.questions.values().any(|asked| asked.name == name) {
            return true;
        }
        if self.questions.len() >= QUESTIONS_MAX {
            return false;
        }
        self.last = self.last.wrapping_add(1);
        let number = self.last;
        for attempt in 0..ATTEMPTS {
            if let Some(asked) = self.send(name, attempt, poller, number, now) {
                return self.questions.insert(number, asked).is_none();
            }
        }
        false
    }

    /// Continues a question whose socket is ready.
    pub fn advance(&mut self, number: u32, poller: &Poller, now: Instant) -> Option<Resolved> {
        let asked = self.questions.get_mut(&number)?;
        let step = asked.step(poller, number);
        self.take_step(number, step, poller, now)
    }

    /// Repeats or gives up the questions whose time is over.
    pub fn expire(&mut self, poller: &Poller, now: Instant) -> Vec<Resolved> {
        let late = |(number, asked): (&u32, &Asked)| (asked.deadline <= now).then_some(*number);
        let late: Vec<u32> = self.questions.iter().filter_map(late).collect();
        late.into_iter()
            .filter_map(|number| self.take_step(number, Step::Retry, poller, now))
            .collect()
    }

    /// Returns the time of the next call to `expire`.
    pub fn deadline(&self) -> Option<Instant> {
        self.questions.values().map(|asked| asked.deadline).min()
    }

    fn take_step(
        &mut self,
        number: u32,
        step: Step,
        poller: &Poller,
        now: Instant,
    ) -> Option<Resolved> {
        let (Step::Retry | Step::OverTcp | Step::Done(_)) = step else { return None };
        let asked = self.questions.remove(&number)?;
        let again = match step {
            Step::Done(outcome) => return Some((asked.name, outcome)),
            Step::OverTcp => self.send_over_tcp(&asked, poller, number, now),
            _ => (asked.attempt + 1..ATTEMPTS)
                .find_map(|attempt| self.send(&asked.name, attempt, poller, number, now)),
        };
        match again {
            Some(again) => {
                self.questions.insert(number, again);
                None
            }
            None => Some((asked.name, Outcome::Failed)),
        }
    }

    fn upstream(&self, attempt: u32) -> Option<SocketAddr> {
        let count = self.upstreams.len().max(1);
        self.upstreams.get(attempt as usize % count).copied()
    }

    fn send(
        &self,
        name: &str,
        attempt: u32,
        poller: &Poller,
        number: u32,
        now: Instant,
    ) -> Option<Asked> {
        let upstream = self.upstream(attempt)?;
        let id = u16::from_ne_bytes(sys::random().ok()?);
        let any: IpAddr = if upstream.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.set_nonblocking(true).ok()?;
        socket.connect(upstream).ok()?;
        socket.send(&dns::write_question(id, name)?).ok()?;
        let reading = Interest { readable: true, writable: false };
        poller.watch(socket.as_fd(), Token::Question(number), Interest::default(), reading).ok()?;
        let (name, deadline) = (name.to_owned(), now + ATTEMPT_TIME);
        let transport = Transport::Udp(socket);
        Some(Asked { name, id, attempt, foreign: 0, deadline, transport })
    }

    /// Repeats a question whose answer was too long for a datagram.
    fn send_over_tcp(
        &self,
        asked: &Asked,
        poller: &Poller,
        number: u32,
        now: Instant,
    ) -> Option<Asked> {
        let id = u16::from_ne_bytes(sys::random().ok()?);
        let stream = sys::connect(self.upstream(asked.attempt)?).ok()?;
        let question = dns::write_question(id, &asked.name)?;
        let len = u16::try_from(question.len()).ok()?.to_be_bytes();
        let request = [&len[..], &question].concat();
        let interest = Interest { readable: false, writable: true };
        poller
            .watch(stream.as_fd(), Token::Question(number), Interest::default(), interest)
            .ok()?;
        let transport = Transport::Tcp { stream, request, sent: 0, received: Vec::new(), interest };
        let (name, deadline) = (asked.name.clone(), now + ATTEMPT_TIME);
        Some(Asked { name, id, attempt: asked.attempt, foreign: 0, deadline, transport })
    }
}

impl Asked {
    fn step(&mut self, poller: &Poller, number: u32) -> Step {
        let mut datagram = [0; DATAGRAM_MAX];
        match &mut self.transport {
            Transport::Udp(socket) => loop {
                let bytes = match socket.recv(&mut datagram) {
                    Ok(len) => datagram.get(..len).unwrap_or_default(),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Step::Wait,
                    Err(_) => return Step::Retry,
                };
                match dns::read_reply(bytes, self.id, &self.name) {
                    Reply::Answer(Outcome::Failed) => return Step::Retry,
                    Reply::Answer(outcome) => return Step::Done(outcome),
                    Reply::Truncated => return Step::OverTcp,
                    Reply::Foreign if self.foreign >= FOREIGN_MAX => return Step::Retry,
                    Reply::Foreign => self.foreign += 1,
                }
            },
            Transport::Tcp { stream, request, sent, received, interest } => {
                let left = request.get(*sent..).unwrap_or_default();
                if !left.is_empty() {
                    match stream.write(left) {
                        Ok(len) => *sent += len,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(_) => return Step::Retry,
                    }
                    let reading = Interest { readable: true, writable: *sent < request.len() };
                    if watch_again(poller, stream.as_fd(), number, interest, reading).is_err() {
                        return Step::Retry;
                    }
                    return Step::Wait;
                }
                match read_message(stream, received) {
                    Ok(None) => Step::Wait,
                    Ok(Some(message)) => match dns::read_reply(&message, self.id, &self.name) {
                        Reply::Answer(outcome) => Step::Done(outcome),
                        _ => Step::Retry,
                    },
                    Err(_) => Step::Retry,
                }
            }
        }
    }
}

fn watch_again(
    poller: &Poller,
    fd: BorrowedFd,
    number: u32,
    interest: &mut Interest,
    after: Interest,
) -> io::Result<()> {
    poller.watch(fd, Token::Question(number), *interest, after)?;
    *interest = after;
    Ok(())
}

/// Reads as much of a message with its length before it as has arrived.
fn read_message(stream: &mut TcpStream, received: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    let mut part = [0; 4096];
    loop {
        if let Some((len, message)) = received.split_first_chunk::<2>() {
            let len = usize::from(u16::from_be_bytes(*len));
            if let Some(message) = message.get(..len) {
                return Ok(Some(message.to_vec()));
            }
        }
        match stream.read(&mut part) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => received.extend_from_slice(&part[..len]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// Returns the resolvers that a file such as /etc/resolv.conf names.
pub fn upstreams_of(resolv_conf: &str) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let address = words.next().filter(|word| *word == "nameserver").and(words.next())?;
        Some(SocketAddr::new(address.parse().ok()?, DNS_PORT))
    };
    resolv_conf.lines().filter_map(server).take(UPSTREAMS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks one name and runs until there is a result.
    fn resolve(upstreams: Vec<SocketAddr>) -> Outcome {
        let poller = Poller::new().unwrap();
        let mut resolver = Resolver::new(upstreams);
        if !resolver.ask("a.example", &poller, Instant::now()) {
            return Outcome::Failed;
        }
        let end = Instant::now() + Duration::from_secs(20);
        while Instant::now() < end {
            for ready in poller.wait(Some(Duration::from_millis(50))).unwrap() {
                let Token::Question(number) = ready.token else { panic!("another token") };
                let now = Instant::now();
                if let Some(done) = resolver.advance(number, &poller, now) {
                    return done.1;
                }
            }
            if let Some(done) = resolver.expire(&poller, Instant::now()).pop() {
                return done.1;
            }
        }
        panic!("no result");
    }

    /// Answers datagrams with what `answer` makes of each question, until the test ends.
    fn server(answer: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 512];
            while let Ok((len, from)) = socket.recv_from(&mut buffer) {
                for message in answer(&buffer[..len]) {
                    socket.send_to(&message, from).unwrap();
                }
            }
        });
        address
    }

    fn answer(question: &[u8]) -> Vec<u8> {
        let question = dns::read_question(question).unwrap();
        question.answer(&[Ipv4Addr::new(1, 2, 3, 4)], 60).unwrap()
    }

    fn found() -> Outcome {
        Outcome::Found { addresses: vec![Ipv4Addr::new(1, 2, 3, 4)], ttl: 60 }
    }

    #[test]
    fn forged_replies_are_ignored() {
        let upstream = server(|question| {
            let good = answer(question);
            let mut forged = good.clone();
            forged[0] ^= 0xff;
            let last = forged.len() - 1;
            forged[last] = 9;
            vec![forged, b"junk".to_vec(), good]
        });
        assert_eq!(resolve(vec![upstream]), found());
    }

    #[test]
    fn server_that_is_not_there_is_passed_over() {
        let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert_eq!(resolve(vec![nobody, server(|question| vec![answer(question)])]), found());
        assert_eq!(resolve(vec![nobody]), Outcome::Failed);
        assert_eq!(resolve(vec![]), Outcome::Failed);
    }

    #[test]
    fn truncated_reply_is_asked_for_over_tcp() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let datagrams = UdpSocket::bind(address).unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 512];
            let (len, from) = datagrams.recv_from(&mut buffer).unwrap();
            let mut cut = answer(&buffer[..len]);
            cut[2] |= 2;
            datagrams.send_to(&cut, from).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            let mut len = [0; 2];
            stream.read_exact(&mut len).unwrap();
            let mut question = vec![0; u16::from_be_bytes(len).into()];
            stream.read_exact(&mut question).unwrap();
            let reply = answer(&question);
            // In two parts, to be put together again.
            let bytes = [&(reply.len() as u16).to_be_bytes()[..], &reply].concat();
            stream.write_all(&bytes[..5]).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            stream.write_all(&bytes[5..]).unwrap();
        });
        assert_eq!(resolve(vec![address]), found());
    }

    #[test]
    fn resolv_conf_names_its_servers() {
        let text =
            "# nameserver 9.9.9.9\nnameserver 1.1.1.1\nsearch x\nnameserver ::1\nnameserver y";
        let servers: Vec<String> = upstreams_of(text).iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["1.1.1.1:53", "[::1]:53"]);
    }
}
