//! Firecracker, through its API socket, if `FIRECRACKER_BIN` names a binary.
//!
//! Firecracker's vsock convention is pvmm's, so pvmm's client reaches the agent in its guest.
//! Socket paths are relative to a directory that each process has to itself, because a snapshot
//! keeps the paths that it was made with.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, ReadyListener, Refresh};
use serde_json::{Value, json};

use super::{Machine, Peer, Process, Way};
use crate::board::{Outcome, millis};
use crate::guest::{MEMORY_MIB, PATIENCE, Spec, deadline, exec_true};
use crate::stage::rehearse;

/// The time between two attempts to connect to the API socket.
const POLL: Duration = Duration::from_millis(1);
pub const SOCKET: &str = "v";

pub struct Firecracker {
    program: PathBuf,
}

/// A snapshot that Firecracker has written.
pub struct Baked {
    pub dir: PathBuf,
    pub has_net: bool,
}

impl Firecracker {
    /// Copies the binary that `FIRECRACKER_BIN` names to `place`. Returns it with its version, or
    /// `None` if the variable is not set.
    pub fn find(place: &Path) -> Outcome<Option<(Self, String)>> {
        let Some(path) = std::env::var_os("FIRECRACKER_BIN") else { return Ok(None) };
        let program = place.join("firecracker");
        std::fs::copy(&path, &program)
            .map_err(|e| format!("FIRECRACKER_BIN={}: {e}", path.to_string_lossy()))?;
        let output = Command::new(&program).arg("--version").output()?;
        let version = String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("").into();
        Ok(Some((Self { program }, version)))
    }

    /// The launcher `pvmm`, copied to `place` under Firecracker's name, which makes it serve
    /// Firecracker's API.
    pub fn of_launcher(launcher: &Path, place: &Path) -> Outcome<Self> {
        let dir = place.join("in-its-place");
        std::fs::create_dir(&dir)?;
        let program = dir.join("firecracker");
        std::fs::copy(launcher, &program)?;
        Ok(Self { program })
    }

    pub fn program(&self) -> &Path {
        &self.program
    }

    fn spawn(&self, dir: &Path, arguments: &[&str]) -> Outcome<Process> {
        let mut command = Command::new(&self.program);
        command.args(["--api-sock", "api", "--id", "bench"]).args(arguments).current_dir(dir);
        let log = std::fs::File::create(dir.join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Process(command.spawn()?))
    }

    /// Starts a process that has no VM, and waits until its API socket accepts connections.
    pub fn idle(&self, dir: &Path) -> Outcome<Process> {
        let process = self.spawn(dir, &[])?;
        let until = deadline();
        while UnixStream::connect(dir.join("api")).is_err() {
            if Instant::now() > until {
                return Err("firecracker: the API socket does not answer".into());
            }
            std::thread::sleep(POLL);
        }
        Ok(process)
    }

    /// Boots a guest, warms it up, freezes its workload and writes a snapshot of it into `dir`.
    pub fn bake(&self, spec: &Spec, dir: &Path) -> Outcome<Baked> {
        let (Machine { process, agent, .. }, _) = self.boot(spec)?;
        drop(agent);
        rehearse(&spec.socket())?;
        std::fs::create_dir_all(dir)?;
        let baked = Baked { dir: dir.to_owned(), has_net: spec.tap.is_some() };
        pause(&spec.dir)?;
        snapshot(&spec.dir, dir)?;
        drop(process);
        Ok(baked)
    }

    /// Starts a process, restores a snapshot in it and resumes the VM. Returns the VM after it has
    /// answered an exec.
    pub fn restore(&self, baked: &Baked, dir: &Path, tap: Option<&str>) -> Outcome<Machine> {
        let process = self.idle(dir)?;
        load(baked, dir, tap, true)?;
        let socket = dir.join(SOCKET);
        let agent = Agent::connect_refreshed(&socket, &Refresh::new(1)?, deadline())?;
        exec_true(&agent)?;
        Ok(Machine { process, agent, way: Way::Unix(socket) })
    }
}

