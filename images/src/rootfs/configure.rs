//! Writes what maintainer scripts would have written: users, certificates, links, shell start-up.
//!
//! In one file, because this is all that differs from Debian's own installation.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::RootfsError;
use super::tree::Tree;
use crate::tool;

/// The id of the ordinary user in every template.
const USER_ID: u32 = 1000;
const SHADOW_GROUP: u32 = 42;

const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";
const NSSWITCH: &str = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n\
                        networks: files\nprotocols: files\nservices: files\nrpc: files\n";
/// Root is the usual user of a sandbox, and checking for a newer pip costs a round trip per call.
const PIP: &str = "[global]\nroot-user-action = ignore\ndisable-pip-version-check = true\n";

/// Files that maintainer scripts would copy into place: source, target, mode.
const COPIES: [(&str, &str, u32); 4] = [
    ("usr/share/base-files/profile", "etc/profile", 0o644),
    ("usr/share/base-files/dot.profile", "root/.profile", 0o644),
    ("usr/share/base-files/dot.bashrc", "root/.bashrc", 0o644),
    ("usr/share/base-files/nsswitch.conf", "etc/nsswitch.conf", 0o644),
];

/// Commands provided by busybox unless a package has its own. Not wget: busybox's does not check
/// certificates.
const APPLETS: [&str; 56] = [
    "ar",
    "bc",
    "bunzip2",
    "bzcat",
    "bzip2",
    "clear",
    "cmp",
    "cpio",
    "dc",
    "diff",
    "dmesg",
    "ed",
    "fallocate",
    "fold",
    "free",
    "hexdump",
    "hostname",
    "ifconfig",
    "ip",
    "kill",
    "killall",
    "less",
    "more",
    "mount",
    "nc",
    "netstat",
    "nsenter",
    "nslookup",
    "patch",
    "pidof",
    "ping",
    "ping6",
    "ps",
    "reset",
    "rev",
    "route",
    "setsid",
    "strings",
    "su",
    "sysctl",
    "taskset",
    "telnet",
    "time",
    "top",
    "traceroute",
    "umount",
    "unshare",
    "unxz",
    "unzip",
    "uptime",
    "vi",
    "watch",
    "which",
    "xxd",
    "xz",
    "xzcat",
];

pub(super) fn configure(tree: &mut Tree) -> Result<(), RootfsError> {
    directories(tree)?;
    copies(tree)?;
    users(tree)?;
    certificates(tree)?;
    links(tree)?;
    tree.write("etc/hosts", HOSTS, 0o644)?;
    tree.write("etc/hostname", "pvmm\n", 0o644)?;
    tree.write("etc/resolv.conf", "", 0o644)?;
    tree.write("etc/machine-id", "", 0o444)?;
    tree.write("etc/pip.conf", PIP, 0o644)?;
    library_cache(tree)
}

/// Returns `PRETTY_NAME` of the system that the packages make up.
pub(super) fn release(tree: &Tree) -> String {
    let text = fs::read_to_string(tree.path("usr/lib/os-release")).unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.unwrap_or("unknown").trim_matches('"').to_owned()
}

fn directories(tree: &mut Tree) -> Result<(), RootfsError> {
    for plain in ["boot", "dev", "home", "media", "mnt", "opt", "proc", "run", "srv", "sys"] {
        tree.directory(plain, 0o755)?;
    }
    tree.directory("root", 0o700)?;
    for open in ["tmp", "var/tmp"] {
        tree.directory(open, 0o1777)?;
    }
    for log in ["var/cache", "var/lib", "var/log"] {
        tree.directory(log, 0o755)?;
    }
    for mine in ["home/user", "workspace"] {
        tree.directory(mine, 0o755)?;
        tree.own(mine, USER_ID, USER_ID);
    }
    Ok(())
}

