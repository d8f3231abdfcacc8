//! The agent that runs in the guest, as first process or as a service: one static program.
//!
//! It is small because every guest carries it and every snapshot holds its pages.
#![cfg_attr(not(test), no_main)]

mod agent;
mod cgroup;
mod channel;
mod check;
mod connection;
mod deadlines;
mod defaults;
mod detached;
mod entry;
mod file_work;
mod init;
mod interpreter;
mod job;
mod jobs;
mod launch;
mod listener;
mod metrics;
mod mounts;
mod netlink;
mod oom;
mod outbox;
mod pool;
mod process;
mod refresh;
mod requests;
mod ring;
mod server;
mod spawn;
mod stdio;
mod sys;
mod terminal;
mod token;
mod tree_work;
mod trust;
mod users;
mod watch;

use std::path::PathBuf;

use pvmm_guest_agent::limits::AGENT_PORT;

use crate::agent::Settings;
use crate::cgroup::Cgroups;
use crate::listener::Listener;
use crate::server::Server;

const USAGE: &str = "usage: pvmm-agent serve [--listen vsock:PORT|unix:PATH] \
                     [--control vsock:PORT|unix:PATH] [--cgroup DIR|none]";
/// The limit of open files: enough for every stream of every connection.
const OPEN_FILES: u64 = 65536;

/// Runs the program and returns its exit code.
fn run() -> i32 {
    // Before anything else: the agent must answer whatever load the guest's commands cause.
    sys::put_before_commands();
    if std::process::id() == 1 {
        init::run();
    }
    match serve(std::env::args().skip(1).collect()) {
        Ok(()) => 0,
        Err(message) => {
            eprintln!("pvmm-agent: {message}");
            1
        }
    }
}

/// Serves under another init: no mounts, no shutdown of the system.
fn serve(arguments: Vec<String>) -> Result<(), String> {
    let mut arguments = arguments.into_iter();
    if arguments.next().as_deref() != Some("serve") {
        return Err(USAGE.into());
    }
    let mut listen = format!("vsock:{AGENT_PORT}");
    let mut control = None;
    let mut cgroup = None;
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or(USAGE)?;
        match option.as_str() {
            "--listen" => listen = value,
            "--control" => control = Some(value),
            "--cgroup" => cgroup = Some(value),
            _ => return Err(USAGE.into()),
        }
    }
    // The control port comes first, so that a client that can reach the other port can reach both.
    let control_listener = control.as_deref().map(open_listener).transpose()?;
    let listener = open_listener(&listen)?;
    sys::share_one_heap();
    sys::become_subreaper().map_err(|e| format!("cannot adopt orphans: {e}"))?;
    let cgroups = match cgroup.as_deref() {
        Some("none") => None,
        other => Cgroups::prepare(other.map(PathBuf::from)),
    };
    let settings = Settings {
        listener,
        control: control_listener,
        cgroups,
        init: false,
        open_files: sys::raise_open_files(OPEN_FILES),
    };
    let mut server = Server::new(settings).map_err(|e| format!("cannot start: {e}"))?;
    let ended = server.run().map_err(|e| format!("the event loop failed: {e}"));
    server.close();
    for place in [Some(&listen), control.as_ref()].into_iter().flatten() {
        if let Some(("unix", path)) = place.split_once(':') {
            let _ = std::fs::remove_file(path);
        }
    }
    ended.map(drop)
}

fn open_listener(place: &str) -> Result<Listener, String> {
    let listener = match place.split_once(':') {
        Some(("unix", path)) => Listener::unix(path.as_ref()),
        Some(("vsock", port)) => Listener::vsock(port.parse().map_err(|_| USAGE)?),
        _ => return Err(USAGE.into()),
    };
    listener.map_err(|e| format!("cannot listen on {place}: {e}"))
}
