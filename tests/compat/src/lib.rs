//! What the drivers of the clients have in common: the words they are given, and when the suite looks at the
//! guest.
//!
//! A driver does what its client can do. Whenever the guest should be looked at, it says so and waits; what
//! is looked at is none of the client's business.

use std::io::{BufRead, Write};
use std::path::PathBuf;

/// What a driver is given.
pub struct Words {
    pub firecracker: PathBuf,
    /// A directory of its own.
    pub dir: PathBuf,
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub rootfs: PathBuf,
    /// The same root image by another name.
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
}

/// Lets the suite look at the guest.
pub fn look(moment: &str) {
    println!("look {moment}");
    std::io::stdout().flush().expect("say it");
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("an answer");
    assert_eq!(line.trim(), "good", "at {moment}");
}
