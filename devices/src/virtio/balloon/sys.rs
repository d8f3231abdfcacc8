//! The one call that gives guest memory back to the host; the unsafe file of this device.
#![allow(unsafe_code)]

use std::io;

use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

use super::config::PAGE_SIZE;
use crate::GuestMemory;

/// Drops whole pages of guest memory. They then read as the content below the private mapping, or
/// as zeros in a shared file.
pub fn release(memory: &GuestMemory, address: GuestAddress, len: u64) -> io::Result<()> {
    let len = usize::try_from(len).map_err(io::Error::other)?;
    // One slice per memory region, each checked to be inside it.
    let slices = memory.get_slices(address, len, Permissions::Write).map_err(io::Error::other)?;
    for slice in slices {
        let slice = slice.map_err(io::Error::other)?;
        let guard = slice.ptr_guard_mut();
        let (start, len) = (guard.as_ptr(), guard.len());
        if !(start as u64 | len as u64).is_multiple_of(PAGE_SIZE) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // A page of a shared file is only freed by a hole in the file; MADV_REMOVE is refused
        // elsewhere.
        // SAFETY: the range lies in one mapping of guest memory, which stays mapped while `memory`
        // is borrowed. Its content may change at any time anyway, because the guest owns it, and no
        // reference into it exists.
        let advise = |advice| unsafe { libc::madvise(start.cast(), len, advice) };
        if advise(libc::MADV_REMOVE) != 0 && advise(libc::MADV_DONTNEED) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
