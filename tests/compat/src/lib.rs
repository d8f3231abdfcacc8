//! The common parts of the clients' drivers: the words they are given, and when the suite
//! looks at the guest.
//!
//! A driver does what its client can do, and asks beside it for what the client has no words for.
//! Whenever the guest should be looked at, it says so and waits; what is looked at is none of the
//! client's business.

use std::io::{BufRead, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// The words that a driver is given.
pub struct Words {
    pub firecracker: PathBuf,
    /// A directory of its own.
    pub dir: PathBuf,
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub rootfs: PathBuf,
    /// Another root image, of the same files.
    pub other_rootfs: PathBuf,
    pub data: PathBuf,
    pub boot_args: String,
    pub tap: String,
}

impl Words {
    pub fn from_arguments() -> Self {
        let mut words = std::env::args().skip(1);
        let mut next = || words.next().expect("nine words");
        Self {
            firecracker: next().into(),
            dir: next().into(),
            kernel: next().into(),
            initrd: next().into(),
            rootfs: next().into(),
            other_rootfs: next().into(),
            data: next().into(),
            boot_args: next(),
            tap: next(),
        }
    }

    pub fn vsock(&self) -> PathBuf {
        self.dir.join("v.sock")
    }

    pub fn snapshot(&self) -> PathBuf {
        self.dir.join("vm.state")
    }

    pub fn memory(&self) -> PathBuf {
        self.dir.join("vm.mem")
    }

    /// The body of a load that stays paused, with another tap.
    pub fn load_elsewhere(&self) -> String {
        let tap = format!("{}-2", self.tap);
        format!(
            r#"{{"snapshot_path": {:?}, "mem_backend": {{"backend_type": "File", "backend_path": {:?}}},
                "network_overrides": [{{"iface_id": "eth0", "host_dev_name": {tap:?}}}]}}"#,
            self.snapshot(),
            self.memory()
        )
    }
}

/// Asks beside a client for what it cannot say itself.
pub fn ask(socket: &Path, request: &str, body: &str) {
    let mut stream = UnixStream::connect(socket).expect("connect");
    let len = body.len();
    write!(stream, "{request} HTTP/1.1\r\nContent-Length: {len}\r\n\r\n{body}").expect("send");
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 204", "{request}");
}

/// Lets the suite look at the guest.
pub fn look(moment: &str) {
    println!("look {moment}");
    std::io::stdout().flush().expect("say it");
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("an answer");
    assert_eq!(line.trim(), "good", "at {moment}");
}
