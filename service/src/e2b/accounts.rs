//! The accounts of a guest: whose files are made, and whose home a relative path is in.
//!
//! A request without a user is root's. Clients that ask for `user`, as E2B's templates have it, get
//! root in a guest without such an account.

use axum::http::{HeaderMap, header};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pvmm::agent::{Agent, Owner};

use crate::error::ApiError;
use crate::extract::shown;

/// The account that E2B's templates have.
const USUAL: &str = "user";
const ROOT: &str = "root";
const ROOT_HOME: &str = "/root";
/// The most that is read of a list of accounts.
const MAX_LIST: u64 = 1 << 20;

/// An account of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// The name.
    pub name: String,
    /// The user and its group.
    pub owner: Owner,
    /// The home directory.
    pub home: String,
}

impl Account {
    fn root() -> Self {
        let owner = Owner { uid: 0, gid: 0 };
        Self { name: ROOT.to_owned(), owner, home: ROOT_HOME.to_owned() }
    }

    /// Finds an account of a guest. Waits.
    pub fn find(agent: &Agent, name: Option<&str>) -> Result<Self, ApiError> {
        let name = match name {
            None | Some("" | ROOT) => return Ok(Self::root()),
            Some(name) => name,
        };
        let list = list(agent, "/etc/passwd");
        match parse(&list, name) {
            Some(account) => Ok(account),
            None if name == USUAL => Ok(Self::root()),
            None => Err(ApiError::bad_request(format!("user '{}' not found", shown(name)))),
        }
    }

    /// Returns whether the account is root.
    pub fn is_root(&self) -> bool {
        self.owner.uid == 0
    }

    /// Returns the absolute path of a path, which begins in the home directory if it is relative.
    pub fn absolute(&self, path: &str) -> String {
        let home = self.home.trim_end_matches('/');
        match path {
            "" | "~" => self.home.clone(),
            path if path.starts_with('/') => path.to_owned(),
            path => format!("{home}/{}", path.strip_prefix("~/").unwrap_or(path)),
        }
    }
}

fn list(agent: &Agent, path: &str) -> String {
    // A guest without the file has root only.
    let bytes = agent.read_file(path, MAX_LIST).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn parse(passwd: &str, name: &str) -> Option<Account> {
    passwd.lines().find_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        let [found, _, uid, gid, _, home, ..] = fields[..] else { return None };
        let owner = Owner { uid: uid.parse().ok()?, gid: gid.parse().ok()? };
        let account = Account { name: found.to_owned(), owner, home: home.to_owned() };
        (found == name).then_some(account)
    })
}

/// Returns the user that a request names.
pub fn user_of(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    let decoded = STANDARD.decode(encoded.trim()).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    let (user, _) = text.split_once(':')?;
    (scheme.eq_ignore_ascii_case("basic") && !user.is_empty()).then(|| user.to_owned())
}

/// The names of owners, read from the guest when the first one is not root.
#[derive(Default)]
pub struct Names {
    lists: Option<(String, String)>,
}

impl Names {
    /// Returns the names of a user and a group. Waits.
    pub fn of(&mut self, agent: &Agent, uid: u32, gid: u32) -> (String, String) {
        if (uid, gid) == (0, 0) {
            return (ROOT.to_owned(), ROOT.to_owned());
        }
        let (passwd, group) = self
            .lists
            .get_or_insert_with(|| (list(agent, "/etc/passwd"), list(agent, "/etc/group")));
        (name_of(passwd, uid), name_of(group, gid))
    }
}

/// Returns the name of a number, or the number.
fn name_of(list: &str, number: u32) -> String {
    let text = number.to_string();
    let named = list.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == text).then(|| name.to_owned())
    });
    named.unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbad\nann:x:1000:1001::/home/ann:\n";

    #[test]
    fn account_is_found_by_its_name() {
        let ann = parse(PASSWD, "ann").unwrap();
        assert_eq!((ann.owner, &ann.home[..]), (Owner { uid: 1000, gid: 1001 }, "/home/ann"));
        assert_eq!(parse(PASSWD, "bad"), None);
        assert_eq!(name_of(PASSWD, 1000), "ann");
        assert_eq!(name_of(PASSWD, 7), "7");
    }

    #[test]
    fn relative_path_begins_in_the_home_directory() {
        let ann = parse(PASSWD, "ann").unwrap();
        for (path, absolute) in [
            ("/etc/x", "/etc/x"),
            ("a/b", "/home/ann/a/b"),
            ("~/a", "/home/ann/a"),
            ("~", "/home/ann"),
            ("", "/home/ann"),
        ] {
            assert_eq!(ann.absolute(path), absolute);
        }
    }

    #[test]
    fn user_is_the_name_of_basic_authorization() {
        let with = |value: &str| {
            user_of(&HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())]))
        };
        assert_eq!(with("Basic cm9vdDo="), Some("root".to_owned()));
        for value in ["Bearer cm9vdDo=", "Basic", "Basic ???", "Basic cm9vdA=="] {
            assert_eq!(with(value), None, "{value}");
        }
    }
}
