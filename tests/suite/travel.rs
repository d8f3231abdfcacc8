//! Templates and hibernated VMs that go from one host to another.
//!
//! A host is a cache, a data directory and a runtime directory of its own; the store between them
//! is a server that speaks the API of S3.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pvmm_tests::cli::{self, User};
use serde_json::Value;
use tempfile::TempDir;

/// How long the server may take to listen, also on an emulated host.
const START: Duration = Duration::from_secs(120);

/// A host with nothing of the other's but the guest kernel.
struct Host(User);

impl Host {
    fn new() -> Self {
        Self(User::with_home())
    }

    /// Runs a command with the variables of a client of the server.
    fn pvmm(&self, store: &Server, words: &[&str]) -> (Option<i32>, String, String) {
        let mut command = self.0.command(words);
        command.env("AWS_ENDPOINT_URL", &store.url).env("AWS_REGION", "here");
        command.env("AWS_ACCESS_KEY_ID", KEY.0).env("AWS_SECRET_ACCESS_KEY", KEY.1);
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().trim_end().to_owned();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    /// Runs a command that must succeed, and returns what it printed.
    fn ok(&self, store: &Server, line: &str) -> String {
        let (code, stdout, stderr) = self.pvmm(store, &line.split(' ').collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{line}: {stdout} {stderr}");
        stdout
    }

    /// Runs a push or pull, and returns how many chunks moved and how many were there.
    fn moved(&self, store: &Server, line: &str) -> (u64, u64) {
        let said: Value = serde_json::from_str(&self.ok(store, &format!("{line} --json"))).unwrap();
        (said["chunks_moved"].as_u64().unwrap(), said["chunks_there"].as_u64().unwrap())
    }

    fn shell(&self, store: &Server, vm: &str, line: &str) -> String {
        let (code, stdout, stderr) = self.pvmm(store, &["exec", vm, "--", "sh", "-c", line]);
        assert_eq!(code, Some(0), "{line}: {stdout} {stderr}");
        stdout
    }
}

/// The name and the secret that the server accepts.
const KEY: (&str, &str) = ("suite", "of this test");

/// A published server with the API of S3, on ports of this host.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    fn start(dir: &Path) -> Self {
        let listeners: Vec<_> = (0..8).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<_> = listeners.iter().map(|it| it.local_addr().unwrap().port()).collect();
        // Ports that were free a moment ago.
        drop(listeners);
        let mut program = Command::new(cli::cached("tools/seaweedfs/bin/weed"));
        program.args(["server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]);
        program.args([
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=40",
        ]);
        program.args(["-s3.port.iceberg=0", "-s3.port.lance=0"]);
        let names = ["master", "volume", "filer", "s3"];
        for (name, ports) in names.iter().zip(ports.chunks(2)) {
            program.arg(format!("-{name}.port={}", ports[0]));
            program.arg(format!("-{name}.port.grpc={}", ports[1]));
        }
        program.arg(format!("-dir={}", dir.display()));
        program.env("AWS_ACCESS_KEY_ID", KEY.0).env("AWS_SECRET_ACCESS_KEY", KEY.1);
        let process = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let server = Self { process, url: format!("http://127.0.0.1:{}", ports[6]) };
        let until = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", ports[6])).is_err() {
            assert!(Instant::now() < until, "the server does not listen");
            std::thread::sleep(Duration::from_millis(100));
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes a root filesystem that is a shell and little more.
pub fn make_system(dir: &Path) {
    for folder in ["bin", "etc", "run", "root", "tmp"] {
        fs::create_dir_all(dir.join(folder)).unwrap();
    }
    fs::copy("/bin/busybox", dir.join("bin/busybox")).unwrap();
    for tool in ["sh", "cat", "sleep", "setsid"] {
        symlink("busybox", dir.join("bin").join(tool)).unwrap();
    }
    fs::write(dir.join("etc/made"), "on the first host\n").unwrap();
}

/// A process that keeps a word in a variable of its own, and writes it when it is asked to.
const KEEPER: &str = "setsid sh -c 'word=$0; while :; do \
    [ -e /run/asked ] && echo $word > /run/answer; sleep 0.2; done' remembered >&- 2>&- &";
const ASK: &str = "echo > /run/asked; until [ -s /run/answer ]; do sleep 0.2; done; \
    cat /run/answer /run/file";

#[test]
fn template_and_hibernated_vm_go_on_at_another_host() {
    let (one, other, dir) = (Host::new(), Host::new(), TempDir::new().unwrap());
    let (system, data) = (dir.path().join("system"), dir.path().join("data"));
    make_system(&system);
    fs::create_dir(&data).unwrap();
    let s3 = &Server::start(&data);
    let bucket = "s3://suite/some/prefix";

    one.ok(s3, &format!("-q template build tiny --dir {}", system.display()));
    let (sent, _) = one.moved(s3, &format!("template push tiny {bucket}"));
    assert!(sent > 0);
    assert_eq!(one.moved(s3, &format!("template push tiny {bucket}")), (0, sent));
    assert_eq!(other.moved(s3, &format!("-q template pull {bucket}/tiny")), (sent, 0));
    assert_eq!(other.moved(s3, &format!("-q template pull {bucket}/tiny")), (0, sent));
    assert_eq!(other.ok(s3, "run --template tiny -- cat /etc/made"), "on the first host");

    one.ok(s3, "run -d --name web --template tiny");
    one.shell(s3, "web", &format!("echo in-memory > /run/file; {KEEPER}"));
    one.ok(s3, "hibernate web");
    one.moved(s3, &format!("snapshots push web {bucket}"));

    let (_, there) = other.moved(s3, &format!("-q snapshots pull {bucket}/web"));
    assert!(there >= sent / 2, "the image is that of the template, which is there: {there}");
    other.ok(s3, "wake web");
    assert_eq!(other.shell(s3, "web", ASK), "remembered\nin-memory");
    other.ok(s3, "kill web");

    let pulls = fs::read_dir(other.0.home().join("pulls")).unwrap();
    assert_eq!(pulls.count(), 0, "nothing unfinished is left");

    let (code, _, said) = other.pvmm(s3, &["template", "pull", &format!("{bucket}/none")]);
    assert!(code == Some(2) && said.contains("has no templates/none"), "{said}");
    one.ok(s3, "rm web");
}
