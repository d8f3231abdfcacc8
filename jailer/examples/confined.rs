//! Tries what a confined process must not be able to do, and prints what came of each attempt.
//!
//! `confined [--unconfined] FOLDER SCRATCH USER PORT`: PORT is one of TCP on this host's loopback
//! that somebody listens on. With `--unconfined` the attempts are made without a confinement, to
//! show that the confinement is what stops them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

use pvmm_jailer::confine::{self, Access, Confinement, Folder, Limits, Side};

const FOLDER: &str = "/vm";
const SCRATCH: &str = "/scratch";
const LIMITS: Limits = Limits {
    open_files: 64,
    file_bytes: 1 << 30,
    processes: 16,
    locked_bytes: 1 << 20,
    address_space_bytes: 4 << 30,
};

fn main() {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let confined = words.first().is_none_or(|word| word != "--unconfined");
    if !confined {
        words.remove(0);
    }
    let [folder, scratch, user, port] = words.as_slice() else { panic!("wrong arguments") };
    let (folder, scratch) = (PathBuf::from(folder), PathBuf::from(scratch));
    let port = port.parse().expect("a port");
    if !confined {
        return attempt(&folder, &scratch, port);
    }
    match confine::fork(None).expect("fork") {
        Side::Parent(pid) => wait_for(pid),
        Side::Child(means) => {
            let user = user.parse().expect("a user");
            let (root, limits) = (folder.clone(), LIMITS);
            let folders = vec![
                Folder { from: folder, at: FOLDER, access: Access::Files },
                Folder { from: scratch, at: SCRATCH, access: Access::NamelessFiles },
            ];
            let confinement = Confinement { root, folders, network: false, user, limits };
            let missing = confinement.enter(means).expect("enter the confinement");
            missing.iter().for_each(|it| println!("lacks {}", it.layer));
            attempt(Path::new(FOLDER), Path::new(SCRATCH), port);
        }
    }
}

/// Waits for a child of another program's making: there is no handle of it.
fn wait_for(pid: u32) {
    let gone = || !Path::new(&format!("/proc/{pid}/exe")).exists();
    for _ in 0..1000 {
        if fs::read_link(format!("/proc/{pid}/exe")).is_err() || gone() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    exit(1)
}

fn attempt(folder: &Path, scratch: &Path, port: u16) {
    let nameless = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
        options.open(scratch).map(drop)
    };
    say("write a file in its folder", fs::write(folder.join("file"), "x"));
    say("make a nameless file in scratch", nameless());
    say("make a named file in scratch", fs::write(scratch.join("named"), "x"));
    say("make a folder in its folder", fs::create_dir(folder.join("sub")));
    say("make a link in its folder", symlink("/etc", folder.join("link")));
    say("read a file of the host", File::open("/etc/passwd").map(drop));
    say("list processes", File::open("/proc/self/status").map(drop));
    say("open a device", File::open("/dev/null").map(drop));
    say("make a file in the root", fs::write("/pvmm-confined", "x"));
    say("listen on TCP", TcpListener::bind("127.0.0.1:0").map(drop));
    say("connect to the host", TcpStream::connect(("127.0.0.1", port)).map(drop));
    say("run a program", Command::new("/bin/true").status().map(drop));
    let many = || (0..100).map(|_| File::open(folder.join("file"))).collect::<io::Result<Vec<_>>>();
    say("open many files", many());
    say("read its environment", std::env::var("PATH").map(drop).map_err(io::Error::other));
    let _ = fs::remove_file("/pvmm-confined");
}

fn say<T>(what: &str, result: io::Result<T>) {
    match result {
        Ok(_) => println!("{what}: done"),
        Err(error) => println!("{what}: {:?}", error.kind()),
    }
}
