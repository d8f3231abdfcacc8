//! Thin safe faces of the system calls that the agent's loop is made of.
//! The standard library has no epoll, signalfd, wait4 or vsock; their `unsafe` lives here alone.
#![allow(unsafe_code)] // system calls on plain data, each with its own note

pub mod inotify;
pub mod session;
pub mod tcp;

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Turns the -1 of a system call into its errno.
pub fn check(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}

fn check_len(result: isize) -> Result<usize> {
    usize::try_from(result).map_err(|_| Error::last_os_error())
}

fn own(result: libc::c_int) -> Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An epoll instance.
pub struct Epoll(OwnedFd);

/// What epoll has to say of one descriptor.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    pub token: u64,
    pub readable: bool,
    pub writable: bool,
    /// The other end is closed; what is left can still be read.
    pub hung_up: bool,
}

impl Epoll {
    pub fn new() -> Result<Self> {
        // SAFETY: takes no pointer.
        own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Self)
    }

    /// Watches a descriptor for edges of readiness, both ways, until it is closed.
    pub fn watch_edges(&self, fd: &OwnedFd, token: u64) -> Result<()> {
        let interest = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        self.add(fd.as_raw_fd(), interest, token)
    }

    /// Watches a descriptor for as long as it is readable.
    pub fn watch_level(&self, fd: &OwnedFd, token: u64) -> Result<()> {
        self.add(fd.as_raw_fd(), libc::EPOLLIN, token)
    }

    fn add(&self, fd: RawFd, interest: libc::c_int, token: u64) -> Result<()> {
        match self.control(libc::EPOLL_CTL_ADD, fd, interest, token) {
            // A closed copy of a descriptor leaves its entry behind while another copy lives, and
            // this one got its number.
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {
                self.control(libc::EPOLL_CTL_MOD, fd, interest, token)
            }
            other => other,
        }
    }

    fn control(&self, how: i32, fd: RawFd, interest: libc::c_int, token: u64) -> Result<()> {
        let mut event = libc::epoll_event { events: interest as u32, u64: token };
        // SAFETY: `event` outlives the call.
        let result = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), how, fd, &mut event) };
        check(result).map(drop)
    }

    /// Waits for events, for ever without a timeout.
    pub fn wait(&self, timeout: Option<Duration>, ready: &mut Vec<Ready>) -> Result<()> {
        const BATCH: usize = 64;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        // Rounded up, so that a deadline has passed when its timeout has.
        let millis = timeout.map_or(-1, |left| {
            left.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as libc::c_int
        });
        // SAFETY: `events` has room for BATCH events.
        let result = unsafe {
            libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), BATCH as i32, millis)
        };
        let count = match check(result) {
            Ok(count) => count as usize,
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => 0,
            Err(e) => return Err(e),
        };
        ready.clear();
        ready.extend(events[..count].iter().map(|event| {
            let bits = event.events as libc::c_int;
            let closed = libc::EPOLLHUP | libc::EPOLLERR;
            Ready {
                token: event.u64,
                readable: bits & (libc::EPOLLIN | libc::EPOLLRDHUP | closed) != 0,
                writable: bits & (libc::EPOLLOUT | closed) != 0,
                hung_up: bits & (libc::EPOLLRDHUP | closed) != 0,
            }
        }));
        Ok(())
    }
}

/// A pipe, closed on exec; (read end, write end).
pub fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    // SAFETY: `ends` has room for the two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: pipe2 has made both for us.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// Has a socket become readable only when it has so many bytes; some kinds of socket do not heed it.
pub fn set_low_water(socket: &OwnedFd, bytes: u32) {
    let (value, len) = (bytes as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
    // SAFETY: the kernel reads one int.
    let _ = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len)
    };
}

/// Lets a pipe hold so many bytes, if the kernel allows this user that many.
pub fn widen_pipe(fd: &OwnedFd, bytes: u32) {
    // SAFETY: fcntl with F_SETPIPE_SZ takes no pointer.
    let _ = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETPIPE_SZ, bytes as libc::c_int) };
}

