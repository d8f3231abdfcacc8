//! The nested host: a host with working KVM on a machine without it, under QEMU's emulation.
//!
//! QEMU's TCG emulates AMD's SVM with nested paging, so a stock Debian kernel in it uses the real
//! `kvm_amd`. The root of the outer machine is the root of the nested host, under a temporary
//! layer: every program that was built outside is there. QEMU, its sockets and its memory belong to
//! this process and end with it, even if it is killed.

pub mod background;
mod cpio;
pub mod frame;
pub mod image;
mod monitor;
pub mod qemu;
pub mod serve;
pub mod session;
mod vmlinux;

use std::collections::VecDeque;
use std::env;
use std::fs;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::sys::{self, READABLE, Waiting};
use crate::{cache, checkout};
use image::{Image, ImageError};
use monitor::Monitor;

/// The time between two heartbeats of the nested host.
pub const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);

/// A nested host that is silent for this long is lost, however busy the machine is.
const HEARTBEAT_DEADLINE: Duration = Duration::from_secs(90);

/// The time between two interrupts from outside.
///
/// Sometimes a nested host stops for good: interrupts are enabled and the timer's interrupt is
/// pending in the APIC, but the processor is not told to check, and only the handler of this
/// interrupt would set the next timer. The likely cause, not proven, is that QEMU's emulation of
/// SVM changes its word of pending interrupts without the lock that its timers hold. An interrupt
/// from a device makes the processor check again.
const INTERRUPT_EVERY: Duration = Duration::from_millis(100);

/// A boot takes about ten seconds, and several times that on a busy machine.
const BOOT_DEADLINE: Duration = Duration::from_secs(180);

const HEARTBEAT_PORT: u32 = 1;

/// The ports for commands. Each port serves one command at a time.
const SESSION_PORTS: std::ops::Range<u32> = 2..18;

/// How much console output is kept, to explain why a host died.
const CONSOLE_KEPT: usize = 8 << 10;

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("cannot create {0}")]
    Create(PathBuf, #[source] io::Error),
    #[error("cannot set up the channels to the nested host")]
    Channels(#[source] io::Error),
    #[error("cannot start qemu-system-x86_64")]
    Start(#[source] io::Error),
    #[error("the nested host did not come up within {} s; its console ended with:\n{console}",
        BOOT_DEADLINE.as_secs())]
    BootLate { console: String },
    #[error("the nested host died while booting; its console ended with:\n{console}")]
    BootDied { console: String },
    #[error("interrupted by signal {0}")]
    Interrupted(u8),
}

/// A folder of the outer machine that is visible in the nested host at the same path.
struct Share {
    path: PathBuf,
    kind: ShareKind,
}

/// How a share behaves in the nested host. The init of the nested host knows these words.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ShareKind {
    Current,
    Layered,
    Scratch,
}

impl ShareKind {
    fn word(self) -> &'static str {
        match self {
            ShareKind::Current => "current",
            ShareKind::Layered => "layered",
            ShareKind::Scratch => "scratch",
        }
    }
}

/// Returns the folders that need a share of their own, because the cache of the root share does not
/// notice a rebuild. Creates missing folders.
fn shares() -> Result<Vec<Share>, HostError> {
    let root = checkout::root();
    let mut shares = vec![
        Share { path: root.clone(), kind: ShareKind::Current },
        // Programs write files there, which must not reach the outer machine.
        Share { path: cache::dir(), kind: ShareKind::Layered },
        Share { path: checkout::scratch(), kind: ShareKind::Scratch },
    ];
    let target = env::var_os("CARGO_TARGET_DIR").map(|dir| root.join(dir));
    if let Some(path) = target.filter(|dir| !dir.starts_with(&root)) {
        shares.insert(0, Share { path, kind: ShareKind::Current });
    }
    for Share { path, .. } in &shares {
        fs::create_dir_all(path).map_err(|e| HostError::Create(path.clone(), e))?;
    }
    Ok(shares)
}

/// Returns a folder of sparse files in the cache. A share shows the files without their holes, so
/// each VM would copy gigabytes of zeros. The nested host makes these files itself in moments.
fn sparse_files() -> PathBuf {
    cache::dir().join("disks")
}

/// Whether the host is paused, and until when it was. Silence is no sign of a lost host while it is
/// paused.
enum Paused {
    Now,
    Until(Instant),
}

/// The rate of the clock (TSC) of a nested host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// The rate of the outer machine's clock, which QEMU passes on and cannot scale.
    #[default]
    Outer,
    /// 1 GHz: the clock counts instructions, of which each takes two nanoseconds. This host is
    /// slower than the other.
    OneGhz,
}

