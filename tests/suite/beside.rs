//! A comparison with Firecracker: one script of requests runs against pvmm and against Firecracker,
//! and every difference must be listed.
//!
//! The script is `beside.txt`; its comments explain it. A difference that the script does not list
//! fails the test, and so does a listed difference that no longer exists. `FIRECRACKER_BIN` names
//! Firecracker's binary.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm_agent_image::AGENT;
use pvmm_tests::firecracker::{Firecracker, prints};
use pvmm_tests::guest::{base, default_kernel, other_rootfs};
use pvmm_tests::{cli, network};
use serde_json::Value;
use tempfile::TempDir;

const SCRIPT: &str = include_str!("beside.txt");
/// How long the answer to an invalid request may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// A line of the script, and the reason for its difference if one is listed.
struct Step {
    line: &'static str,
    differs: Option<&'static str>,
}

fn script() -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for line in SCRIPT.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix("  differs: ") {
            Some(why) => steps.last_mut().unwrap().differs = Some(why),
            None => steps.push(Step { line, differs: None }),
        }
    }
    steps
}

/// One of the two programs, as it goes through the script.
struct Side {
    program: PathBuf,
    dir: TempDir,
    process: Option<Firecracker>,
    vsock: PathBuf,
}

impl Side {
    fn of(program: PathBuf) -> Self {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("initrd"), default_kernel().initramfs(AGENT).unwrap())
            .unwrap();
        for (name, mib) in [("vol", 8), ("bigger", 16)] {
            let file = std::fs::File::create(dir.path().join(name)).unwrap();
            file.set_len(mib << 20).unwrap();
        }
        other_rootfs(&dir.path().join("other.ext4"));
        let vsock = dir.path().join("v.sock");
        Self { program, dir, process: None, vsock }
    }

    /// Returns the outcome of a line, with the paths of this side replaced by names.
    fn outcome(&mut self, line: &str) -> String {
        let dir = self.dir.path().display().to_string();
        let kernel = default_kernel().vmlinux.display().to_string();
        let rootfs = base().rootfs.display().to_string();
        let names = [("$DIR", &dir), ("$KERNEL", &kernel), ("$ROOTFS", &rootfs)];
        let line = names.iter().fold(line.to_owned(), |line, (name, is)| line.replace(name, is));
        let (verb, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let said = match verb {
            "process" => {
                let flags = ["--id", "beside", "--level", "Error"];
                // The previous process ends before the next one starts.
                self.process = None;
                self.process =
                    Some(Firecracker::of(&self.program, TempDir::new().unwrap(), &flags));
                "started".to_owned()
            }
            "vsock" => {
                self.vsock = self.dir.path().join(rest);
                "named".to_owned()
            }
            "guest" => prints(&self.agent(), rest),
            "ends" => format!("{:?}", self.process.as_mut().unwrap().ends()),
            "raw" => self.raw(&rest.replace("\\r", "\r").replace("\\n", "\n")),
            "keys" => {
                let (method, path) = rest.split_once(' ').unwrap();
                let reply = self.process().ask(method, path, &Value::Null);
                let keys = |body: &Value| body.as_object().map(|map| map.keys().cloned().collect());
                let keys: BTreeSet<String> = keys(&reply.body).unwrap_or_default();
                format!("{} {keys:?}", reply.status)
            }
            method => self.request(method, rest),
        };
        names.iter().fold(said, |said, (name, is)| said.replace(is.as_str(), name))
    }

    fn process(&self) -> &Firecracker {
        self.process.as_ref().unwrap()
    }

    fn agent(&self) -> Agent {
        let connect = |_: &Firecracker| {
            Agent::connect(&self.vsock, Instant::now() + Duration::from_secs(5)).ok()
        };
        self.process().until("the agent", connect)
    }

    /// Returns the status and the body; for a refusal, only whether it has a fault message.
    fn request(&self, method: &str, rest: &str) -> String {
        let (path, body) = rest.split_once(' ').unwrap_or((rest, ""));
        let len = body.len();
        let text = format!("{method} {path} HTTP/1.1\r\nContent-Length: {len}\r\n\r\n{body}");
        let reply = self.process().raw(text.as_bytes());
        let mut body = reply.body.clone();
        let words = |body: &Value| body["fault_message"].as_str().is_some_and(|it| !it.is_empty());
        match &mut body {
            Value::Null => reply.status.to_string(),
            body if reply.status >= 400 => {
                let keys = body.as_object().map_or(0, serde_json::Map::len);
                format!("{} {}", reply.status, if words(body) && keys == 1 { "fault" } else { "?" })
            }
            body => {
                for name in ["vmm_version", "firecracker_version"] {
                    if let Some(version) = body.get_mut(name) {
                        *version = "VERSION".into();
                    }
                }
                // Firecracker lists the drives of a running VM in no certain order.
                if let Some(Value::Array(drives)) = body.get_mut("drives") {
                    drives.sort_by_key(|drive| drive["drive_id"].to_string());
                }
                format!("{} {body}", reply.status)
            }
        }
    }

    /// Returns the status of the first answer.
    fn raw(&self, bytes: &str) -> String {
        let mut stream = UnixStream::connect(self.process().socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(bytes.as_bytes()).unwrap();
        let mut head = [0; 12];
        match stream.read_exact(&mut head) {
            Ok(()) => String::from_utf8_lossy(&head[9..]).into_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => "closed".to_owned(),
            Err(_) => "no answer".to_owned(),
        }
    }
}

fn outcomes(program: &Path) -> Vec<String> {
    let mut side = Side::of(program.to_owned());
    script()
        .iter()
        .map(|step| {
            let outcome = side.outcome(step.line);
            println!("{}: {outcome}", step.line);
            outcome
        })
        .collect()
}

#[test]
#[ignore = "needs FIRECRACKER_BIN, and cargo xtask compat --beside"]
fn compat_beside_firecracker_nothing_differs_but_what_is_listed() {
    let firecracker = std::env::var_os("FIRECRACKER_BIN").expect("FIRECRACKER_BIN is not set");
    let here = network::isolated(|| outcomes(&cli::binary()));
    let there = network::isolated(|| outcomes(Path::new(&firecracker)));
    let (mut wrong, mut listed) = (0, 0);
    for ((step, here), there) in script().iter().zip(&here).zip(&there) {
        match (here == there, step.differs) {
            (true, None) => {}
            (false, Some(why)) => {
                listed += 1;
                println!("LISTED {}\n  pvmm {here}\n  Firecracker {there}\n  {why}", step.line);
            }
            (false, None) => {
                wrong += 1;
                println!("DIFFERS {}\n  pvmm {here}\n  Firecracker {there}", step.line);
            }
            (true, Some(why)) => {
                wrong += 1;
                println!("NO LONGER DIFFERS {}: both {here}\n  {why}", step.line);
            }
        }
    }
    println!("{} steps, {listed} with a listed difference, {wrong} wrong", here.len());
    assert_eq!(wrong, 0);
}
