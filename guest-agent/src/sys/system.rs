//! The guest as a whole: its names, clocks, randomness and disks.

use std::ffi::CStr;
use std::io::Result;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use super::check;

/// Returns the kernel's release and the host name.
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

/// Returns the time since boot.
pub fn uptime() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Adds random bytes to the kernel's random number generator, credits them in full, and reseeds it.
pub fn add_entropy(random: &OwnedFd, bytes: &[u8]) -> Result<()> {
    // The kernel's rand_pool_info: bits, bytes, then the bytes as whole words.
    let mut pool = vec![bytes.len() as u32 * 8, bytes.len() as u32];
    pool.extend(bytes.chunks(4).map(|chunk| {
        let mut word = [0; 4];
        word[..chunk.len()].copy_from_slice(chunk);
        u32::from_ne_bytes(word)
    }));
    // SAFETY: the header contains how many bytes follow it, and they do; the second call takes
    // none.
    unsafe {
        check(libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, pool.as_ptr()))?;
        check(libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG)).map(drop)
    }
}

/// Reads the processor's time stamp counter.
pub fn time_stamp_counter() -> u64 {
    // SAFETY: reads a register that every x86-64 processor has.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Sets the time of day; clocks that count time since boot do not change.
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

/// Writes all dirty data to the disks.
pub fn sync_disks() {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::sync() };
}

/// Returns the size of the filesystem at a path and the space that can still be written, in bytes.
pub fn disk_space(path: &CStr) -> Result<(u64, u64)> {
    // SAFETY: plain data filled by the call; the path is a C string that outlives it.
    let facts = unsafe {
        let mut facts: libc::statvfs = std::mem::zeroed();
        check(libc::statvfs(path.as_ptr(), &mut facts))?;
        facts
    };
    Ok((facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize))
}