impl Peer for Firecracker {
    fn name(&self) -> &'static str {
        "firecracker"
    }

    fn boot(&self, spec: &Spec) -> Outcome<(Machine, f64)> {
        let drive = |id: &str, path: &Path, read_only: bool| {
            json!({ "drive_id": id, "path_on_host": path, "is_root_device": false,
                    "is_read_only": read_only })
        };
        let mut drives = vec![drive("root", &spec.guest.rootfs, true)];
        drives.extend(spec.disk.as_ref().map(|disk| drive("disk", disk, false)));
        let card = |tap: &String| json!({ "iface_id": "eth0", "host_dev_name": tap });
        let config = json!({
            "boot-source": { "kernel_image_path": spec.guest.kernel,
                             "initrd_path": spec.guest.initrd, "boot_args": spec.cmdline },
            "drives": drives,
            "machine-config": { "vcpu_count": 1, "mem_size_mib": MEMORY_MIB },
            "network-interfaces": spec.tap.iter().map(card).collect::<Vec<_>>(),
            "vsock": { "guest_cid": 3, "uds_path": SOCKET },
            "entropy": {},
        });
        std::fs::write(spec.dir.join("config.json"), config.to_string())?;
        let ready = ReadyListener::bind(&spec.socket())?;
        let begun = Instant::now();
        let process = self.spawn(&spec.dir, &["--config-file", "config.json"])?;
        ready.wait(deadline()).map_err(|e| {
            let log = std::fs::read_to_string(spec.dir.join("log")).unwrap_or_default();
            format!("{e}; {log}")
        })?;
        let agent = Agent::connect(&spec.socket(), deadline())?;
        exec_true(&agent)?;
        let took = millis(begun.elapsed());
        Ok((Machine { process, agent, way: Way::Unix(spec.socket()) }, took))
    }
}

pub fn pause(dir: &Path) -> Outcome<()> {
    request(dir, "PATCH", "/vm", &json!({ "state": "Paused" }))
}

pub fn resume(dir: &Path) -> Outcome<()> {
    request(dir, "PATCH", "/vm", &json!({ "state": "Resumed" }))
}

/// Writes a full snapshot into `into`, of the paused VM whose process runs in `dir`.
pub fn snapshot(dir: &Path, into: &Path) -> Outcome<()> {
    let body = json!({ "snapshot_type": "Full", "snapshot_path": into.join("state"),
                       "mem_file_path": into.join("memory") });
    request(dir, "PUT", "/snapshot/create", &body)
}

pub fn load(baked: &Baked, dir: &Path, tap: Option<&str>, resume: bool) -> Outcome<()> {
    let backend = json!({ "backend_type": "File", "backend_path": baked.dir.join("memory") });
    let mut body = json!({ "snapshot_path": baked.dir.join("state"), "mem_backend": backend,
                           "resume_vm": resume });
    if let Some(tap) = tap.filter(|_| baked.has_net) {
        body["network_overrides"] = json!([{ "iface_id": "eth0", "host_dev_name": tap }]);
    }
    request(dir, "PUT", "/snapshot/load", &body)
}

/// Sends one request on a new connection. Every answer other than success is an error.
fn request(dir: &Path, method: &str, path: &str, body: &Value) -> Outcome<()> {
    let body = body.to_string();
    let mut socket = UnixStream::connect(dir.join("api"))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let len = body.len();
    write!(
        socket,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {len}\r\n\r\n{body}"
    )?;
    let mut answer = Vec::new();
    let mut chunk = [0; 4096];
    while !answer.windows(4).any(|four| four == b"\r\n\r\n") {
        match socket.read(&mut chunk)? {
            0 => break,
            count => answer.extend_from_slice(&chunk[..count]),
        }
    }
    if answer.starts_with(b"HTTP/1.1 20") {
        Ok(())
    } else {
        Err(format!("{method} {path}: {}", String::from_utf8_lossy(&answer)).into())
    }
}
