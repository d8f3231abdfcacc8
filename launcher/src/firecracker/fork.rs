//! Forks through the API: the VM is frozen for a moment, and other processes continue from that
//! state.
//!
//! The forked process starts no children itself: it listens on a socket, so that the client can
//! start each child in its own jail, network namespace and control group. Memory and disks are
//! passed as open files and shared copy-on-write; the forked VM keeps running. In the children the
//! workload stays frozen until the agent has refreshed each: new random numbers, clock and ids.
//! Without an agent a fork is refused, unless the request asks for no refresh.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pvmm::agent::FreezeOptions;
use pvmm::{Kvm, Overrides, Template, ThreadFilters};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::before_boot::drive_config;
use super::bodies::{Fork, ForkLoad, RefreshBy, Serial};
use super::http::Refusal;
use super::running::{Running, refuse};
use super::snapshot::{self, Changes};
use pvmm_sandbox::sys::{passing, poll};

/// How long the socket accepts children, and how long one child may take to receive its data.
const OPEN: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(10);
/// The most children of one fork, and the most forks that wait for children at once.
const CHILDREN_MAX: u32 = 1000;
const WAITING_MAX: usize = 16;
/// The longest head and the longest payload that a child accepts.
const HEAD_MAX: usize = 64 << 10;
const REST_MAX: u64 = 32 << 20;

static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The first line of the stream, sent with the files: the lengths of the two parts that follow.
#[derive(Serialize, Deserialize)]
struct Head {
    config_bytes: u64,
    template_bytes: u64,
}

