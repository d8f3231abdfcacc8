//! Guest memory that another process supplies, page by page, as the guest touches it.
//!
//! The server listens on a Unix socket. It gets one message: where the memory lies, as JSON, with
//! the descriptor over which faults arrive. The connection stays open, and its end is the server's
//! end: missing pages never arrive after that, so the machine has ended. A thread watches the
//! connection, because a thread that waits for a page cannot.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pvmm_devices::GuestMemory;
use pvmm_devices::virtio::thread::DeviceHandle;
use serde::Serialize;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::uffd::Userfault;
use super::{PAGE, pages};
use crate::error::{Error, ErrorKind};
use crate::outcome::{Outcome, Report};
use crate::sys;
use crate::thread_filters::ThreadFilters;

/// The time limit for making a machine whose pages must be requested.
const START_TIME: Duration = Duration::from_secs(30);
/// How long the server may take to supply all of the memory.
const SAVE_TIME: Duration = Duration::from_secs(600);

/// Failures between a machine and its page server.
#[derive(Debug, thiserror::Error)]
pub enum PageServerError {
    #[error("{path}: cannot reach the page server")]
    Connect { path: String, source: io::Error },
    #[error("cannot take hold of the guest's page faults; is userfaultfd allowed?")]
    Userfault(#[source] io::Error),
    #[error("cannot hand the guest's memory to the page server")]
    HandOver(#[source] io::Error),
    #[error("cannot watch the page server")]
    Watch(#[source] io::Error),
    #[error("the page server is gone, or did not supply the first pages in {} s", START_TIME.as_secs())]
    Lost,
}

impl PageServerError {
    /// Returns whose fault the error is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { .. } => ErrorKind::InvalidConfig,
            Self::Userfault(_) => ErrorKind::HostUnsupported,
            Self::HandOver(_) | Self::Watch(_) | Self::Lost => ErrorKind::HostResource,
        }
    }
}

impl From<PageServerError> for Error {
    fn from(error: PageServerError) -> Self {
        Self::new(error.kind(), "page server", error)
    }
}

/// One range of guest memory, with the field names of Firecracker's page servers.
#[derive(Serialize)]
struct Mapping {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: u64,
    /// In bytes, whatever the name says: page servers expect that.
    page_size_kib: u64,
}

/// The connection to a page server. Dropping it releases the memory; the vCPUs must have ended.
pub struct PageServer {
    shared: Arc<PageServerState>,
    watcher: Option<JoinHandle<()>>,
    devices: Option<DeviceHandle>,
}

struct PageServerState {
    faults: Userfault,
    phase: Mutex<Phase>,
    wake: EventFd,
}

enum Phase {
    /// The machine's owner requests pages, and must not wait forever.
    Starting,
    /// The machine runs: threads that wait for a page can be released, and the owner learns of the
    /// end.
    Running(Report),
    /// The owner reads all of the memory, and must not wait forever.
    Saving(Report, Instant),
    Lost,
    Over,
}

impl PageServer {
    /// Hands the faults of `guest`, of which no page is present, to the server at `path`. A thread
    /// that watches the server starts under its filter, if there are filters.
    pub fn connect(
        path: &Path,
        guest: &GuestMemory,
        filters: Option<Arc<ThreadFilters>>,
    ) -> Result<Self, PageServerError> {
        let socket = UnixStream::connect(path).map_err(|source| PageServerError::Connect {
            path: path.display().to_string(),
            source,
        })?;
        let faults = Userfault::for_missing(guest).map_err(PageServerError::Userfault)?;
        let mappings: Vec<_> = pages::host_regions(guest)
            .into_iter()
            .map(|(offset, address, size)| Mapping {
                base_host_virt_addr: address as u64,
                size,
                offset,
                page_size: PAGE,
                page_size_kib: PAGE,
            })
            .collect();
        hand_over(&socket, &mappings, &faults).map_err(PageServerError::HandOver)?;
        let wake = EventFd::new(EFD_NONBLOCK).map_err(PageServerError::Watch)?;
        let shared = Arc::new(PageServerState { faults, phase: Mutex::new(Phase::Starting), wake });
        let watched = shared.clone();
        let watcher = std::thread::Builder::new()
            .name("pvmm-pages".into())
            .spawn(move || match filters.map_or(Ok(()), |all| all.pages.install()) {
                Ok(()) => watched.watch(&socket),
                Err(error) => {
                    log::error!("page server: {error}");
                    watched.lost();
                }
            })
            .map_err(PageServerError::Watch)?;
        Ok(Self { shared, watcher: Some(watcher), devices: None })
    }