/// Moves up to `most` bytes between a file and a pipe within the kernel; EINVAL where it cannot.
pub fn splice(from: &File, to: &File, most: usize) -> Result<usize> {
    loop {
        let (null, from, to) = (std::ptr::null_mut(), from.as_raw_fd(), to.as_raw_fd());
        // SAFETY: without offsets of ours there is no pointer that is followed.
        let moved = check_len(unsafe { libc::splice(from, null, to, null, most, 0) });
        match moved {
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            other => return other,
        }
    }
}

/// Makes reads and writes return at once. The flag belongs to this end of a pipe alone.
pub fn set_nonblocking(fd: &OwnedFd) -> Result<()> {
    // SAFETY: fcntl with F_GETFL and F_SETFL takes no pointer.
    unsafe {
        let flags = check(libc::fcntl(fd.as_raw_fd(), libc::F_GETFL))?;
        check(libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK)).map(drop)
    }
}

/// Appends up to `most` bytes from `fd` to `buffer`.
pub fn read_onto(fd: &OwnedFd, buffer: &mut Vec<u8>, most: usize) -> Result<usize> {
    buffer.reserve(most);
    let old = buffer.len();
    loop {
        let spare = &mut buffer.spare_capacity_mut()[..most];
        // SAFETY: `spare` is writable memory of `most` bytes.
        let read =
            check_len(unsafe { libc::read(fd.as_raw_fd(), spare.as_mut_ptr().cast(), most) });
        match read {
            Ok(count) => {
                // SAFETY: the kernel has filled `count` bytes after the old length.
                unsafe { buffer.set_len(old + count) };
                return Ok(count);
            }
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Writes once. The process blocks SIGPIPE, so a closed pipe is only an error.
pub fn write_once(fd: &OwnedFd, bytes: &[u8]) -> Result<usize> {
    loop {
        // SAFETY: `bytes` is readable for its length.
        let wrote =
            check_len(unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) });
        match wrote {
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            other => return other,
        }
    }
}

/// Bytes that wait in a pipe.
pub fn waiting_bytes(fd: &OwnedFd) -> u64 {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &mut count) };
    if result < 0 { 0 } else { count.max(0) as u64 }
}

/// A counter that wakes the loop.
pub fn event_counter() -> Result<OwnedFd> {
    // SAFETY: takes no pointer.
    own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Turns these signals, now blocked, into reads; also blocks SIGPIPE.
pub fn signal_reader(signals: &[libc::c_int]) -> Result<OwnedFd> {
    // SAFETY: a sigset is plain data that sigemptyset initialises before any other use; the
    // pointers live through the calls.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in signals {
            libc::sigaddset(&mut set, *signal);
        }
        let read = own(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        libc::sigaddset(&mut set, libc::SIGPIPE);
        match libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut()) {
            0 => Ok(read),
            errno => Err(Error::from_raw_os_error(errno)),
        }
    }
}

/// Gives every signal its default action, so that what we start inherits no surprises.
pub fn default_signals() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: SIG_DFL installs no code. KILL, STOP and the two that the C library keeps for
        // itself are refused, which is fine.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// The next signal, if one waits.
pub fn next_signal(reader: &OwnedFd) -> Option<libc::c_int> {
    let mut info = Vec::new();
    let len = size_of::<libc::signalfd_siginfo>();
    match read_onto(reader, &mut info, len) {
        Ok(count) if count == len => {
            let number: [u8; 4] = *info.first_chunk()?;
            Some(u32::from_ne_bytes(number) as libc::c_int)
        }
        _ => None,
    }
}

/// A child that has died.
pub struct Reaped {
    pub pid: libc::pid_t,
    pub status: libc::c_int,
    pub usage: libc::rusage,
}

/// Collects one dead child, if there is one.
pub fn reap() -> Option<Reaped> {
    let mut status = 0;
    // SAFETY: rusage is plain data for which zeroes are a value.
    let mut usage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers live through the call.
    let pid = unsafe { libc::wait4(-1, &mut status, libc::WNOHANG, &mut usage) };
    (pid > 0).then_some(Reaped { pid, status, usage })
}