/// A frozen VM in the form in which each child receives it: a byte stream and open files.
struct Offer {
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

/// Freezes the VM and serves its state to children on a background thread.
pub fn fork(running: &mut Running, wish: &Fork) -> Result<Value, Refusal> {
    let children = wish.children.unwrap_or(1);
    if !(1..=CHILDREN_MAX).contains(&children) {
        return Err(Refusal::bad(format!("fork: children must be 1 to {CHILDREN_MAX}.")));
    }
    if WAITING.load(Ordering::Relaxed) >= WAITING_MAX {
        return Err(Refusal::bad("fork: too many forks wait for their children; try again later."));
    }
    let refuse_socket =
        |error: io::Error| Refusal::bad(format!("fork: socket {:?}: {error}", wish.socket));
    // Every process that connects gets the guest's memory.
    let listener = pvmm::listen_privately(&wish.socket).map_err(refuse_socket)?;
    let socket = Socket(wish.socket.clone());
    listener.set_nonblocking(true).map_err(refuse_socket)?;
    // Secrets given to one VM are not passed to its forks.
    let options = FreezeOptions::default();
    // Called before the workload is frozen: it takes time in proportion to the size of the drives.
    running.vm.prepare_freeze().map_err(refuse("fork"))?;
    let begun = running.standing_still("fork", wish.refresh, options, pvmm::Vm::begin_freeze)?;
    let template = begun.finish().map_err(refuse("fork"))?;
    let pause = template.pause();
    let offer = Offer::of(&template, &snapshot::note(&running.config)?)?;
    let wait = move || {
        WAITING.fetch_add(1, Ordering::Relaxed);
        offer.serve(&listener, children);
        drop(socket);
        WAITING.fetch_sub(1, Ordering::Relaxed);
    };
    std::thread::Builder::new().name("fork".to_owned()).spawn(wait).map_err(refuse_socket)?;
    Ok(json!({ "pause_us": u64::try_from(pause.as_micros()).unwrap_or(u64::MAX) }))
}

/// The path of a listening socket; removed on drop, when no more children are accepted.
struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Offer {
    fn of(template: &Template, config: &[u8]) -> Result<Self, Refusal> {
        let (template, files) = template.hand_over().map_err(refuse("fork"))?;
        let (config_bytes, template_bytes) = (config.len() as u64, template.len() as u64);
        let mut bytes = serde_json::to_vec(&Head { config_bytes, template_bytes })
            .map_err(|error| Refusal { status: 500, message: error.to_string() })?;
        bytes.push(b'\n');
        bytes.extend_from_slice(config);
        bytes.extend(template);
        Ok(Self { bytes, files })
    }

    fn serve(&self, listener: &UnixListener, children: u32) {
        let deadline = Instant::now() + OPEN;
        let mut left = children;
        while left > 0 {
            let patience = deadline.saturating_duration_since(Instant::now());
            let ready = poll::readable(&[std::os::fd::AsFd::as_fd(listener)], Some(patience));
            match ready.map(|ready| ready.contains(&true)) {
                Ok(true) => match listener.accept().and_then(|(child, _)| self.send(&child)) {
                    Ok(()) => left -= 1,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => log::warn!("fork: a child went away: {error}"),
                },
                Ok(false) if patience.is_zero() => break,
                Ok(false) => {}
                Err(error) => {
                    log::warn!("fork: {error}");
                    break;
                }
            }
        }
        if left > 0 {
            log::warn!("fork: {left} of {children} children did not come.");
        }
    }

    fn send(&self, mut child: &UnixStream) -> io::Result<()> {
        child.set_nonblocking(false)?;
        child.set_write_timeout(Some(PATIENCE))?;
        let sent = passing::send(child, &self.bytes, &self.files)?;
        child.write_all(&self.bytes[sent..])
    }
}

/// Makes a paused VM from the state that another process serves on the socket of `wish`.
pub fn load(
    wish: &ForkLoad,
    serial: &Serial,
    filters: Option<Arc<ThreadFilters>>,
) -> Result<Running, Refusal> {
    let (config, template) = receive(&wish.socket).map_err(|error| {
        Refusal::bad(format!("Load fork error: socket {:?}: {error}", wish.socket))
    })?;
    let mut config = snapshot::read_note(&config)?;
    let changes = Changes {
        nets: &wish.network_overrides,
        vsock: wish.vsock_override.as_ref(),
        drives: &wish.drive_overrides,
    };
    snapshot::apply(&mut config, &changes)?;
    // A drive without an override continues from its frozen state, without later writes of the
    // parent.
    let named = |id: &str| wish.drive_overrides.iter().any(|change| change.drive_id == id);
    let mut drives = Vec::new();
    for (index, drive) in config.drives.iter().enumerate().filter(|(_, d)| named(&d.drive_id)) {
        drives.push((index, drive_config(drive, pvmm::DriveSource::Path)?));
    }
    let overrides = Overrides { drives, ..snapshot::overrides(&config, serial, filters)? };
    let forked = template.fork(overrides).map_err(refuse("Load fork error"))?;
    let running = Running::new(forked.without_refresh(), config);
    Ok(match wish.refresh {
        RefreshBy::Agent => running.refreshed_at_resume(),
        RefreshBy::None => running,
    })
}

fn receive(socket: &Path) -> io::Result<(Vec<u8>, Template)> {
    let bad = |what: &str| io::Error::other(what.to_owned());
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut bytes, mut files) = (Vec::new(), Vec::new());
    let end = loop {
        let mut buffer = vec![0; HEAD_MAX];
        let (count, more) = passing::receive(&stream, &mut buffer)?;
        files.extend(more);
        bytes.extend_from_slice(&buffer[..count]);
        match bytes.iter().position(|byte| *byte == b'\n') {
            Some(end) => break end,
            None if count == 0 || bytes.len() > HEAD_MAX => return Err(bad("no machine is sent")),
            None => {}
        }
    };
    let mut rest = bytes.split_off(end + 1);
    let head: Head = serde_json::from_slice(&bytes).map_err(|_| bad("no machine is sent"))?;
    let whole = head.config_bytes.saturating_add(head.template_bytes);
    if whole > REST_MAX || rest.len() as u64 > whole {
        return Err(bad("what is sent is no machine"));
    }
    (&mut stream).take(whole - rest.len() as u64).read_to_end(&mut rest)?;
    if rest.len() as u64 != whole {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let template = rest.split_off(head.config_bytes as usize);
    let template = Kvm::open()
        .and_then(|kvm| Template::take_over(&kvm, &template, files))
        .map_err(|error| io::Error::other(format!("{error:#}")))?;
    Ok((rest, template))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_that_sends_something_else_is_refused() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("fork");
        let load = ForkLoad {
            socket: path.clone(),
            resume_vm: false,
            refresh: RefreshBy::Agent,
            network_overrides: Vec::new(),
            vsock_override: None,
            drive_overrides: Vec::new(),
        };
        assert!(super::load(&load, &Serial::default(), None).is_err());
        let huge = br#"{"config_bytes":18446744073709551615,"template_bytes":2}"#;
        let words: [&[u8]; 5] = [
            b"",
            b"hello\n",
            b"{}\n",
            &[&huge[..], b"\n"].concat(),
            b"{\"config_bytes\":2,\"template_bytes\":0}\n{}",
        ];
        for word in words {
            let listener = UnixListener::bind(&path).unwrap();
            let word = word.to_vec();
            let server = std::thread::spawn(move || {
                let (mut child, _) = listener.accept().unwrap();
                let _ = child.write_all(&word);
            });
            assert!(super::load(&load, &Serial::default(), None).is_err());
            server.join().unwrap();
            fs::remove_file(&path).unwrap();
        }
    }
}
