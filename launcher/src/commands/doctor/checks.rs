//! The checks of `pvmm doctor`: one function per row of the table.
//!
//! Each queries the host through `sys::host` or the library; wherever possible it makes the actual
//! system call instead of relying on the existence of a file.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pvmm::config::MAX_VCPUS;
use pvmm::kvm::host::{self as kvm, ProbeError};
use pvmm_images::Cache;

use super::{Check, Status};
use crate::exit::{Failure, io_text};
use crate::output::bytes;
use crate::sys::host;
use pvmm_sandbox::jail;
use pvmm_sandbox::sys::process;
use pvmm_sandbox::vm_dir::Base;

const NO_CACHE: &str = "set XDG_CACHE_HOME to a directory that you can write to";

/// Runs every check, in the order of the table: requirements first, then optional features.
pub fn all() -> Vec<Check> {
    // The namespace check forks, so it must run before the KVM probe starts a thread.
    let namespaces = user_namespaces();
    let cache = Cache::open();
    let cache = cache.as_ref().map(Cache::root).map_err(|error| with_causes(error));
    vec![
        kvm(),
        kernel(),
        memory(),
        runtime_directory(),
        disk(&cache),
        reflink(&cache),
        template_tools(),
        namespaces,
        jail_user(),
        tun(),
        nftables(),
        cgroups(),
        userfaultfd(),
        huge_pages(),
        io_uring(),
        landlock(),
    ]
}

fn ok(name: &'static str, detail: impl Into<String>) -> Check {
    Check { name, status: Status::Ok, detail: detail.into(), fix: None, needed_for: "" }
}

fn lacking(
    name: &'static str,
    needed_for: &'static str,
    detail: impl Into<String>,
    fix: impl Into<String>,
) -> Check {
    let (detail, fix) = (detail.into(), Some(fix.into()));
    Check { name, status: Status::Lacking, detail, fix, needed_for }
}

