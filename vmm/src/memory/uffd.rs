//! userfaultfd: page faults of guest memory in the hands of a process.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use pvmm_devices::GuestMemory;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};
use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr, ioctl_iowr_nr};

use super::pages;

const UFFD: u32 = 0xaa;
ioctl_io_nr!(USERFAULTFD_IOC_NEW, UFFD, 0x00);
ioctl_iowr_nr!(UFFDIO_API, UFFD, 0x3f, Api);
ioctl_iowr_nr!(UFFDIO_REGISTER, UFFD, 0x00, Register);
ioctl_ior_nr!(UFFDIO_UNREGISTER, UFFD, 0x01, Range);

const API_VERSION: u64 = 0xaa;
const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const MODE_MISSING: u64 = 1 << 0;
const MODE_WP: u64 = 1 << 1;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// Guest memory whose faults come to a descriptor.
pub struct Userfault {
    file: File,
    ranges: Vec<Range>,
}

impl Userfault {
    /// Missing pages are requested over the descriptor, and dropped pages are reported.
    pub fn for_missing(guest: &GuestMemory) -> io::Result<Self> {
        Self::new(guest, FEATURE_EVENT_REMOVE, MODE_MISSING)
    }

    /// Nothing arrives at the descriptor, but the kernel maps no neighbours of a page that is read.
    pub fn without_fault_around(guest: &GuestMemory) -> io::Result<Self> {
        Self::new(guest, FEATURE_WP_ASYNC, MODE_WP)
    }

    /// Nothing arrives at the descriptor, but the kernel tracks which pages are written.
    pub fn for_written(guest: &GuestMemory) -> io::Result<Self> {
        Self::new(guest, FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED, MODE_WP)
    }

    fn new(guest: &GuestMemory, features: u64, mode: u64) -> io::Result<Self> {
        let file = open()?;
        let mut api = Api { api: API_VERSION, features, ioctls: 0 };
        // SAFETY: the kernel reads and writes this struct only.
        check(unsafe { ioctl_with_mut_ref(&file, UFFDIO_API(), &mut api) })?;
        let mut ranges = Vec::new();
        for (_, address, len) in pages::host_regions(guest) {
            let range = Range { start: address as u64, len };
            let mut register = Register { range, mode, ioctls: 0 };
            // SAFETY: the kernel reads and writes this struct only; what faults there is guest
            // memory, which nobody reads by reference.
            check(unsafe { ioctl_with_mut_ref(&file, UFFDIO_REGISTER(), &mut register) })?;
            ranges.push(range);
        }
        Ok(Self { file, ranges })
    }

    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Releases the memory: missing pages read as zeros, and threads that waited for one continue.
    pub fn release(&self) {
        for range in &self.ranges {
            // A range that is gone needs no release.
            // SAFETY: the kernel only reads the struct.
            let _ = unsafe { ioctl_with_ref(&self.file, UFFDIO_UNREGISTER(), range) };
        }
    }
}

/// A new descriptor. KVM faults in the kernel's name, so one for a program's own faults is not
/// enough.
fn open() -> io::Result<File> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: no memory is passed.
    let mut fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) } as RawFd;
    if fd < 0 {
        let refused = io::Error::last_os_error();
        // Those who may not make one directly may have been given the device.
        let device = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
        let Ok(device) = device else { return Err(refused) };
        // SAFETY: the kernel takes the flags as a number.
        fd = unsafe { ioctl_with_val(&device, USERFAULTFD_IOC_NEW(), flags as u64) };
    }
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else has.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn check(result: i32) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