/// Sends a signal to a process, or with a negative number to a group.
pub fn kill(pid: libc::pid_t, signal: libc::c_int) -> Result<()> {
    // SAFETY: takes no pointer.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Our own effective user.
pub fn user_id() -> u32 {
    // SAFETY: takes no pointer and cannot fail.
    unsafe { libc::geteuid() }
}

/// Adopt orphans of what we start, so that they are reaped also when we are not PID 1.
pub fn become_subreaper() -> Result<()> {
    // SAFETY: takes no pointer.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
}

/// One heap for all threads: a heap of its own for each short-lived file worker would dirty pages.
pub fn share_one_heap() {
    // SAFETY: sets a parameter of the allocator.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Lifts the limit of open files and gives back the one that was.
pub fn raise_open_files(target: u64) -> libc::rlimit {
    let mut old = libc::rlimit { rlim_cur: 1024, rlim_max: 4096 };
    // SAFETY: the pointers live through the calls.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut old);
        let wish = libc::rlimit { rlim_cur: target, rlim_max: old.rlim_max.max(target) };
        if libc::setrlimit(libc::RLIMIT_NOFILE, &wish) < 0 {
            let all = libc::rlimit { rlim_cur: old.rlim_max, rlim_max: old.rlim_max };
            libc::setrlimit(libc::RLIMIT_NOFILE, &all);
        }
    }
    old
}

/// Opens a path with flags of ours; always closed on exec.
pub fn open(path: &CStr, flags: libc::c_int, mode: libc::mode_t) -> Result<OwnedFd> {
    // SAFETY: `path` is a C string that outlives the call.
    own(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, mode) })
}

/// Renames; with `no_replace`, not over something that is there.
pub fn rename(from: &Path, to: &Path, no_replace: bool) -> Result<()> {
    let from = CString::new(from.as_os_str().as_bytes())?;
    let to = CString::new(to.as_os_str().as_bytes())?;
    let flags = if no_replace { libc::RENAME_NOREPLACE } else { 0 };
    // SAFETY: two C strings that outlive the call.
    check(unsafe {
        libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags)
    })
    .map(drop)
}

/// Listens on a vsock port.
pub fn vsock_listen(port: u32) -> Result<OwnedFd> {
    let socket = vsock_socket(libc::SOCK_NONBLOCK)?;
    let address = vsock_address(libc::VMADDR_CID_ANY, port);
    // SAFETY: the address is a sockaddr_vm of the size passed.
    unsafe {
        check(libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_vm>() as u32,
        ))?;
        check(libc::listen(socket.as_raw_fd(), 64))?;
    }
    Ok(socket)
}

/// Connects to a vsock port; the kernel gives up after two seconds.
pub fn vsock_dial(cid: u32, port: u32) -> Result<OwnedFd> {
    let socket = vsock_socket(0)?;
    let address = vsock_address(cid, port);
    // SAFETY: the address is a sockaddr_vm of the size passed.
    check(unsafe {
        libc::connect(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_vm>() as u32,
        )
    })?;
    Ok(socket)
}

/// Takes a vsock connection; (socket, the peer's CID).
pub fn vsock_accept(listener: &OwnedFd) -> Result<(OwnedFd, u32)> {
    let mut address = vsock_address(0, 0);
    let mut len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: address and length live through the call and agree.
    let socket = own(unsafe {
        libc::accept4(
            listener.as_raw_fd(),
            (&raw mut address).cast(),
            &mut len,
            libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
        )
    })?;
    Ok((socket, address.svm_cid))
}

/// Takes a connection from a Unix socket.
pub fn unix_accept(listener: &OwnedFd) -> Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: null says that the peer's address is not wanted.
    own(unsafe {
        libc::accept4(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags)
    })
}