/// A running nested host, which is killed on drop.
pub struct NestedHost {
    qemu: Child,
    ports: Vec<UnixStream>,
    pulse: UnixStream,
    monitor: Mutex<Monitor>,
    paused: Arc<Mutex<Paused>>,
    console: Arc<Mutex<VecDeque<u8>>>,
}

impl NestedHost {
    /// Starts the nested host and waits until it serves commands.
    ///
    /// Must be called from the main thread: QEMU is killed when the calling thread ends.
    pub fn boot(image: &Image, signals: &PipeReader, clock: Clock) -> Result<Self, HostError> {
        let mut host = Self::start(image, clock)?;
        let until = Instant::now() + BOOT_DEADLINE;
        loop {
            let [beat, signalled] = sys::poll(
                [
                    Waiting { fd: Some(host.pulse.as_fd()), events: READABLE },
                    Waiting { fd: Some(signals.as_fd()), events: READABLE },
                ],
                Some(HEARTBEAT_EVERY),
            )
            .map_err(HostError::Channels)?;
            if signalled != 0
                && let Some(signal) = session::pending(signals)
                    .into_iter()
                    .find(|&signal| i32::from(signal) != session::RESIZED)
            {
                return Err(HostError::Interrupted(signal));
            }
            if beat != 0 {
                return match host.pulse.read(&mut [0; 64]) {
                    Ok(n) if n > 0 => Ok(host),
                    _ => Err(HostError::BootDied { console: host.console() }),
                };
            }
            if Instant::now() >= until {
                return Err(HostError::BootLate { console: host.console() });
            }
        }
    }

    fn start(image: &Image, clock: Clock) -> Result<Self, HostError> {
        let mut qemu = image.qemu.command();
        // Fast string instructions that move single bytes are disabled, so that kernels clear and
        // copy pages in larger pieces: an emulator handles each byte separately.
        let cpu = "max,-pku,-erms,-fsrm,-fsrs,-fzrm,+svm,+npt";
        qemu.args(["-M", "q35", "-accel", "tcg,tb-size=1024", "-cpu", cpu]);
        // There is one CPU, because with two, multi-threaded TCG and the kernel's patching of its
        // own code make the host oops. It polls when idle, because otherwise a boot sometimes
        // sleeps and never wakes, before there is a port that can interrupt it.
        qemu.args(["-m", "6144", "-smp", "1", "-nodefaults", "-no-reboot", "-nographic"]);
        qemu.args(["-serial", "stdio"]);
        qemu.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
        let mut words = String::from(
            "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr idle=poll \
             cryptomgr.notests init_on_alloc=0 audit=0",
        );

        match clock {
            // Under load, a kernel that measures the clock itself can be wrong by more than it
            // corrects later.
            Clock::Outer => words.push_str(&format!(" tsc_early_khz={}", sys::tsc_khz())),
            Clock::OneGhz => {
                qemu.args(["-icount", "shift=1,sleep=off"]);
            }
        }

        share(&mut qemu, "root", Path::new("/"), false);
        for (index, Share { path, kind }) in shares()?.into_iter().enumerate() {
            let tag = format!("share{index}");
            share(&mut qemu, &tag, &path, kind == ShareKind::Scratch);
            words.push_str(&format!(" nested_share={tag}:{}:{}", kind.word(), encode(&path)));
        }
        words.push_str(&format!(" nested_empty={}", encode(&sparse_files())));
        let program = checkout::program().map_err(HostError::Start)?;
        words.push_str(&format!(" nested_serve={}", encode(&program)));
        words.push_str(&format!(" nested_modules={}", encode(&image.modules)));
        qemu.args(["-append", &words]);

        qemu.args(["-device", "virtio-serial-pci,max_ports=31"]);
        let mut theirs: Vec<OwnedFd> = Vec::new();
        let mut channel = |number: u32| -> io::Result<UnixStream> {
            let (ours, other) = UnixStream::pair()?;
            let fd = other.as_raw_fd();
            qemu.args(["-chardev", &format!("socket,id=port{number},fd={fd}")]);
            qemu.args(["-device", &format!("virtserialport,nr={number},chardev=port{number}")]);
            theirs.push(other.into());
            Ok(ours)
        };
        let pulse = channel(HEARTBEAT_PORT).map_err(HostError::Channels)?;
        let ports = SESSION_PORTS
            .map(&mut channel)
            .collect::<Result<_, _>>()
            .map_err(HostError::Channels)?;

        let (monitor, other) = UnixStream::pair().map_err(HostError::Channels)?;
        qemu.args(["-chardev", &format!("socket,id=monitor,fd={}", other.as_raw_fd())]);
        qemu.args(["-mon", "chardev=monitor,mode=control"]);
        theirs.push(other.into());
        let monitor = Mutex::new(Monitor::new(monitor).map_err(HostError::Channels)?);

        sys::die_with_parent(&mut qemu, theirs.iter().map(|fd| fd.as_raw_fd()).collect());
        // QEMU has its own process group, so that Ctrl-C reaches the command and not QEMU.
        qemu.process_group(0);
        let (console_out, console_in) = io::pipe().map_err(HostError::Channels)?;
        let qemu = qemu
            .stdin(Stdio::null())
            .stdout(console_in.try_clone().map_err(HostError::Channels)?)
            .stderr(console_in)
            .spawn()
            .map_err(HostError::Start)?;
        let console = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&console);
        thread::spawn(move || keep_console(console_out, &kept));
        let paused = Arc::new(Mutex::new(Paused::Until(Instant::now())));
        Ok(NestedHost { qemu, ports, pulse, monitor, paused, console })
    }

    /// Returns the channel `index`, counted from 0. A channel carries one command at a time.
    pub fn port(&self, index: usize) -> io::Result<UnixStream> {
        self.ports.get(index).ok_or(io::ErrorKind::NotFound)?.try_clone()
    }

    pub fn port_count(&self) -> usize {
        self.ports.len()
    }

    pub fn qemu_pid(&self) -> u32 {
        self.qemu.id()
    }

    /// Starts a thread that interrupts the host regularly, and kills it when its heartbeat is lost.
    /// Every session then ends with [`session::End::HostLost`].
    pub fn watch(&self) -> io::Result<()> {
        let pulse = self.pulse.try_clone()?;
        pulse.set_read_timeout(Some(INTERRUPT_EVERY))?;
        pulse.set_write_timeout(Some(INTERRUPT_EVERY))?;
        let pid = self.qemu.id();
        let paused = Arc::clone(&self.paused);
        thread::Builder::new().name("watchdog".into()).spawn(move || {
            let mut pulse = pulse;
            let mut heard = Instant::now();
            loop {
                match pulse.read(&mut [0; 64]) {
                    Ok(n) if n > 0 => heard = Instant::now(),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    // QEMU has ended.
                    _ => break,
                }
                match *lock(&paused) {
                    Paused::Now => continue,
                    Paused::Until(at) if heard.max(at).elapsed() < HEARTBEAT_DEADLINE => {}
                    Paused::Until(_) => break,
                }
                // If the channel is full, the host is being interrupted often enough.
                let _ = pulse.write(&[0]);
            }
            // The owner collects the child only after this process is done with it, so the pid is
            // still that of the child.
            let _ = sys::kill(pid, libc::SIGKILL);
        })?;
        Ok(())
    }

    /// Stops the clock and the CPU of the host.
    pub fn pause(&self) -> io::Result<()> {
        *lock(&self.paused) = Paused::Now;
        lock(&self.monitor).pause()
    }

    pub fn resume(&self) -> io::Result<()> {
        lock(&self.monitor).resume()?;
        *lock(&self.paused) = Paused::Until(Instant::now());
        Ok(())
    }

    /// Returns the last output on the host's console.
    pub fn console(&self) -> String {
        let mut kept = lock(&self.console);
        String::from_utf8_lossy(kept.make_contiguous()).trim().to_string()
    }
}

