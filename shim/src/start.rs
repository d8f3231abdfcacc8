//! `start`: binds the socket of a pod and leaves a daemon behind it, unless one is there.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use crate::bundle::{self, Bundle};
use crate::error::ShimError;
use crate::flags::{Flags, SERVE};

/// Where containerd's shims have their sockets.
const SOCKETS: &str = "/run/containerd/s";
/// The file by which containerd reads what a shim has to say.
const LOG: &str = "log";

pub fn start(flags: &Flags) -> Result<(), ShimError> {
    bundle::check_id(&flags.id)?;
    let bundle = Bundle::of(flags)?;
    let config = bundle.config()?;
    let pod = bundle::pod_of(&config, &flags.id);
    let socket = socket_of(flags, pod);
    let address = format!("unix://{}", socket.display());
    if let Some(listener) = listen(&socket)? {
        spawn(flags, &bundle, pod, listener).inspect_err(|_| {
            let _ = fs::remove_file(&socket);
        })?;
    }
    bundle.write_address(&address)?;
    let mut out = io::stdout();
    out.write_all(address.as_bytes()).and_then(|()| out.flush()).map_err(ShimError::io("stdout"))
}

/// Returns the socket of a pod, short enough whatever the names are.
pub fn socket_of(flags: &Flags, pod: &str) -> PathBuf {
    let mut hash = Sha256::new();
    for part in [&flags.address, &flags.namespace, pod] {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    let name: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Path::new(SOCKETS).join(name)
}

/// Binds a socket. Returns `None` if a daemon listens there; a dead one's socket is taken over.
fn listen(socket: &Path) -> Result<Option<UnixListener>, ShimError> {
    let failed = || ShimError::io(format!("socket {}", socket.display()));
    let parent = socket.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(failed())?;
    match UnixListener::bind(socket) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if UnixStream::connect(socket).is_ok() {
                return Ok(None);
            }
            fs::remove_file(socket).map_err(failed())?;
            UnixListener::bind(socket).map(Some).map_err(failed())
        }
        bound => bound.map(Some).map_err(failed()),
    }
}

/// Starts the daemon, in a session of its own, with the socket as its standard input.
fn spawn(
    flags: &Flags,
    bundle: &Bundle,
    pod: &str,
    listener: UnixListener,
) -> Result<(), ShimError> {
    let log = OpenOptions::new()
        .write(true)
        // A pipe that nobody reads any more must not hold the daemon up.
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
        .open(bundle.path().join(LOG));
    let log = log.map_or_else(|_| Stdio::null(), Stdio::from);
    Command::new("/proc/self/exe")
        .arg0("containerd-shim-pvmm-v1")
        .args(["-namespace", &flags.namespace, "-address", &flags.address, "-id", pod, SERVE])
        .current_dir(bundle.path())
        .stdin(OwnedFd::from(listener))
        .stdout(Stdio::null())
        .stderr(log)
        // Signals to containerd's group are not for its containers.
        .process_group(0)
        .spawn()
        .map(drop)
        .map_err(ShimError::io("cannot start the daemon"))
}
