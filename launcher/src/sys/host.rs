//! Host feature probes for `pvmm doctor`, each of which makes the system call that a VM would make.
//!
//! A device node or a /proc file can exist without working, so only the call's result counts.
#![allow(unsafe_code)] // Raw system calls and ioctls, each with its own note.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use pvmm_sandbox::sys::process::{self, Ended, Side};

fn answer(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// Takes ownership of a file descriptor that a call has just returned.
fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    // SAFETY: the call succeeded and returned a new descriptor that has no other owner.
    answer(result).map(|fd| unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Returns the running kernel's release, as in `6.12.0-1-amd64`.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Creates a tap device, which is removed when its descriptor closes.
pub fn make_tap() -> io::Result<()> {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: plain data, all zero is valid.
    let mut request: libc::ifreq = unsafe { zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"pvmmtest%d") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
    // SAFETY: the kernel reads and writes one ifreq, which outlives the call.
    answer(unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, &mut request) }.into()).map(drop)
}

/// Queries the generation of nftables' rules.
pub fn nftables() -> io::Result<()> {
    const NFT_MSG_GETGEN: u16 = 16;
    const NFNL_SUBSYS_NFTABLES: u16 = 10;
    // nlmsghdr {len, type, flags, seq, pid} then nfgenmsg {family, version, res_id}.
    let mut message = Vec::with_capacity(20);
    message.extend_from_slice(&20u32.to_ne_bytes());
    message.extend_from_slice(&(NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN).to_ne_bytes());
    message.extend_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    message.extend_from_slice(&[0; 12]);
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers.
    let socket =
        owned(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_NETFILTER) }.into())?;
    let patience = libc::timeval { tv_sec: 2, tv_usec: 0 };
    let mut reply = [0u8; 512];
    // SAFETY: every pointer is to a live value of the size given with it.
    let count = unsafe {
        let size = size_of::<libc::timeval>() as libc::socklen_t;
        let option = (&raw const patience).cast();
        let fd = socket.as_raw_fd();
        answer(libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, option, size).into())?;
        answer(libc::send(fd, message.as_ptr().cast(), message.len(), 0) as libc::c_long)?;
        answer(libc::recv(fd, reply.as_mut_ptr().cast(), reply.len(), 0) as libc::c_long)?
    };
    let reply = &reply[..count as usize];
    match reply.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]])) {
        Some(kind) if i32::from(kind) == libc::NLMSG_ERROR => {
            let error = reply.get(16..20).and_then(|bytes| bytes.try_into().ok());
            Err(io::Error::from_raw_os_error(-error.map_or(-libc::EIO, i32::from_ne_bytes)))
        }
        Some(_) => Ok(()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Creates a userfaultfd that also handles kernel faults, and negotiates its API.
pub fn userfaultfd() -> io::Result<()> {
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
    // SAFETY: no pointers.
    let made = owned(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) });
    let uffd = match made {
        Ok(uffd) => uffd,
        // Since Linux 6.1 there is a device for unprivileged use.
        Err(error) => {
            let device = File::open("/dev/userfaultfd").map_err(|_| error)?;
            // SAFETY: the argument is a plain flag word.
            let made = unsafe {
                libc::ioctl(
                    device.as_raw_fd(),
                    USERFAULTFD_IOC_NEW,
                    libc::O_CLOEXEC as libc::c_ulong,
                )
            };
            owned(made.into())?
        }
    };
    let mut api = [0xaa_u64, 0, 0];
    // SAFETY: the kernel reads and writes one uffdio_api: three words.
    answer(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) }.into()).map(drop)
}

/// Maps one 2 MiB huge page.
pub fn huge_page() -> io::Result<()> {
    const LENGTH: usize = 2 << 20;
    const MAP_HUGE_2MB: i32 = 21 << libc::MAP_HUGE_SHIFT;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | MAP_HUGE_2MB;
    // SAFETY: a new mapping at an address of the kernel's choice, unmapped before any use.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let map = libc::mmap(std::ptr::null_mut(), LENGTH, protection, flags, -1, 0);
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::munmap(map, LENGTH);
    }
    Ok(())
}

/// Creates an io_uring with one entry.
pub fn io_uring() -> io::Result<()> {
    // struct io_uring_params is 120 bytes, all zero for the defaults.
    let mut parameters = [0u64; 15];
    // SAFETY: the kernel reads and writes one io_uring_params, which outlives the call.
    owned(unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) }).map(drop)
}

/// Returns the ABI version of Landlock.
pub fn landlock_abi() -> io::Result<i64> {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    let none = std::ptr::null::<u8>();
    let flags = LANDLOCK_CREATE_RULESET_VERSION;
    // SAFETY: with this flag the kernel takes no attributes and makes no descriptor.
    answer(unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0usize, flags) })
}

/// Returns the type of the filesystem at `path`.
pub fn filesystem_type(path: &Path) -> io::Result<i64> {
    Ok(rustix::fs::statfs(path)?.f_type)
}

/// Returns the bytes that an ordinary user can still write to the filesystem at `path`.
pub fn free_space(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Clones one unnamed file into another.
pub fn reflink(dir: &Path) -> io::Result<()> {
    let nameless = || {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE)
            .mode(0o600)
            .open(dir)
    };
    let (from, to) = (nameless()?, nameless()?);
    io::Write::write_all(&mut &from, &[1; 4096])?;
    Ok(rustix::fs::ioctl_ficlone(&to, &from)?)
}

/// Creates a user namespace, in a child process because it cannot be left again.
pub fn user_namespace() -> io::Result<()> {
    match process::fork()? {
        Side::Child => {
            // SAFETY: no pointers; the process ends right after.
            let made = unsafe { libc::unshare(libc::CLONE_NEWUSER) };
            let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            process::leave_now(if made == 0 { 0 } else { errno })
        }
        Side::Parent(mut child) => match child.wait()? {
            Ended::Code(0) => Ok(()),
            Ended::Code(errno) => Err(io::Error::from_raw_os_error(errno)),
            Ended::Signal(_) => Err(io::ErrorKind::Interrupted.into()),
        },
    }
}
