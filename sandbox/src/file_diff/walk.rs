//! The files of a guest, listed through its agent.
//!
//! Nothing of the guest but its agent is needed: a guest that has lost its programs can be listed,
//! too. All that is listed is the word of the guest.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;

use pvmm::agent::{Agent, AgentError, FileKind, Metadata};

use crate::failure::Failure;
use crate::guest_agent;

/// The most files of one moment.
const MAX_FILES: usize = 400_000;
/// The most bytes of one directory's listing.
const MAX_LISTING: u64 = 64 << 20;
/// The most bytes of the guest's list of mounts.
const MAX_MOUNTS: u64 = 1 << 20;

/// Directories that the kernel fills.
const NEVER: [&str; 3] = ["/proc", "/sys", "/dev"];
/// File systems that the kernel fills.
const PSEUDO: [&str; 18] = [
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "proc",
    "pstore",
    "securityfs",
    "sysfs",
    "tracefs",
];

/// The files below a directory, by their whole paths.
#[derive(Debug, Default)]
pub struct Files {
    pub all: BTreeMap<Vec<u8>, Metadata>,
    /// Directories that the guest could not list.
    pub unreadable: u64,
}

/// Lists all files below `root`, without those that the kernel makes up. Links are not followed.
pub fn walk(agent: &Agent, root: &Path, deadline: Instant) -> Result<Files, Failure> {
    let never =
        pseudo_mounts(&agent.read_file("/proc/self/mounts", MAX_MOUNTS).unwrap_or_default());
    let mut files = Files::default();
    let mut left = vec![root.as_os_str().as_bytes().to_vec()];
    while let Some(dir) = left.pop() {
        super::check(deadline)?;
        let entries = match agent.list_within(OsStr::from_bytes(&dir), MAX_LISTING) {
            Ok(entries) => entries,
            // The rest can still be compared. A root that one of the moments lacks has no files.
            Err(error) if error.errno().is_some() || is_too_deep(&error) => {
                files.unreadable += 1;
                continue;
            }
            Err(error) => return Err(guest_agent::refuse(error)),
        };
        for entry in entries {
            let path = joined(&dir, &entry.name);
            if never.contains(&path) {
                continue;
            }
            if entry.metadata.kind == FileKind::Directory {
                left.push(path.clone());
            }
            files.all.insert(path, entry.metadata);
        }
        if files.all.len() > MAX_FILES {
            let message = format!("the guest has more than {MAX_FILES} files");
            return Err(Failure::usage(message).hint("compare one folder of it: --path FOLDER"));
        }
    }
    Ok(files)
}

/// Returns whether the guest has a path that is too long to ask for.
fn is_too_deep(error: &AgentError) -> bool {
    matches!(error, AgentError::InvalidRequest { .. })
}

fn joined(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let separator: &[u8] = if dir.ends_with(b"/") { b"" } else { b"/" };
    [dir, separator, name].concat()
}

/// Returns the directories that are not walked, from the guest's list of mounts.
fn pseudo_mounts(mounts: &[u8]) -> BTreeSet<Vec<u8>> {
    let mut never: BTreeSet<Vec<u8>> = NEVER.iter().map(|path| path.as_bytes().to_vec()).collect();
    for line in mounts.split(|byte| *byte == b'\n') {
        let mut words = line.split(|byte| *byte == b' ').skip(1);
        if let (Some(at), Some(kind)) = (words.next(), words.next())
            && PSEUDO.iter().any(|pseudo| pseudo.as_bytes() == kind)
        {
            never.insert(unescaped(at));
        }
    }
    never
}

/// Replaces the octal escapes of spaces and other characters in a list of mounts.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_the_kernel_are_left_out_and_others_are_not() {
        let mounts = b"/dev/vda / ext4 rw 0 0\nnone /run tmpfs rw 0 0\n\
            none /a\\040b cgroup2 rw 0 0\nbad line\n\n";
        let never = pseudo_mounts(mounts);
        assert!(never.contains(&b"/a b"[..]) && never.contains(&b"/proc"[..]));
        assert_eq!(never.len(), NEVER.len() + 1);
        assert_eq!(unescaped(b"\\04\\999x"), b"\\04\\999x");
    }

    #[test]
    fn paths_below_the_root_and_below_others_have_one_separator() {
        assert_eq!(joined(b"/", b"etc"), b"/etc");
        assert_eq!(joined(b"/etc", b"x"), b"/etc/x");
    }
}
