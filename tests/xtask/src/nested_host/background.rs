//! `cargo xtask host`: keeps one nested host running, for frequent use.
//!
//! A separate process owns QEMU and hands out its ports through a Unix socket. Its state is one
//! folder for each checkout. A lock on a file there shows whether the process is alive; no crash
//! can leave a lock behind.

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::frame::{self, Kind};
use super::image::{self, Image, ImageError};
use super::{BOOT_DEADLINE, Clock, HostError, NestedHost, lock, session, shares};
use crate::sys::{self, READABLE, Waiting};
use crate::{checkout, progress, report};

/// How long a host may take to end.
const DOWN_DEADLINE: Duration = Duration::from_secs(10);

/// How long a client may take to send its request.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);

/// A host that no command has used for this long is paused until the next command.
const PAUSE_AFTER: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum BackgroundError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("cannot use {0}")]
    State(PathBuf, #[source] io::Error),
    #[error("cannot start the background process")]
    Start(#[source] io::Error),
    #[error("the background host did not come up; see {0}")]
    NotUp(PathBuf),
    #[error("the background host (process {0}) does not end")]
    NotDown(u32),
    #[error("a background host is starting just now")]
    Taken,
    #[error("cannot serve")]
    Serve(#[source] io::Error),
}

/// The state that the background process writes when it is ready.
#[derive(Debug, Serialize, Deserialize)]
pub struct State {
    pub pid: u32,
    pub qemu_pid: u32,
    /// Hosts with equal keys are interchangeable, and others are not.
    pub key: String,
}

/// The state folder of this checkout's background host.
struct Place(PathBuf);

impl Place {
    fn find() -> Self {
        let base = match env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
            Some(dir) if dir.is_dir() => dir.join("pvmm-nested-host"),
            _ if sys::is_root() => PathBuf::from("/run/pvmm-nested-host"),
            _ => env::temp_dir().join(format!("pvmm-nested-host-{}", sys::user_id())),
        };
        let name = image::short_hash([checkout::root().as_os_str().as_bytes()]);
        Place(base.join(name))
    }

    fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }

    fn state(&self) -> PathBuf {
        self.0.join("state.json")
    }

    /// Returns whether a background process is alive, ready or not.
    fn is_taken(&self) -> bool {
        File::open(self.lock())
            .is_ok_and(|lock| matches!(sys::lock(&lock, Duration::ZERO), Ok(false)))
    }

    /// Returns the state of the running host, if its process is alive and ready.
    fn living(&self) -> Option<State> {
        if !self.is_taken() {
            return None;
        }
        serde_json::from_slice(&fs::read(self.state()).ok()?).ok()
    }

    fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn log_path() -> PathBuf {
    checkout::root().join("target/nested-host.log")
}

/// Returns the key of the hosts that can serve this checkout: it covers the image, the version of
/// the frames and the shares.
fn key(image: &Image) -> Result<String, HostError> {
    let shares = shares()?;
    let version = frame::VERSION.to_le_bytes();
    let mut parts: Vec<&[u8]> = vec![image.key.as_bytes(), &version];
    parts.extend(shares.iter().map(|share| share.path.as_os_str().as_bytes()));
    Ok(image::short_hash(parts))
}

/// Connects to the background host, if one is up that fits this checkout.
pub fn connect(image: &Image) -> Option<UnixStream> {
    let place = Place::find();
    let state = place.living()?;
    if key(image).ok()? != state.key {
        return None;
    }
    UnixStream::connect(place.socket()).ok()
}

/// Starts the host unless a fitting one is up, and returns its state once it serves commands. A
/// host with another key is replaced.
pub fn up() -> Result<State, BackgroundError> {
    let image = image::prepare()?;
    let place = Place::find();
    if let Some(state) = place.living() {
        if state.key == key(&image)? {
            return Ok(state);
        }
        progress::step("the running host is of another make; replacing it");
        down()?;
    }
    progress::step("booting the nested host");
    let log_path = log_path();
    let log = File::create(&log_path).map_err(|e| BackgroundError::State(log_path.clone(), e))?;
    let mut command = Command::new(checkout::program().map_err(BackgroundError::Start)?);
    command.arg("nested-background").stdin(Stdio::null());
    command.stdout(log.try_clone().map_err(BackgroundError::Start)?).stderr(log);
    sys::new_session(&mut command);
    let mut child = command.spawn().map_err(BackgroundError::Start)?;
    let until = Instant::now() + BOOT_DEADLINE + DOWN_DEADLINE;
    while Instant::now() < until {
        if let Some(state) = place.living() {
            return Ok(state);
        }
        if !matches!(child.try_wait(), Ok(None)) {
            break;
        }
        thread::sleep(Duration::from_millis(100));
    }
    let _ = child.kill();
    Err(BackgroundError::NotUp(log_path))
}

/// Ends the host. Returns false if none was up.
pub fn down() -> Result<bool, BackgroundError> {
    let place = Place::find();
    let Some(state) = place.living() else {
        if place.is_taken() {
            return Err(BackgroundError::Taken);
        }
        place.remove();
        return Ok(false);
    };
    let _ = sys::kill(state.pid, libc::SIGTERM);
    let until = Instant::now() + DOWN_DEADLINE;
    while place.living().is_some() {
        if Instant::now() >= until {
            return Err(BackgroundError::NotDown(state.pid));
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(true)
}

/// Returns the state of the running host, whatever its key is.
pub fn status() -> Option<State> {
    Place::find().living()
}

/// Runs the background process: boots the host and serves commands, until it is told to end or the
/// host is lost.
pub fn serve() -> Result<(), BackgroundError> {
    let place = Place::find();
    let failed = |path: PathBuf| move |e| BackgroundError::State(path, e);
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&place.0)
        .map_err(failed(place.0.clone()))?;
    let lock = File::create(place.lock()).map_err(failed(place.lock()))?;
    // The lock is waited for, because a process that checks for a living host holds it for a
    // moment.
    if !sys::lock(&lock, Duration::from_secs(2)).map_err(failed(place.lock()))? {
        return Err(BackgroundError::Taken);
    }
    let _ = fs::remove_file(place.state());
    let _ = fs::remove_file(place.socket());
    let result = serve_locked(&place);
    place.remove();
    result
}

fn serve_locked(place: &Place) -> Result<(), BackgroundError> {
    let signals = sys::signals_as_bytes(&session::ENDING).map_err(BackgroundError::Serve)?;
    let image = image::prepare()?;
    let host = match NestedHost::boot(&image, &signals, Clock::Outer) {
        Err(HostError::Interrupted(_)) => return Ok(()),
        other => other?,
    };
    host.watch().map_err(BackgroundError::Serve)?;
    let qemu_ended = sys::pidfd(host.qemu_pid()).map_err(BackgroundError::Serve)?;
    let listener = UnixListener::bind(place.socket()).map_err(BackgroundError::Serve)?;
    let state = State { pid: std::process::id(), qemu_pid: host.qemu_pid(), key: key(&image)? };
    let failed = |e| BackgroundError::State(place.state(), e);
    let text = serde_json::to_vec(&state).map_err(|e| failed(e.into()))?;
    let temporary = place.state().with_extension("new");
    fs::write(&temporary, text).map_err(failed)?;
    fs::rename(&temporary, place.state()).map_err(failed)?;

    let free = Arc::new(Mutex::new((0..host.port_count()).collect::<BTreeSet<_>>()));
    let mut last_used = Some(Instant::now());
    loop {
        let [client, ended, signalled] = sys::poll(
            [
                Waiting { fd: Some(listener.as_fd()), events: READABLE },
                Waiting { fd: Some(qemu_ended.as_fd()), events: READABLE },
                Waiting { fd: Some(signals.as_fd()), events: READABLE },
            ],
            last_used.map(|_| PAUSE_AFTER / 4),
        )
        .map_err(BackgroundError::Serve)?;
        if ended != 0 {
            eprintln!("the nested host died or hung; its console ended with:\n{}", host.console());
            return Ok(());
        }
        if signalled != 0 {
            return Ok(());
        }
        if client != 0
            && let Ok((client, _)) = listener.accept()
        {
            if last_used.is_none() {
                host.resume().map_err(BackgroundError::Serve)?;
            }
            last_used = Some(Instant::now());
            if let Err(e) = hand_out(&host, &free, client) {
                eprintln!("{}", report::chain(&e));
            }
        }
        if lock(&free).len() < host.port_count() {
            last_used = Some(Instant::now());
        }
        if last_used.is_some_and(|at| at.elapsed() >= PAUSE_AFTER) {
            host.pause().map_err(BackgroundError::Serve)?;
            last_used = None;
        }
    }
}

fn hand_out(
    host: &NestedHost,
    free: &Arc<Mutex<BTreeSet<usize>>>,
    client: UnixStream,
) -> io::Result<()> {
    let taken = lock(free).pop_first();
    // Without an answer the client boots its own host.
    let Some(index) = taken else { return Err(io::Error::other("all ports are in use")) };
    let port = host.port(index)?;
    let free = Arc::clone(free);
    thread::Builder::new().name(format!("client-{index}")).spawn(move || {
        match relay(client, port) {
            Ok(()) => drop(lock(&free).insert(index)),
            // The frames are out of step, so the port is not used again.
            Err(e) => eprintln!("port {index} is lost: {e}"),
        }
    })?;
    Ok(())
}

/// Relays the frames of one command in both directions. When it returns, the port is between two
/// commands, whatever the client did. Fails if the port is lost.
fn relay(client: UnixStream, port: UnixStream) -> io::Result<()> {
    let (mut from_client, mut to_port) = (client.try_clone()?, port.try_clone()?);
    // The port does not answer before the client's request, because nothing has been started.
    from_client.set_read_timeout(Some(OPEN_DEADLINE))?;
    let Ok(Some(open)) = frame::read(&mut from_client) else { return Ok(()) };
    if open.kind != Kind::Open {
        return Ok(());
    }
    from_client.set_read_timeout(None)?;
    let mut bytes = Vec::new();
    frame::encode(&mut bytes, open.kind, &open.payload);
    to_port.write_all(&bytes)?;

    let upward = thread::Builder::new().name("from-client".into()).spawn(move || {
        let mut bytes = Vec::new();
        while let Ok(Some(frame)) = frame::read(&mut from_client) {
            bytes.clear();
            frame::encode(&mut bytes, frame.kind, &frame.payload);
            to_port.write_all(&bytes)?;
        }
        bytes.clear();
        frame::encode(&mut bytes, Kind::HangUp, &[]);
        to_port.write_all(&bytes)
    })?;
    let (mut client, mut port) = (client, port);
    let mut bytes = Vec::new();
    loop {
        let Some(frame) = frame::read(&mut port)? else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        bytes.clear();
        frame::encode(&mut bytes, frame.kind, &frame.payload);
        // If the client is gone, the other direction tells the host.
        let _ = client.write_all(&bytes);
        if frame.kind == Kind::Exit {
            break;
        }
    }
    let _ = client.shutdown(std::net::Shutdown::Both);
    upward.join().map_err(|_| io::Error::other("the other direction failed"))?
}
