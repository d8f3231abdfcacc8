//! Loads the kernel modules in an initramfs, in the order that it gives.
//!
//! pvmm's own kernel needs none; a distribution's kernel has even its disk driver in a module.
#![allow(unsafe_code)] // finit_module

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;

use crate::sys::check;

const FOLDER: &str = "/modules";
const COMPRESSED: libc::c_uint = 4;

/// Loads every module named in /modules/order: a file name per line, followed by parameters.
///
/// A module that cannot be loaded is reported on the console and does not end the boot: a later
/// step that needs it will fail with its own message.
pub fn load_all() {
    let Ok(order) = fs::read_to_string(format!("{FOLDER}/order")) else { return };
    for line in order.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (name, parameters) = line.split_once(' ').unwrap_or((line, ""));
        match load(name, parameters) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => {
                let _ = writeln!(io::stderr(), "pvmm-agent: cannot load module {name}: {e}");
            }
            Ok(()) => {}
        }
    }
}

fn load(name: &str, parameters: &str) -> io::Result<()> {
    let file = File::open(format!("{FOLDER}/{name}"))
        .or_else(|_| File::open(format!("{FOLDER}/{name}.ko")))?;
    let parameters = CString::new(parameters)?;
    let packed = [".xz", ".zst", ".gz"].iter().any(|ending| name.ends_with(ending));
    let flags = if packed { COMPRESSED } else { 0 };
    // SAFETY: an open file and a C string, both alive through the call.
    let result = unsafe {
        libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), parameters.as_ptr(), flags)
    };
    check(result as libc::c_int).map(drop)
}
