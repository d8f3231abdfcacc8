//! Looks up users and groups in /etc/passwd and /etc/group.
//!
//! The C library's own lookup loads shared objects, which a static program must not do.

use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

use crate::spawn::Credentials;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// The most bytes that are read of an account file.
const MAX_FILE: u64 = 4 << 20;
/// The most supplementary groups that the kernel allows a process.
const MAX_GROUPS: usize = 65536;

/// A user that a process can run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub credentials: Credentials,
    pub name: String,
    pub home: String,
}

/// Finds `name`, `uid`, `name:group` or `uid:gid`; returns `None` when a name is not known.
pub fn find(spec: &str) -> Option<User> {
    find_in(&account_file(PASSWD), &account_file(GROUP), spec)
}

/// Returns the agent's own user. Without groups, since none need to be set for it.
pub fn find_own() -> Option<User> {
    find_in(&account_file(PASSWD), "", &crate::sys::user_id().to_string())
}

fn find_in(passwd: &str, group: &str, spec: &str) -> Option<User> {
    let (user, wanted_group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (spec, None),
    };
    let number = user.parse::<u32>().ok().filter(|uid| *uid != u32::MAX);
    let entry = passwd.lines().filter_map(PasswdEntry::parse).find(|entry| match number {
        Some(uid) => entry.uid == uid,
        None => entry.name == user,
    });
    let (uid, gid, name, home) = match (entry, number) {
        (Some(entry), _) => (entry.uid, entry.gid, entry.name, entry.home),
        (None, Some(uid)) => (uid, uid, user, "/"),
        (None, None) => return None,
    };
    let (gid, groups) = match wanted_group {
        Some(wanted) => {
            let gid = wanted.parse().ok().or_else(|| group_id(group, wanted))?;
            (gid, vec![gid])
        }
        None => (gid, groups_of(group, name, gid)),
    };
    Some(User {
        credentials: Credentials { uid, gid, groups },
        name: name.to_owned(),
        home: if home.is_empty() { "/" } else { home }.to_owned(),
    })
}

struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> PasswdEntry<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let home = fields.nth(1)?;
        Some(Self { name, uid, gid, home })
    }
}

/// Returns name, gid and members of every group.
fn groups(file: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    file.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let gid = fields.nth(1)?.parse().ok()?;
        Some((name, gid, fields.next().unwrap_or("")))
    })
}

fn group_id(file: &str, name: &str) -> Option<u32> {
    groups(file).find(|(group, ..)| *group == name).map(|(_, gid, _)| gid)
}

fn groups_of(file: &str, user: &str, primary: u32) -> Vec<u32> {
    let mut found = vec![primary];
    for (_, gid, members) in groups(file) {
        let member = members.split(',').any(|member| member.trim() == user);
        if member && !found.contains(&gid) && found.len() < MAX_GROUPS {
            found.push(gid);
        }
    }
    found
}

fn account_file(path: &str) -> String {
    let mut text = Vec::new();
    // Not blocking: a FIFO in that place must not block the agent.
    let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    if let Ok(file) = file {
        // Whatever could be read is used; a missing file only means that names are not known.
        let _ = file.take(MAX_FILE).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001::/home/ann:\nbad line\n";
    const GROUP: &str = "ann:x:1001:\nwheel:x:10:bob,ann\naudio:x:63:ann\nnot:x:9:anna\n";

    fn ids(spec: &str) -> Option<(u32, u32, Vec<u32>)> {
        find_in(PASSWD, GROUP, spec)
            .map(|user| (user.credentials.uid, user.credentials.gid, user.credentials.groups))
    }

    #[test]
    fn user_by_name_has_primary_and_supplementary_groups() {
        assert_eq!(ids("ann"), Some((1000, 1001, vec![1001, 10, 63])));
        assert_eq!(find_in(PASSWD, GROUP, "ann").unwrap().home, "/home/ann");
    }

    #[test]
    fn user_by_number_is_found_or_made_up() {
        assert_eq!(ids("1000"), Some((1000, 1001, vec![1001, 10, 63])));
        assert_eq!(ids("7"), Some((7, 7, vec![7])));
    }

    #[test]
    fn user_with_group_gets_only_that_group() {
        assert_eq!(ids("ann:wheel"), Some((1000, 10, vec![10])));
        assert_eq!(ids("5:6"), Some((5, 6, vec![6])));
    }

    #[test]
    fn user_unknown_is_refused() {
        for spec in ["nobody-here", "ann:no-such-group", "", "-1", "4294967295"] {
            assert_eq!(ids(spec), None, "{spec:?}");
        }
    }
}
