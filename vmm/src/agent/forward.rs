//! Forwards a host port to a port in the guest: accept, connect through the agent, copy both ways.
//!
//! Each client has its own stream with its own window, so a slow client delays nobody else.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, PipeWriter, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::connection::lock;
use super::error::AgentError;
use super::{Agent, GuestTcpReader, GuestTcpWriter};
use crate::sys::{reset_on_close, wait_either};

/// The most clients that one forward serves at once; more wait in the listener's queue. The limit
/// leaves streams of the agent's connection for other requests.
const MAX_CLIENTS: usize = 768;
/// The stack size of the copying threads, which need little and may be many.
const STACK_BYTES: usize = 128 << 10;
const CHUNK: usize = 32 << 10;
/// The pause after an accept that failed for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Called for a client whose connection to the guest failed.
type OnRefused = Box<dyn Fn(&AgentError) + Send + Sync>;

impl Agent {
    /// Forwards every connection to `listener` to `guest_port` on the guest's loopback, until the
    /// `Forward` is dropped. A client whose connection the guest refuses is reset, and `on_refused`
    /// is called with the reason.
    pub fn forward(
        &self,
        listener: TcpListener,
        guest_port: u16,
        on_refused: impl Fn(&AgentError) + Send + Sync + 'static,
    ) -> Result<Forward, AgentError> {
        if guest_port == 0 {
            return Err(AgentError::InvalidRequest { field: "guest_port", why: "is 0" });
        }
        let address = listener.local_addr().map_err(AgentError::Socket)?;
        listener.set_nonblocking(true).map_err(AgentError::Socket)?;
        let (told_to_stop, stop) = io::pipe().map_err(AgentError::Socket)?;
        let shared = Arc::new(ForwardState {
            agent: self.clone(),
            guest_port,
            on_refused: Box::new(on_refused),
            clients: Mutex::default(),
            changed: Condvar::new(),
        });
        let acceptor = Acceptor { shared: Arc::clone(&shared), listener, stop: told_to_stop };
        let thread = thread::Builder::new().name("pvmm-forward".into()).stack_size(STACK_BYTES);
        let accepting = thread.spawn(move || acceptor.run()).map_err(AgentError::Socket)?;
        Ok(Forward { address, shared, stop: Some(stop), accepting: Some(accepting) })
    }
}

/// A forwarded port. Dropping it ends every connection through it and waits for its threads.
pub struct Forward {
    address: SocketAddr,
    shared: Arc<ForwardState>,
    stop: Option<PipeWriter>,
    accepting: Option<JoinHandle<()>>,
}

