//! Shuts the guest down: asks processes to end, kills them, writes disks out, switches off.
//!
//! It never returns, and no step can wait forever.
#![allow(unsafe_code)] // sync, reboot, wait4

use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use pvmm_guest_agent::message::{Shutdown, ShutdownHow};

use super::boot::System;
use crate::{mounts, sys};

const DEFAULT_GRACE: Duration = Duration::from_secs(3);
const MAX_GRACE: Duration = Duration::from_secs(60);
/// The time limit for killed processes to end.
const KILL_TIME: Duration = Duration::from_secs(2);
/// Pseudo-filesystems of the kernel, which need no unmounting.
const VIEWS: [&str; 3] = ["/proc", "/sys", "/dev"];

pub fn shut_down(wish: Shutdown, system: &System) -> ! {
    let grace = wish.grace_ms.map_or(DEFAULT_GRACE, Duration::from_millis).min(MAX_GRACE);
    // -1 means every process but this one.
    let _ = sys::kill(-1, libc::SIGTERM);
    let _ = sys::kill(-1, libc::SIGCONT);
    if !all_gone(grace) {
        let _ = sys::kill(-1, libc::SIGKILL);
        all_gone(KILL_TIME);
    }
    write_disks_out(system);
    let how = match wish.how {
        ShutdownHow::Poweroff => libc::RB_POWER_OFF,
        ShutdownHow::Reboot => libc::RB_AUTOBOOT,
    };
    loop {
        // SAFETY: takes no pointer.
        unsafe { libc::reboot(how) };
        sleep(Duration::from_secs(1));
    }
}

/// Reaps until there is no child left; every process of the guest becomes one in the end.
fn all_gone(patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    let mut nap = Duration::from_millis(1);
    loop {
        // SAFETY: null means that neither status nor usage is wanted.
        let result =
            unsafe { libc::wait4(-1, std::ptr::null_mut(), libc::WNOHANG, std::ptr::null_mut()) };
        match result {
            0 if Instant::now() >= deadline => return false,
            0 => {
                sleep(nap);
                nap = (nap * 2).min(Duration::from_millis(20));
            }
            pid if pid > 0 => {}
            _ => return true,
        }
    }
}

fn write_disks_out(system: &System) {
    // SAFETY: takes nothing.
    unsafe { libc::sync() };
    for target in mounted().iter().rev() {
        let view = VIEWS.iter().any(|view| Path::new(target).starts_with(view));
        if target != "/" && !view {
            let _ = mounts::unmount(Path::new(target));
        }
    }
    let _ = mounts::make_read_only("/");
    if let Some(upper) = &system.upper {
        let _ = mounts::make_read_only(&format!("/proc/self/fd/{}", upper.as_raw_fd()));
    }
    // SAFETY: takes nothing.
    unsafe { libc::sync() };
}

/// Returns all mount points, in the order of mounting.
fn mounted() -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    table.lines().filter_map(|line| line.split(' ').nth(1)).map(str::to_owned).collect()
}
