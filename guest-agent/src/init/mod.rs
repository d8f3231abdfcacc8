//! The agent as the guest's first process: boot, serve, shut down.
//!
//! Nothing has to be installed in a root filesystem for it: what is missing is mounted on top.

mod boot;
mod device;
mod down;
mod modules;
mod words;

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pvmm_guest_agent::encode;
use pvmm_guest_agent::frame::Kind;
use pvmm_guest_agent::limits::{AGENT_PORT, CONTROL_PORT, HOST_CID, READY_PORT};
use pvmm_guest_agent::message::{Shutdown, ShutdownHow};

use crate::agent::{Ended, Settings};
use crate::cgroup::Cgroups;
use crate::listener::Listener;
use crate::server::Server;
use crate::{OPEN_FILES, sys};

use boot::System;

/// The directory of the control groups of execs.
const CGROUP_BASE: &str = "/sys/fs/cgroup/pvmm";
/// The time limit for the vsock device to appear after everything else.
const VSOCK_TIME: Duration = Duration::from_secs(1);
/// The open-file limits of programs in the guest: a low soft limit for programs that use select,
/// and a high hard limit.
const CHILD_OPEN_FILES: libc::rlimit = libc::rlimit { rlim_cur: 1024, rlim_max: 524_288 };

/// Runs as first process. Never returns: a first process that ends panics the kernel.
pub fn run() -> ! {
    let system = match boot::boot() {
        Ok(system) => system,
        Err(e) => give_up(&describe(&e), &System::default()),
    };
    match serve() {
        Ok(shutdown) => down::shut_down(shutdown, &system),
        Err(message) => give_up(&message, &system),
    }
}

fn serve() -> Result<Shutdown, String> {
    sys::share_one_heap();
    sys::raise_open_files(OPEN_FILES);
    let control = Listener::vsock(CONTROL_PORT)
        .map_err(|e| format!("cannot listen on vsock port {CONTROL_PORT}: {e}"))?;
    let listener = Listener::vsock(AGENT_PORT)
        .map_err(|e| format!("cannot listen on vsock port {AGENT_PORT}: {e}"))?;
    let cgroups = Cgroups::prepare(Some(PathBuf::from(CGROUP_BASE)));
    let settings = Settings {
        listener,
        control: Some(control),
        cgroups,
        init: true,
        open_files: CHILD_OPEN_FILES,
    };
    let mut server = Server::new(settings).map_err(|e| format!("cannot start: {e}"))?;
    say_ready(&server);
    match server.run().map_err(|e| format!("the event loop failed: {e}"))? {
        Ended::Shutdown(shutdown) => Ok(shutdown),
        Ended::Stopped => Ok(Shutdown { how: ShutdownHow::Poweroff, grace_ms: None }),
    }
}

/// Sends the ready signal to the host once. A host that does not listen refuses it, which is no
/// error.
fn say_ready(server: &Server) {
    let mut frame = Vec::new();
    let encoded = encode(&mut frame, Kind::Welcome, 0, &server.welcome());
    if let (Ok(()), Ok(socket)) = (encoded, dial_host()) {
        let _ = sys::write_once(&socket, &frame);
    }
}

/// Connects to the host, and waits a little while the vsock device is not found yet.
fn dial_host() -> io::Result<OwnedFd> {
    let deadline = Instant::now() + VSOCK_TIME;
    loop {
        match sys::vsock::dial(HOST_CID, READY_PORT) {
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

/// Prints one line on the console and shuts down.
fn give_up(message: &str, system: &System) -> ! {
    let _ = writeln!(io::stderr(), "pvmm-agent: {message}");
    down::shut_down(Shutdown { how: ShutdownHow::Poweroff, grace_ms: Some(0) }, system)
}

/// Formats an error and its cause on one line.
fn describe(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