fn copies(tree: &mut Tree) -> Result<(), RootfsError> {
    for (from, to, mode) in COPIES {
        if let Ok(content) = fs::read(tree.path(from)) {
            tree.write(to, content, mode)?;
        }
    }
    tree.write("etc/nsswitch.conf", NSSWITCH, 0o644)?;
    for name in [".bashrc", ".profile"] {
        if let Ok(content) = fs::read(tree.path("etc/skel").join(name)) {
            let home = format!("home/user/{name}");
            tree.write(&home, content, 0o644)?;
            tree.own(&home, USER_ID, USER_ID);
        }
    }
    Ok(())
}

/// Writes Debian's fixed users and groups, which files in packages may belong to, and one for the
/// guest.
fn users(tree: &mut Tree) -> Result<(), RootfsError> {
    let read = |name: &str| {
        let path = PathBuf::from("usr/share/base-passwd").join(name);
        fs::read_to_string(tree.root().join(&path)).map_err(|_| RootfsError::Incomplete { path })
    };
    // Passwords are in /etc/shadow, where all accounts are locked.
    let passwd = read("passwd.master")?.replace(":*:", ":x:");
    let group = read("group.master")?.replace(":*:", ":x:");
    let passwd = format!("{passwd}user:x:{USER_ID}:{USER_ID}:user:/home/user:/bin/bash\n");
    let group = format!("{group}user:x:{USER_ID}:\n");
    let locked = |text: &str, rest: &str| {
        let names = text.lines().filter_map(|line| line.split(':').next());
        names.map(|name| format!("{name}:*:{rest}\n")).collect::<String>()
    };
    tree.write("etc/shadow", locked(&passwd, "19000:0:99999:7:::"), 0o640)?;
    tree.write("etc/gshadow", locked(&group, ":"), 0o640)?;
    tree.own("etc/shadow", 0, SHADOW_GROUP);
    tree.own("etc/gshadow", 0, SHADOW_GROUP);
    tree.write("etc/passwd", passwd, 0o644)?;
    tree.write("etc/group", group, 0o644)?;
    tree.write("etc/shells", "/bin/sh\n/bin/bash\n/bin/dash\n", 0o644)
}

/// Writes all certificate authorities into one file, where OpenSSL and its users look.
fn certificates(tree: &mut Tree) -> Result<(), RootfsError> {
    let path = tree.path("usr/share/ca-certificates/mozilla");
    let failed = |path: &Path, source| RootfsError::Unpack { path: path.to_owned(), source };
    let entries = fs::read_dir(&path).map_err(|source| failed(&path, source))?;
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    let mut bundle = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|ext| ext == "crt")) {
        bundle.extend(fs::read(file).map_err(|source| failed(file, source))?);
        if !bundle.ends_with(b"\n") {
            bundle.push(b'\n');
        }
    }
    tree.write("etc/ssl/certs/ca-certificates.crt", bundle, 0o644)?;
    tree.link("usr/lib/ssl/cert.pem", "/etc/ssl/certs/ca-certificates.crt")
}

fn links(tree: &mut Tree) -> Result<(), RootfsError> {
    let fixed = [
        ("etc/mtab", "/proc/self/mounts"),
        ("usr/bin/sh", "dash"),
        // Both names are in common use.
        ("usr/bin/python", "python3"),
        ("var/run", "/run"),
        ("var/lock", "/run/lock"),
    ];
    for (link, target) in fixed {
        tree.link(link, target)?;
    }
    for applet in APPLETS {
        if !tree.has(&format!("usr/sbin/{applet}")) {
            tree.link(&format!("usr/bin/{applet}"), "busybox")?;
        }
    }
    Ok(())
}

/// Writes ld.so.cache; without it every program would search its libraries by directory.
fn library_cache(tree: &Tree) -> Result<(), RootfsError> {
    let mut command = Command::new("ldconfig");
    command.arg("-r").arg(tree.root()).arg("-X").arg("-i");
    tool::run_quietly(command, "libc-bin", Duration::from_secs(30))
        .map_err(|source| RootfsError::Image { source })?;
    match fs::remove_dir_all(tree.path("var/cache/ldconfig")) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(RootfsError::Write { path: tree.path("var/cache/ldconfig"), source })
        }
        _ => Ok(()),
    }
}