fn missing(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Check {
    let (detail, fix) = (detail.into(), Some(fix.into()));
    Check { name, status: Status::Missing, detail, fix, needed_for: "every VM" }
}

fn kvm() -> Check {
    let error = match kvm::probe() {
        Ok(host) => {
            let vcpus = host.max_vcpus.min(MAX_VCPUS as usize);
            let detail = format!("{} runs guest code; up to {vcpus} vCPUs in a VM", host.backend);
            return ok("kvm", detail);
        }
        Err(error) => error,
    };
    let fix = match &error {
        ProbeError::NoDevice => {
            "enable VT-x or AMD-V in the firmware (or nested virtualization in the outer \
             hypervisor), then: modprobe kvm_intel or kvm_amd"
        }
        ProbeError::NoPermission(_) => {
            "join the group that owns it: usermod -aG kvm $USER, then log in again"
        }
        ProbeError::Open(_) | ProbeError::CreateVm { .. } | ProbeError::SetUp { .. } => {
            "see 'dmesg | grep -i kvm'; another hypervisor may hold the CPU's virtualization"
        }
        ProbeError::GuestFailed { .. } | ProbeError::GuestHung { .. } => {
            "use a host with VT-x or AMD-V: this one's KVM cannot run an unmodified guest"
        }
    };
    missing("kvm", with_causes(&error), fix)
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

fn kernel() -> Check {
    const OLDEST: (u32, u32) = (5, 10);
    let release = host::kernel_release();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= OLDEST => ok("kernel", release),
        _ => lacking("kernel", "running as tested", release, "use Linux 5.10 or newer"),
    }
}

fn memory() -> Check {
    const COMFORT: u64 = 1 << 30;
    const LEAST: u64 = 256 << 20;
    let Some(free) = meminfo("MemAvailable").map(|kib| kib << 10) else {
        return lacking("memory", "knowing what fits", "/proc/meminfo does not say", "mount /proc");
    };
    let detail = format!("{} available", bytes(free));
    match free {
        COMFORT.. => ok("memory", detail),
        LEAST.. => lacking(
            "memory",
            "the default of 512M per VM",
            detail,
            "free some, or start smaller VMs: pvmm run --memory 128M",
        ),
        _ => missing("memory", detail, "free at least 256 MiB"),
    }
}

/// Reads a field of /proc/meminfo, in KiB or pages.
fn meminfo(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

fn runtime_directory() -> Check {
    let base = Base::open();
    match base.and_then(|base| base.try_out().map(|()| base)) {
        Ok(base) => ok("runtime dir", base.path().display().to_string()),
        Err(error) => {
            let failure = Failure::from(error);
            let fix = "set PVMM_RUNTIME_DIR to a directory of your own";
            missing("runtime dir", failure.message, failure.hint.as_deref().unwrap_or(fix))
        }
    }
}

/// Returns the nearest existing ancestor: the cache may not have been created yet.
fn existing(path: &Path) -> PathBuf {
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

fn disk(cache: &Result<&Path, String>) -> Check {
    const COMFORT: u64 = 2 << 30;
    let needed_for = "kernels, templates and what guests write";
    let fix = "free some space, or set XDG_CACHE_HOME to a larger filesystem";
    let cache = match cache {
        Ok(cache) => cache,
        Err(why) => return lacking("cache disk", needed_for, why, NO_CACHE),
    };
    match host::free_space(&existing(cache)) {
        Ok(free) if free >= COMFORT => {
            ok("cache disk", format!("{} free for {}", bytes(free), cache.display()))
        }
        Ok(free) => {
            let detail = format!("{} free for {}", bytes(free), cache.display());
            lacking("cache disk", needed_for, detail, fix)
        }
        Err(error) => lacking(
            "cache disk",
            needed_for,
            format!("{}: {}", cache.display(), io_text(&error)),
            fix,
        ),
    }
}

fn reflink(cache: &Result<&Path, String>) -> Check {
    let needed_for = "copies of disks in no time; without it guests write to an overlay";
    let fix = "put the cache (XDG_CACHE_HOME) on XFS or btrfs";
    let cache = match cache {
        Ok(cache) => cache,
        Err(why) => return lacking("reflink", needed_for, why, NO_CACHE),
    };
    let dir = existing(cache);
    match host::reflink(&dir) {
        Ok(()) => ok("reflink", format!("works in {}", dir.display())),
        Err(error) => {
            lacking("reflink", needed_for, format!("{}: {}", dir.display(), io_text(&error)), fix)
        }
    }
}

fn template_tools() -> Check {
    let needed_for = "'pvmm template build' and the first 'pvmm run'";
    // The PATH of an ordinary user may lack the sbin folders.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/local/sbin:/usr/sbin:/sbin";
    let runs = |tool: &str, flag: &str| {
        let mut command = Command::new(tool);
        command.arg(flag).env("PATH", &path);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let tools = [
        ("apt-get", "--version", "apt"),
        ("dpkg-deb", "--version", "dpkg"),
        ("mke2fs", "-V", "e2fsprogs"),
    ];
    let absent: Vec<_> = tools.iter().filter(|(tool, flag, _)| !runs(tool, flag)).collect();
    if absent.is_empty() {
        return ok("template tools", "apt-get, dpkg-deb and mke2fs run");
    }
    let names: Vec<_> = absent.iter().map(|(tool, ..)| *tool).collect();
    let packages: Vec<_> = absent.iter().map(|(.., package)| *package).collect();
    let detail = format!("{} cannot be run", names.join(", "));
    let fix =
        format!("apt-get install {}, or bring your own image with --rootfs", packages.join(" "));
    lacking("template tools", needed_for, detail, fix)
}

fn user_namespaces() -> Check {
    match host::user_namespace() {
        Ok(()) => ok("user namespaces", "can be made"),
        Err(error) => lacking(
            "user namespaces",
            "isolating the VMM without root",
            io_text(&error),
            "sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000",
        ),
    }
}

fn jail_user() -> Check {
    if process::effective_uid() == 0 {
        ok("jail user", format!("each VM gets a user of its own, of {}", jail::DEFAULT_USERS))
    } else {
        let detail = "VMs run as you, in the other layers of their jail";
        lacking("jail user", "a user of its own for each VM", detail, "run pvmm as root")
    }
}

fn tun() -> Check {
    let needed_for = "guests with a network";
    match host::make_tap() {
        Ok(()) => ok("tun", "a tap device can be made"),
        Err(error) => {
            let fix = match error.kind() {
                ErrorKind::NotFound => "modprobe tun",
                ErrorKind::PermissionDenied => "run as root or with CAP_NET_ADMIN",
                _ => "modprobe tun, and give access to /dev/net/tun",
            };
            lacking(
                "tun",
                needed_for,
                format!("cannot make a tap device: {}", io_text(&error)),
                fix,
            )
        }
    }
}

fn nftables() -> Check {
    let needed_for = "limiting what guests reach on the network";
    match host::nftables() {
        Ok(()) => ok("nftables", "answers"),
        Err(error) => {
            let fix = match error.kind() {
                ErrorKind::PermissionDenied => "run as root or with CAP_NET_ADMIN",
                _ => "modprobe nf_tables",
            };
            lacking("nftables", needed_for, io_text(&error), fix)
        }
    }
}

fn cgroups() -> Check {
    const ROOT: &str = "/sys/fs/cgroup";
    let needed_for = "limits on a VM's CPU, memory and processes";
    let lack = |detail: String, fix: &str| lacking("cgroup v2", needed_for, detail, fix);
    match host::filesystem_type(Path::new(ROOT)) {
        Ok(kind) if kind == libc::CGROUP2_SUPER_MAGIC => {}
        _ => {
            let fix = "mount -t cgroup2 none /sys/fs/cgroup, or boot with systemd.unified_cgroup_hierarchy=1";
            return lack(format!("not mounted at {ROOT}"), fix);
        }
    }
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let own = Path::new(ROOT).join(own.trim_start_matches('/'));
    let controllers = fs::read_to_string(own.join("cgroup.controllers")).unwrap_or_default();
    let controllers = controllers.trim();
    if let Some(absent) = ["cpu", "memory", "pids"]
        .into_iter()
        .find(|wanted| !controllers.split(' ').any(|controller| controller == *wanted))
    {
        let fix =
            "delegate the controllers: systemctl edit user@.service, Delegate=cpu memory pids io";
        return lack(format!("no {absent} controller here ({controllers})"), fix);
    }
    match try_cgroup(&own) {
        Ok(()) => ok("cgroup v2", format!("can be made; controllers {controllers}")),
        Err(error) => lack(
            format!("cannot make one in {}: {}", own.display(), io_text(&error)),
            "run as root, or under 'systemd-run --user --scope -p Delegate=yes'",
        ),
    }
}

fn try_cgroup(parent: &Path) -> io::Result<()> {
    let probe = parent.join(format!("pvmm-doctor-{}", std::process::id()));
    fs::create_dir(&probe)?;
    fs::remove_dir(&probe)
}

fn userfaultfd() -> Check {
    match host::userfaultfd() {
        Ok(()) => ok("userfaultfd", "works"),
        Err(error) => lacking(
            "userfaultfd",
            "loading a snapshot's memory as it is touched",
            io_text(&error),
            "sysctl vm.unprivileged_userfaultfd=1, or give access to /dev/userfaultfd",
        ),
    }
}

fn huge_pages() -> Check {
    let (total, free) =
        (meminfo("HugePages_Total").unwrap_or(0), meminfo("HugePages_Free").unwrap_or(0));
    match host::huge_page() {
        Ok(()) => ok("huge pages", format!("{free} of {total} free")),
        Err(error) => lacking(
            "huge pages",
            "large guests that touch much memory",
            format!("{free} of {total} free: {}", io_text(&error)),
            "sysctl vm.nr_hugepages=512 (that is 1 GiB)",
        ),
    }
}

fn io_uring() -> Check {
    match host::io_uring() {
        Ok(()) => ok("io_uring", "works"),
        Err(error) => lacking(
            "io_uring",
            "disk I/O with fewer system calls",
            io_text(&error),
            "sysctl kernel.io_uring_disabled=0; in a container, allow it in the seccomp profile",
        ),
    }
}

fn landlock() -> Check {
    match host::landlock_abi() {
        Ok(abi) => ok("landlock", format!("ABI {abi}")),
        Err(error) => lacking(
            "landlock",
            "a second wall around the VMM's files",
            io_text(&error),
            "boot with lsm=landlock,… (Linux 5.13 or newer)",
        ),
    }
}