fn vsock_socket(flags: libc::c_int) -> Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags;
    // SAFETY: takes no pointer.
    own(unsafe { libc::socket(libc::AF_VSOCK, kind, 0) })
}

fn vsock_address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: a sockaddr_vm is plain data for which zeroes are a value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

/// The kernel's release and the host name.
pub fn uname() -> (String, String) {
    // SAFETY: utsname is plain data, filled with C strings by the call.
    let names = unsafe {
        let mut names: libc::utsname = std::mem::zeroed();
        libc::uname(&mut names);
        names
    };
    (text(&names.release), text(&names.nodename))
}

fn text(field: &[libc::c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Time since boot.
pub fn uptime() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

/// What commands run with: neither before nor behind anybody.
pub const ORDINARY_PRIORITY: libc::c_int = 0;
const AGENT_PRIORITY: libc::c_int = -15;

/// Gives the agent the processor before the commands it runs. Without the right to, it does without.
pub fn put_before_commands() {
    // SAFETY: plain numbers; zero means this process.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, AGENT_PRIORITY) };
}

const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Mixes random bytes into the kernel's generator, counts them in full, and makes it start afresh.
pub fn add_entropy(random: &OwnedFd, bytes: &[u8]) -> Result<()> {
    // The kernel's rand_pool_info: bits, bytes, then the bytes as whole words.
    let mut pool = vec![bytes.len() as u32 * 8, bytes.len() as u32];
    pool.extend(bytes.chunks(4).map(|chunk| {
        let mut word = [0; 4];
        word[..chunk.len()].copy_from_slice(chunk);
        u32::from_ne_bytes(word)
    }));
    // SAFETY: the header says how many bytes follow it, and they do; the second call takes none.
    unsafe {
        check(libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, pool.as_ptr()))?;
        check(libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG)).map(drop)
    }
}

/// What the processor's time stamp counter shows.
pub fn time_stamp_counter() -> u64 {
    // SAFETY: reads a register that every x86-64 processor has.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Sets the time of day; what counts time since boot does not notice.
pub fn set_clock(unix_ns: u64) -> Result<()> {
    let time = libc::timespec {
        tv_sec: (unix_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (unix_ns % 1_000_000_000) as libc::c_long,
    };
    // SAFETY: the pointer lives through the call.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) }).map(drop)
}

pub fn set_hostname(name: &str) -> Result<()> {
    // SAFETY: the pointer and the length are of one string.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }).map(drop)
}

/// Writes everything to the disks.
pub fn sync_disks() {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::sync() };
}

/// Where the next data of a file begins; none where only a hole is left.
pub fn next_data(file: &std::fs::File, from: u64) -> Result<Option<u64>> {
    seek_for(file, from, libc::SEEK_DATA)
}

/// Where the next hole of a file begins; its end counts as one.
pub fn next_hole(file: &std::fs::File, from: u64) -> Result<Option<u64>> {
    seek_for(file, from, libc::SEEK_HOLE)
}

fn seek_for(file: &std::fs::File, from: u64, whence: libc::c_int) -> Result<Option<u64>> {
    let from = libc::off_t::try_from(from).unwrap_or(libc::off_t::MAX);
    // SAFETY: takes no pointer.
    let found = unsafe { libc::lseek(std::os::fd::AsRawFd::as_raw_fd(file), from, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            e => Err(e),
        },
    }
}

/// Moves behind the last record of a log.
pub fn seek_end(fd: RawFd) {
    // SAFETY: takes no pointer. Where it fails, old records are read, and are only old.
    unsafe { libc::lseek(fd, 0, libc::SEEK_END) };
}

/// Bytes of the filesystem at a path: all, and those that can still be written.
pub fn disk_space(path: &CStr) -> Result<(u64, u64)> {
    // SAFETY: plain data filled by the call; the path is a C string that outlives it.
    let facts = unsafe {
        let mut facts: libc::statvfs = std::mem::zeroed();
        check(libc::statvfs(path.as_ptr(), &mut facts))?;
        facts
    };
    Ok((facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize))
}
