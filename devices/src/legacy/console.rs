//! Carries guest output to the host: a bounded buffer and a thread that empties it.
//!
//! The thread may block on its target for ever; a caller of `push` never blocks. What does not fit
//! is dropped and counted. The target's file descriptor keeps its blocking mode, because a terminal
//! shares that with the shell. The thread starts with the first byte: most restored guests never
//! print one.

use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::ThreadEntry;
use crate::rate_limiter::{BucketConfig, Cost, RateLimiter, RateLimiterConfig};

// How long dropping a console waits for a target that accepts nothing.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);
// How soon a full target in non-blocking mode is tried again.
const RETRY: Duration = Duration::from_millis(5);

/// The capacity and rate limit of a console.
#[derive(Clone, Copy, Debug)]
pub struct ConsoleConfig {
    pub capacity_bytes: usize,
    /// The rate limit of the guest's output; output beyond it is dropped.
    pub limit: Option<BucketConfig>,
}

impl Default for ConsoleConfig {
    fn default() -> Self {
        Self { capacity_bytes: 64 << 10, limit: None }
    }
}

/// A buffer of guest output on its way to the host.
pub struct Console {
    pipe: Arc<Pipe>,
}

/// The writing end of a console. Clones write into one buffer.
#[derive(Clone)]
pub struct ConsoleInput {
    pipe: Arc<Pipe>,
}

struct Pipe {
    config: ConsoleConfig,
    state: Mutex<ConsoleState>,
    changed: Condvar,
    dropped: AtomicU64,
    /// The part of `dropped` that the limit caused.
    limited: AtomicU64,
}

struct ConsoleState {
    /// The host output, until the thread takes it.
    target: Option<Box<dyn Write + Send>>,
    thread: Option<JoinHandle<()>>,
    bytes: Vec<u8>,
    limiter: RateLimiter,
    closed: bool,
    ended: bool,
}

