//! Sockets, logs and metrics of a monitor are its owner's alone, whatever the umask says.
#![allow(clippy::unwrap_used)] // All of this file is test code, its fixture included.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Monitor {
    child: Child,
    dir: tempfile::TempDir,
}

impl Monitor {
    /// Starts with nothing masked, as some service managers do.
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new("sh")
            .args(["-c", "umask 0; exec \"$0\" firecracker --api-sock api.sock"])
            .arg(env!("CARGO_BIN_EXE_pvmm"))
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn put(&self, path: &str, body: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut stream = loop {
            match UnixStream::connect(self.path("api.sock")) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let len = body.len();
        let head = format!("PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len}\r\n\r\n");
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut start = [0; 12];
        stream.read_exact(&mut start).unwrap();
        assert_eq!(start, *b"HTTP/1.1 204", "{path}");
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

#[test]
fn files_of_a_monitor_are_its_owners_alone_without_a_umask() {
    let monitor = Monitor::start();
    monitor.put("/logger", r#"{"log_path":"log","level":"Info"}"#);
    monitor.put("/metrics", r#"{"metrics_path":"metrics"}"#);
    monitor.put("/mmds", r#"{"latest":"hush"}"#);
    for name in ["api.sock", "log", "metrics"] {
        assert_eq!(mode(&monitor.path(name)), 0o600, "{name}");
    }
    let log = std::fs::read_to_string(monitor.path("log")).unwrap();
    assert!(log.contains("/mmds") && !log.contains("hush"), "{log}");
}