    /// Notes that the machine is made. From now on `report` is called at the server's end.
    pub fn started(
        &mut self,
        devices: DeviceHandle,
        report: Report,
    ) -> Result<(), PageServerError> {
        let mut phase = self.shared.phase();
        if matches!(*phase, Phase::Lost) {
            return Err(PageServerError::Lost);
        }
        *phase = Phase::Running(report);
        drop(phase);
        self.devices = Some(devices);
        self.shared.nudge();
        Ok(())
    }

    /// Notes that the owner reads all of the memory from here on.
    pub fn save_begins(&self) -> Result<(), PageServerError> {
        let late = Instant::now() + SAVE_TIME;
        self.shared.change(|phase| match phase {
            Phase::Running(report) => Phase::Saving(report, late),
            other => other,
        })
    }

    /// Ends [`Self::save_begins`]. Fails if a page that was read since did not come from the
    /// server.
    pub fn save_ends(&self) -> Result<(), PageServerError> {
        self.shared.change(|phase| match phase {
            Phase::Saving(report, _) => Phase::Running(report),
            other => other,
        })
    }

    /// Fails once the server is gone: devices may be waiting for a page that never comes.
    pub fn check(&self) -> Result<(), PageServerError> {
        match *self.shared.phase() {
            Phase::Lost => Err(PageServerError::Lost),
            _ => Ok(()),
        }
    }
}

fn hand_over(socket: &UnixStream, mappings: &[Mapping], faults: &Userfault) -> io::Result<()> {
    let message = serde_json::to_vec(mappings)?;
    socket.set_write_timeout(Some(START_TIME))?;
    let sent = socket.send_with_fd(message.as_slice(), faults.fd())?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

impl PageServerState {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, to: impl FnOnce(Phase) -> Phase) -> Result<(), PageServerError> {
        let mut phase = self.phase();
        // The lock is held, so nobody sees the value in between.
        *phase = to(std::mem::replace(&mut *phase, Phase::Over));
        let lost = matches!(*phase, Phase::Lost);
        drop(phase);
        self.nudge();
        if lost { Err(PageServerError::Lost) } else { Ok(()) }
    }

    /// Makes the watcher look at the phase.
    fn nudge(&self) {
        // Only a full counter refuses, and that wakes as well.
        let _ = self.wake.write(1);
    }

    fn watch(&self, socket: &UnixStream) {
        let late = Instant::now() + START_TIME;
        loop {
            let timeout = match *self.phase() {
                Phase::Starting => Some(late.saturating_duration_since(Instant::now())),
                Phase::Saving(_, late) => Some(late.saturating_duration_since(Instant::now())),
                Phase::Running(_) => None,
                Phase::Lost | Phase::Over => return,
            };
            let alive = match sys::wait_either(&self.wake, socket, timeout) {
                Ok((woken, spoken)) => {
                    if woken {
                        let _ = self.wake.read();
                    }
                    if spoken { still_there(socket) } else { woken }
                }
                Err(_) => false,
            };
            if !alive {
                return self.lost();
            }
        }
    }

    fn lost(&self) {
        let mut phase = self.phase();
        match std::mem::replace(&mut *phase, Phase::Lost) {
            // The owner may be waiting for a page. It continues with zeros, and gets the error
            // before it uses them.
            Phase::Starting => self.faults.release(),
            Phase::Running(report) => report(Outcome::MemoryLost),
            Phase::Saving(report, _) => {
                self.faults.release();
                report(Outcome::MemoryLost);
            }
            Phase::Over => *phase = Phase::Over,
            Phase::Lost => {}
        }
    }
}

/// Reads what the server sends, which means nothing. Returns whether the connection is open.
fn still_there(mut socket: &UnixStream) -> bool {
    let mut ignored = [0; 256];
    matches!(io::Read::read(&mut socket, &mut ignored), Ok(1..))
}

impl Drop for PageServer {
    fn drop(&mut self) {
        let lost = matches!(std::mem::replace(&mut *self.shared.phase(), Phase::Over), Phase::Lost);
        if let Some(devices) = self.devices.take().filter(|_| !lost) {
            // Requests of devices must finish with the right bytes. If the devices do not answer,
            // nothing more can be done.
            let _ = devices.quiesce_all();
        }
        self.shared.faults.release();
        self.shared.nudge();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

#[cfg(test)]
mod tests;