impl Drop for NestedHost {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Locks a mutex, also if it is poisoned: no thread here leaves a value half changed when it
/// panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn share(qemu: &mut Command, tag: &str, path: &Path, writable: bool) {
    let mut option = std::ffi::OsString::from(format!("local,id={tag},path="));
    // In QEMU's options a comma in a value is doubled.
    option.push(std::ffi::OsStr::from_bytes(&path.as_os_str().as_bytes().iter().fold(
        Vec::new(),
        |mut bytes, &byte| {
            bytes.extend_from_slice(if byte == b',' { b",," } else { std::slice::from_ref(&byte) });
            bytes
        },
    )));
    option.push(",security_model=none,multidevs=remap");
    if !writable {
        option.push(",readonly=on");
    }
    qemu.arg("-fsdev").arg(option);
    qemu.args(["-device", &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")]);
}

/// Encodes a path as one word of the kernel command line.
fn encode(path: &Path) -> String {
    let mut word = String::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' | b'+' => {
                word.push(char::from(byte));
            }
            _ => word.push_str(&format!("%{byte:02x}")),
        }
    }
    word
}

fn keep_console(mut from: PipeReader, kept: &Mutex<VecDeque<u8>>) {
    let mut chunk = [0; 1024];
    while let Ok(n) = from.read(&mut chunk)
        && n > 0
    {
        let mut kept = lock(kept);
        kept.extend(&chunk[..n]);
        let excess = kept.len().saturating_sub(CONSOLE_KEPT);
        kept.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encode_path_with_space_and_colon_is_one_word() {
        assert_eq!(encode(Path::new("/a b/c:d")), "/a%20b/c%3ad");
    }
}