impl Console {
    /// Creates a console that writes to `target` on the thread `pvmm-console`.
    pub fn new(target: Box<dyn Write + Send>, config: ConsoleConfig) -> Self {
        let state = ConsoleState {
            target: Some(target),
            thread: None,
            bytes: Vec::new(),
            limiter: RateLimiter::new(&RateLimiterConfig { bytes: config.limit, ops: None }),
            closed: false,
            ended: false,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let (dropped, limited) = Default::default();
        Self { pipe: Arc::new(Pipe { config, state, changed, dropped, limited }) }
    }

    pub fn input(&self) -> ConsoleInput {
        ConsoleInput { pipe: self.pipe.clone() }
    }

    /// Starts the thread now, with `entry` as its first step. A thread would otherwise be started
    /// by the vCPU that prints the first byte, which a confined vCPU may not do. Does nothing if
    /// the thread was started before.
    pub fn start(&self, entry: ThreadEntry) -> io::Result<()> {
        let mut state = self.pipe.lock();
        if let Some(target) = state.target.take() {
            state.bytes.reserve_exact(self.pipe.config.capacity_bytes);
            let pipe = self.pipe.clone();
            state.thread = Some(spawn(move || match entry() {
                Ok(()) => pipe.drain(target),
                Err(error) => {
                    log::error!("console thread ends: {error}");
                    pipe.end();
                }
            })?);
        }
        Ok(())
    }

    /// Returns the number of bytes that never reached the target.
    pub fn dropped_bytes(&self) -> u64 {
        self.pipe.dropped.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that never reached the target because of the limit.
    pub fn limited_bytes(&self) -> u64 {
        self.pipe.limited.load(Ordering::Relaxed)
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let mut state = self.pipe.lock();
        state.closed = true;
        let Some(thread) = state.thread.take() else { return };
        self.pipe.changed.notify_all();
        let waited = self.pipe.changed.wait_timeout_while(state, CLOSE_DEADLINE, |s| !s.ended);
        let ended = waited.map_or_else(|e| e.into_inner().0.ended, |(state, _)| state.ended);
        // A thread that is still blocked on its target is left until the process ends.
        if ended && thread.join().is_err() {
            log::error!("console thread panicked");
        }
    }
}

impl ConsoleInput {
    /// Takes what fits and drops the rest.
    pub fn push(&self, bytes: &[u8]) {
        let mut state = self.pipe.lock();
        if !state.limiter.admit(Cost { bytes: bytes.len() as u64, ops: 0 }) {
            self.pipe.limited.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            self.pipe.count_dropped(bytes.len());
            return;
        }
        let capacity = self.pipe.config.capacity_bytes;
        let begins = !bytes.is_empty() && !state.closed;
        if let Some(target) = state.target.take_if(|_| begins) {
            state.bytes.reserve_exact(capacity);
            match self.drain_to(target) {
                Ok(thread) => state.thread = Some(thread),
                Err(error) => {
                    log::error!("cannot start the console's thread: {error}");
                    state.closed = true;
                }
            }
        }
        let room = if state.closed { 0 } else { capacity.saturating_sub(state.bytes.len()) };
        let taken = bytes.get(..room).unwrap_or(bytes);
        if state.bytes.is_empty() && !taken.is_empty() {
            self.pipe.changed.notify_all();
        }
        state.bytes.extend_from_slice(taken);
        drop(state);
        self.pipe.count_dropped(bytes.len() - taken.len());
    }

    fn drain_to(&self, target: Box<dyn Write + Send>) -> io::Result<JoinHandle<()>> {
        let pipe = self.pipe.clone();
        spawn(move || pipe.drain(target))
    }
}

fn spawn(live: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("pvmm-console".into()).stack_size(crate::STACK_BYTES).spawn(live)
}

/// Always succeeds: a serial port cannot report that its output goes nowhere.
impl Write for ConsoleInput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, ConsoleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_dropped(&self, bytes: usize) {
        self.dropped.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn drain(&self, mut target: Box<dyn Write + Send>) {
        // Swapped with the shared buffer, so that the lock is held only briefly.
        let mut batch = Vec::with_capacity(self.config.capacity_bytes);
        let mut broken = false;
        loop {
            let state = self.lock();
            let state = self.changed.wait_while(state, |s| s.bytes.is_empty() && !s.closed);
            let mut state = state.unwrap_or_else(PoisonError::into_inner);
            if state.bytes.is_empty() {
                break;
            }
            std::mem::swap(&mut state.bytes, &mut batch);
            drop(state);
            let written = if broken { 0 } else { self.write(&mut *target, &batch) };
            broken |= written < batch.len();
            self.count_dropped(batch.len() - written);
            batch.clear();
        }
        // An error cannot be reported from here.
        let _ = target.flush();
        drop(target);
        self.end();
    }

    /// Notes that the thread ends. Output that comes later is dropped.
    fn end(&self) {
        let mut state = self.lock();
        (state.closed, state.ended) = (true, true);
        self.changed.notify_all();
    }

    /// Writes as much as the target accepts. Returns less than all if the target is broken.
    fn write(&self, target: &mut dyn Write, batch: &[u8]) -> usize {
        let mut done = 0;
        while let Some(rest @ [_, ..]) = batch.get(done..) {
            match target.write(rest) {
                Ok(0) => return done,
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.sleep(RETRY) {
                        return done;
                    }
                }
                Err(_) => return done,
            }
        }
        // A target that buffers, such as standard output, must show the output now.
        let _ = target.flush();
        done
    }

    /// Sleeps for `duration` or until the console is closed. Returns true if it was closed.
    fn sleep(&self, duration: Duration) -> bool {
        let slept = self.changed.wait_timeout_while(self.lock(), duration, |s| !s.closed);
        slept.map_or_else(|e| e.into_inner().0.closed, |(state, _)| state.closed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver, Sender};
    use std::time::Instant;

    use super::*;

    /// A target that sends what it gets to a channel, and waits for a permit before each write if
    /// it has permits.
    struct Target {
        sent: Sender<Vec<u8>>,
        permits: Option<Receiver<()>>,
    }

    impl Write for Target {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if let Some(permits) = &self.permits {
                permits.recv().map_err(|_| ErrorKind::BrokenPipe)?;
            }
            self.sent.send(bytes.to_vec()).map_err(|_| ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn console(permits: Option<Receiver<()>>) -> (Console, Receiver<Vec<u8>>) {
        let (sent, received) = mpsc::channel();
        let target = Box::new(Target { sent, permits });
        (Console::new(target, ConsoleConfig::default()), received)
    }

    #[test]
    fn output_arrives_complete_and_in_order_when_the_console_ends() {
        let (console, received) = console(None);
        (0..=255).for_each(|byte| console.input().push(&[byte]));
        drop(console);
        let all: Vec<u8> = received.iter().flatten().collect();
        assert_eq!(all, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn console_without_output_has_no_thread_and_one_that_ended_takes_nothing() {
        let (console, received) = console(None);
        let input = console.input();
        input.push(b"");
        assert!(console.pipe.lock().thread.is_none());
        drop(console);
        input.push(b"late");
        assert_eq!(input.pipe.dropped.load(Ordering::Relaxed), 4);
        assert!(input.pipe.lock().thread.is_none());
        drop(input);
        assert_eq!(received.iter().count(), 0);
    }

    #[test]
    fn f1_flood_of_100_mb_is_dropped_and_counted_in_a_fixed_buffer() {
        let (permits, blocked) = mpsc::channel();
        let (console, received) = console(Some(blocked));
        let chunk = [b'x'; 64 << 10];
        let total = 1600 * chunk.len() as u64;
        (0..1600).for_each(|_| console.input().push(&chunk));
        assert!(console.dropped_bytes() >= total - 2 * chunk.len() as u64);
        assert_eq!(console.pipe.lock().bytes.capacity(), chunk.len());
        (0..16).for_each(|_| permits.send(()).unwrap());
        let dropped = console.dropped_bytes();
        drop(console);
        let arrived = received.iter().map(|bytes| bytes.len() as u64).sum::<u64>();
        assert_eq!(arrived + dropped, total);
    }

    #[test]
    fn f1_output_beyond_the_limit_is_dropped_and_counted() {
        let (sent, received) = mpsc::channel();
        // So slow that nothing is refilled while the test runs.
        let limit = BucketConfig { size: 100, one_time_burst: 50, refill_time_ms: 1 << 26 };
        let config = ConsoleConfig { limit: Some(limit), ..ConsoleConfig::default() };
        let console = Console::new(Box::new(Target { sent, permits: None }), config);
        (0..1000).for_each(|_| console.input().push(b"x"));
        assert_eq!((console.limited_bytes(), console.dropped_bytes()), (850, 850));
        drop(console);
        assert_eq!(received.iter().map(|bytes| bytes.len()).sum::<usize>(), 150);
    }

    #[test]
    fn f3_blocked_target_holds_up_neither_the_guest_nor_the_end() {
        let (_permits, blocked) = mpsc::channel();
        let (console, _received) = console(Some(blocked));
        let start = Instant::now();
        (0..100_000).for_each(|_| console.input().push(b"."));
        drop(console);
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn f3_closed_target_counts_everything_as_dropped() {
        let (console, received) = console(None);
        drop(received);
        console.input().push(b"gone");
        let start = Instant::now();
        while console.dropped_bytes() < 4 && start.elapsed() < Duration::from_secs(10) {
            thread::yield_now();
        }
        assert_eq!(console.dropped_bytes(), 4);
    }

    #[test]
    fn f3_full_target_in_non_blocking_mode_is_tried_again() {
        struct Sometimes(u32, Sender<u8>);
        impl Write for Sometimes {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 += 1;
                match self.0 % 3 {
                    0 => self.1.send(bytes[0]).map(|()| 1).map_err(io::Error::other),
                    1 => Err(ErrorKind::WouldBlock.into()),
                    _ => Err(ErrorKind::Interrupted.into()),
                }
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (sent, received) = mpsc::channel();
        let target = Box::new(Sometimes(0, sent));
        let console = Console::new(target, ConsoleConfig::default());
        console.input().push(b"abc");
        let arrived: Vec<u8> =
            (0..3).map(|_| received.recv_timeout(Duration::from_secs(10)).unwrap()).collect();
        assert_eq!(arrived, b"abc");
    }
}
