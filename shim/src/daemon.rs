//! The daemon of a pod: serves its socket until containerd says that it is not needed any more.

use std::os::fd::AsRawFd;
use std::sync::{Arc, mpsc};

use containerd_shim_protos::create_task;
use containerd_shim_protos::ttrpc::Server;

use crate::bundle::Bundle;
use crate::error::ShimError;
use crate::events::Publisher;
use crate::flags::Flags;
use crate::pod::Pod;
use crate::start;
use crate::sys;
use crate::task::TaskService;

/// Each process that is waited for has a thread.
const THREADS_MAX: usize = 256;
const THREADS: usize = 4;

pub fn serve(flags: &Flags) -> Result<(), ShimError> {
    pvmm_sandbox::logger::start();
    let _ = rustix::process::setsid();
    // The mounts of root filesystems end with this process.
    sys::unshare_mounts().map_err(|e| failed("mount namespace", e))?;
    let private = rustix::mount::MountPropagationFlags::DOWNSTREAM
        | rustix::mount::MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).map_err(|e| failed("mount namespace", e))?;

    let bundle = Bundle::of(flags)?;
    let events = Publisher::start(&flags.namespace)?;
    let (ended, wait) = mpsc::channel();
    let pod = Arc::new(Pod::open(&flags.id, &flags.namespace, bundle, events)?);
    let service = create_task(Arc::new(TaskService::new(pod.clone(), ended)));
    let listener = std::io::stdin().as_raw_fd();
    let mut server = Server::new()
        .add_listener(listener)
        .map_err(|error| ShimError::Invalid(format!("socket: {error}")))?
        .set_thread_count_default(THREADS)
        .set_thread_count_min(THREADS / 2)
        .set_thread_count_max(THREADS_MAX)
        .register_service(service);
    server.start().map_err(|error| ShimError::Invalid(format!("socket: {error}")))?;
    // Without a sender there is nothing to serve, so an error means the same.
    let _ = wait.recv();
    let _ = std::fs::remove_file(start::socket_of(flags, &flags.id));
    pod.end();
    pod.events.flush();
    // Calls that wait for something are cut off.
    std::process::exit(0);
}

fn failed(what: &str, errno: rustix::io::Errno) -> ShimError {
    ShimError::Io { what: what.to_owned(), source: errno.into() }
}
