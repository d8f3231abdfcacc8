//! One socket shared by many streams: a lock to write, one thread that reads.
//!
//! The thread only sorts frames into their streams, so that no slow caller can delay others.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pvmm_devices::STACK_BYTES;
use pvmm_guest_agent::frame::{Frame, HEADER_LEN};
use pvmm_guest_agent::message::{Goodbye, Request, Welcome};
use pvmm_guest_agent::{Decoder, Kind, decode, encode};

use super::error::{AgentError, Lost};
use super::stream::Stream;

/// The time limit of a write that the agent does not accept: as long as it may be silent. A guest
/// among many on one processor can stand still for a while.
const WRITE_STALL: Duration = PING_AFTER.saturating_add(PONG_TIME);
/// After this long without a frame, a waiting caller sends a ping.
const PING_AFTER: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 10_000 });
/// The connection is lost when no frame follows a ping for this long.
const PONG_TIME: Duration = Duration::from_millis(if cfg!(test) { 2_000 } else { 50_000 });
/// Read sizes: the first one, and the one after a large read. Most connections never need the pages
/// of the larger buffer.
const READ_BYTES: [usize; 2] = [4 << 10, 128 << 10];

/// Locks a mutex, also after a panic of another thread: every value here is valid between any two
/// statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection to an agent. Dropping it closes the socket and joins the reader thread.
pub struct Connection {
    shared: Arc<ConnectionState>,
    reader: Mutex<Option<JoinHandle<()>>>,
    welcome: Welcome,
}

/// The state that the reader thread shares with the callers.
pub(super) struct ConnectionState {
    socket: UnixStream,
    writer: Mutex<Writer>,
    streams: Mutex<Streams>,
    ignored: AtomicU64,
    epoch: Instant,
    /// The time of the last received frame, in milliseconds after `epoch`.
    heard: AtomicU64,
    /// The time of the last request, in milliseconds after `epoch`.
    asked: AtomicU64,
    /// The time of the last ping, in milliseconds after `epoch`.
    pinged: AtomicU64,
}

struct Writer {
    next_stream: u32,
    buffer: Vec<u8>,
}

#[derive(Default)]
struct Streams {
    open: BTreeMap<u32, Arc<Stream>>,
    lost: Option<Lost>,
}

impl Connection {
    pub const FIRST_STREAM: u32 = 1;

    pub fn new(socket: UnixStream, welcome: Welcome) -> Result<Arc<Self>, AgentError> {
        socket.set_read_timeout(None).map_err(AgentError::Socket)?;
        socket.set_write_timeout(Some(WRITE_STALL)).map_err(AgentError::Socket)?;
        let shared = ConnectionState {
            socket,
            writer: Mutex::new(Writer { next_stream: Self::FIRST_STREAM, buffer: Vec::new() }),
            streams: Mutex::default(),
            ignored: AtomicU64::new(0),
            epoch: Instant::now(),
            heard: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            pinged: AtomicU64::new(0),
        };
        Ok(Arc::new(Self { shared: Arc::new(shared), reader: Mutex::new(None), welcome }))
    }

    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    pub fn ignored_frames(&self) -> u64 {
        self.shared.ignored.load(Ordering::Relaxed)
    }

    /// Opens a stream with a request.
    pub fn open(&self, request: &Request) -> Result<Arc<Stream>, AgentError> {
        self.start_reader()?;
        self.shared.open(request)
    }

    /// Returns the first stream, whose request was sent together with the hello. Must be called
    /// before any `open`.
    pub fn first_stream(&self) -> Result<Arc<Stream>, AgentError> {
        let stream = Arc::new(Stream::new(Self::FIRST_STREAM));
        lock(&self.shared.writer).next_stream = Self::FIRST_STREAM + 1;
        lock(&self.shared.streams).open.insert(Self::FIRST_STREAM, Arc::clone(&stream));
        self.start_reader()?;
        Ok(stream)
    }

    /// Sends bytes that are whole frames.
    pub fn send(&self, parts: &[&[u8]]) -> Result<(), Lost> {
        let mut writer = lock(&self.shared.writer);
        self.shared.write(&mut writer, parts)
    }

    /// Forgets a stream; later frames for it are ignored.
    pub fn forget(&self, stream: u32) {
        lock(&self.shared.streams).open.remove(&stream);
    }

    /// Checks the liveness of the agent for a waiting caller: sends a ping, or declares the
    /// connection lost. Returns how long the caller may sleep until it must call again.
    pub fn look_after(&self) -> Duration {
        let shared = &self.shared;
        let now = shared.now();
        let heard = shared.heard.load(Ordering::Relaxed);
        let pinged = shared.pinged.load(Ordering::Relaxed);
        if pinged > heard {
            if now.saturating_sub(pinged) >= PONG_TIME.as_millis() as u64 {
                shared.lose(Lost::Silent);
            }
        } else if now.saturating_sub(heard.max(shared.asked.load(Ordering::Relaxed)))
            >= PING_AFTER.as_millis() as u64
        {
            shared.pinged.store(now, Ordering::Relaxed);
            // Any frame proves that the agent lives, so the answer itself is not awaited.
            let _ = shared.open(&Request::Ping {});
        }
        PING_AFTER / 4
    }