impl Forward {
    /// Returns the address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of open connections.
    pub fn clients(&self) -> usize {
        lock(&self.shared.clients).open.len()
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        lock(&self.shared.clients).closing = true;
        self.shared.changed.notify_all();
        drop(self.stop.take());
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        let mut clients = lock(&self.shared.clients);
        for client in clients.open.values() {
            client.end();
        }
        while !clients.open.is_empty() {
            clients = match self.shared.changed.wait(clients) {
                Ok(clients) => clients,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }
}

/// The state that the threads of one forward share.
struct ForwardState {
    agent: Agent,
    guest_port: u16,
    on_refused: OnRefused,
    clients: Mutex<Clients>,
    changed: Condvar,
}

#[derive(Default)]
struct Clients {
    open: BTreeMap<u64, Client>,
    next: u64,
    closing: bool,
}

/// The handles that end the connection of a client.
struct Client {
    socket: Arc<TcpStream>,
    guest: Option<Arc<GuestTcpWriter>>,
}

impl Client {
    fn end(&self) {
        reset_on_close(&self.socket);
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(guest) = &self.guest {
            guest.close();
        }
    }
}

struct Acceptor {
    shared: Arc<ForwardState>,
    listener: TcpListener,
    stop: io::PipeReader,
}

impl Acceptor {
    fn run(self) {
        while self.has_room() {
            // The forward holds the only writer: the pipe ends when the forward is dropped.
            if !matches!(wait_either(&self.listener, &self.stop, None), Ok((true, _))) {
                return;
            }
            match self.listener.accept() {
                Ok((socket, _)) => self.admit(socket),
                Err(e)
                    if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {
                }
                Err(_) => thread::sleep(ACCEPT_PAUSE),
            }
        }
    }

    /// Waits until another client may be served; returns false when the forward is closing.
    fn has_room(&self) -> bool {
        let mut clients = lock(&self.shared.clients);
        while !clients.closing && clients.open.len() >= MAX_CLIENTS {
            clients = match self.shared.changed.wait(clients) {
                Ok(clients) => clients,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
        !clients.closing
    }

    fn admit(&self, socket: TcpStream) {
        if socket.set_nonblocking(false).is_err() {
            return;
        }
        let _ = socket.set_nodelay(true);
        let socket = Arc::new(socket);
        let mut clients = lock(&self.shared.clients);
        let id = clients.next;
        clients.next += 1;
        clients.open.insert(id, Client { socket: Arc::clone(&socket), guest: None });
        drop(clients);
        let place = Place { shared: Arc::clone(&self.shared), id };
        let thread = thread::Builder::new().name("pvmm-forward".into()).stack_size(STACK_BYTES);
        // If no thread starts, the place is released and the client sees the connection close.
        let _ = thread.spawn(move || place.serve(&socket));
    }
}

/// The place of a client among those that are served; released when it is dropped.
struct Place {
    shared: Arc<ForwardState>,
    id: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.shared.clients).open.remove(&self.id);
        self.shared.changed.notify_all();
    }
}

impl Place {
    fn serve(self, client: &TcpStream) {
        let (from_guest, to_guest) = match self.shared.agent.connect_tcp(self.shared.guest_port) {
            Ok(guest) => guest.split(),
            Err(error) => {
                (self.shared.on_refused)(&error);
                return reset_on_close(client);
            }
        };
        let to_guest = Arc::new(to_guest);
        {
            let mut clients = lock(&self.shared.clients);
            if clients.closing {
                return reset_on_close(client);
            }
            if let Some(entry) = clients.open.get_mut(&self.id) {
                entry.guest = Some(Arc::clone(&to_guest));
            }
        }
        thread::scope(|scope| {
            let writing = thread::Builder::new()
                .name("pvmm-forward".into())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, || upload(client, &to_guest));
            match writing {
                Ok(_) => download(from_guest, client, &to_guest),
                Err(_) => {
                    reset_on_close(client);
                    to_guest.close();
                }
            }
        });
    }
}

/// Copies what the client sends until one side ends.
fn upload(mut client: &TcpStream, mut guest: &GuestTcpWriter) {
    let mut buffer = vec![0; CHUNK];
    loop {
        match client.read(&mut buffer) {
            Ok(0) => return drop(guest.shutdown()),
            Ok(count) => {
                if guest.write_all(&buffer[..count]).is_err() {
                    // The client notices as with any server that stops reading.
                    return drop(client.shutdown(Shutdown::Read));
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            // The client is gone, so its connection in the guest is closed, too.
            Err(_) => return guest.close(),
        }
    }
}

/// Copies what the guest sends until one side ends.
fn download(mut from: GuestTcpReader, mut client: &TcpStream, to_guest: &GuestTcpWriter) {
    loop {
        match from.next_chunk() {
            Ok(chunk) if chunk.is_empty() => return drop(client.shutdown(Shutdown::Write)),
            Ok(chunk) => {
                if client.write_all(&chunk).is_err() {
                    to_guest.close();
                    return drop(client.shutdown(Shutdown::Both));
                }
            }
            Err(_) => {
                // A reset in the guest becomes a reset here; the shutdown wakes the other
                // direction.
                reset_on_close(client);
                return drop(client.shutdown(Shutdown::Read));
            }
        }
    }
}
