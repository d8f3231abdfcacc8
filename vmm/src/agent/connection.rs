//! One socket shared by many streams: a lock to write, one thread that reads.
//! The thread only files what came under its stream, so that no slow caller can hold others up.

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

/// How long the agent may leave a write of ours standing.
const WRITE_STALL: Duration = Duration::from_secs(10);
/// After this long without a frame, somebody who waits asks for a sign of life.
const PING_AFTER: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 10_000 });
/// And gives the agent up when none comes for this long.
const PONG_TIME: Duration = Duration::from_millis(if cfg!(test) { 2_000 } else { 50_000 });
/// What is read at once, while there is little to read and once there was more: most connections never need
/// the pages of the larger.
const READ_BYTES: [usize; 2] = [4 << 10, 128 << 10];

/// Locks, also after a panic elsewhere: every value here is valid between any two statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The connection; dropping it closes the socket and joins the reader.
pub struct Connection {
    shared: Arc<Shared>,
    reader: Mutex<Option<JoinHandle<()>>>,
    welcome: Welcome,
}

/// What the reader thread shares with the callers.
pub(super) struct Shared {
    socket: UnixStream,
    writer: Mutex<Writer>,
    streams: Mutex<Streams>,
    ignored: AtomicU64,
    epoch: Instant,
    /// Milliseconds after `epoch` when the last frame came.
    heard: AtomicU64,
    /// When the last request was sent, likewise.
    asked: AtomicU64,
    /// When the last ping was sent, likewise.
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
        let shared = Shared {
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

    /// The first stream, whose request travelled with the hello. To be called before any `open`.
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

    /// No frame for this stream is awaited any more.
    pub fn forget(&self, stream: u32) {
        lock(&self.shared.streams).open.remove(&stream);
    }

    /// Sees to it that somebody who waits learns of the agent's death; how long to sleep until
    /// this must be called again.
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
            // Its answer is a frame, and that is all that is wanted of it.
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
            // It ends with the socket; a panic in it has been turned into a lost connection.
            let _ = reader.join();
        }
    }
}

impl Shared {
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    fn open(&self, request: &Request) -> Result<Arc<Stream>, AgentError> {
        let mut frame = Vec::new();
        encode(&mut frame, Kind::Open, 1, request).map_err(AgentError::Encode)?;
        let mut writer = lock(&self.writer);
        let number = writer.next_stream;
        // Four thousand million requests on one connection are enough: a new one starts afresh.
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
            // Half a frame may be on its way, so nothing can follow it.
            let stalled = e.kind() == io::ErrorKind::WouldBlock;
            self.lose(if stalled { Lost::Stalled } else { Lost::Closed })
        })
    }

    /// Ends the connection for everybody; the first reason stays.
    fn lose(&self, why: Lost) -> Lost {
        let mut streams = lock(&self.streams);
        let why = *streams.lost.get_or_insert(why);
        let open = std::mem::take(&mut streams.open);
        drop(streams);
        let _ = self.socket.shutdown(Shutdown::Both);
        open.values().for_each(|stream| stream.lose(why));
        why
    }

    /// The reader thread.
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