    fn start_reader(&self) -> Result<(), AgentError> {
        let mut reader = lock(&self.reader);
        if reader.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("pvmm-agent".into());
            let thread = thread.stack_size(STACK_BYTES);
            *reader = Some(thread.spawn(move || shared.read()).map_err(AgentError::Socket)?);
        }
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.lose(Lost::Dropped);
        if let Some(reader) = lock(&self.reader).take() {
            // The thread ends with the socket; a panic in it has been turned into a lost
            // connection.
            let _ = reader.join();
        }
    }
}

impl ConnectionState {
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    fn open(&self, request: &Request) -> Result<Arc<Stream>, AgentError> {
        let mut frame = Vec::new();
        encode(&mut frame, Kind::Open, 1, request).map_err(AgentError::Encode)?;
        let mut writer = lock(&self.writer);
        let number = writer.next_stream;
        // One connection has four billion stream numbers; a new connection starts again.
        writer.next_stream = number.checked_add(1).ok_or(AgentError::TooMany)?;
        frame[4..8].copy_from_slice(&number.to_le_bytes());
        let stream = Arc::new(Stream::new(number));
        let mut streams = lock(&self.streams);
        if let Some(lost) = streams.lost {
            return Err(AgentError::Lost(lost));
        }
        streams.open.insert(number, Arc::clone(&stream));
        drop(streams);
        self.asked.store(self.now(), Ordering::Relaxed);
        self.write(&mut writer, &[&frame]).map_err(AgentError::Lost)?;
        Ok(stream)
    }

    fn write(&self, writer: &mut Writer, parts: &[&[u8]]) -> Result<(), Lost> {
        if let Some(lost) = lock(&self.streams).lost {
            return Err(lost);
        }
        writer.buffer.clear();
        parts.iter().for_each(|part| writer.buffer.extend_from_slice(part));
        (&self.socket).write_all(&writer.buffer).map_err(|e| {
            // A part of a frame may have been sent, so nothing can follow it.
            let stalled = e.kind() == io::ErrorKind::WouldBlock;
            self.lose(if stalled { Lost::Stalled } else { Lost::Closed })
        })
    }

    /// Ends the connection for all streams and returns the reason. The first reason is kept.
    fn lose(&self, why: Lost) -> Lost {
        let mut streams = lock(&self.streams);
        let why = *streams.lost.get_or_insert(why);
        let open = std::mem::take(&mut streams.open);
        drop(streams);
        let _ = self.socket.shutdown(Shutdown::Both);
        open.values().for_each(|stream| stream.lose(why));
        why
    }

    /// Runs the reader thread.
    fn read(&self) {
        let mut decoder = Decoder::default();
        let [little, much] = READ_BYTES;
        let mut buffer = vec![0; little];
        let why = loop {
            let count = match (&self.socket).read(&mut buffer) {
                Ok(0) => break Lost::Closed,
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break Lost::Closed,
            };
            if let Err(why) = self.take_bytes(&mut decoder, &buffer[..count]) {
                break why;
            }
            if count == little {
                buffer.resize(much, 0);
            }
        };
        self.lose(why);
    }

    fn take_bytes(&self, decoder: &mut Decoder, mut bytes: &[u8]) -> Result<(), Lost> {
        loop {
            match decoder.next(&mut bytes) {
                Ok(Some(frame)) => self.take_frame(frame)?,
                Ok(None) => return Ok(()),
                Err(_) => return Err(Lost::Protocol("a malformed frame")),
            }
        }
    }

    fn take_frame(&self, frame: Frame<'_>) -> Result<(), Lost> {
        self.heard.store(self.now(), Ordering::Relaxed);
        match frame.header.kind {
            Kind::Goodbye => {
                let goodbye: Goodbye =
                    decode(frame.payload).map_err(|_| Lost::Protocol("a malformed goodbye"))?;
                return Err(Lost::Goodbye(goodbye.code));
            }
            Kind::Started | Kind::Data | Kind::Credit | Kind::Done => {}
            Kind::Extension(_) => {
                self.ignored.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            _ => return Err(Lost::Protocol("a frame that only a client sends")),
        }
        let number = frame.header.stream;
        let stream = lock(&self.streams).open.get(&number).cloned();
        let Some(stream) = stream else {
            self.ignored.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        if !stream.take(frame)? {
            self.ignored.fetch_add(1, Ordering::Relaxed);
        }
        if frame.header.kind == Kind::Done {
            lock(&self.streams).open.remove(&number);
        }
        Ok(())
    }
}

const _: () = assert!(HEADER_LEN == 12, "open() writes the stream number at bytes 4..8");
