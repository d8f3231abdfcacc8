//! `filesystem.Filesystem`: what a path is, listings, directories, moves and removals.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use pvmm::agent::{Agent, FileKind, Metadata};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::audit::Act;
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::extract::Owner;
use crate::life::enter;

use super::accounts::{Account, Names, user_of};
use super::connect::Message;
use super::error::CallError;
use super::state::{Door, Target};

/// The most bytes of one directory's listing.
const MAX_LISTING: u64 = 16 << 20;
/// The most entries of a listing over several levels.
const MAX_ENTRIES: usize = 100_000;

type Answer = Result<axum::Json<Value>, CallError>;

/// The message of a call about a path.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct At {
    path: String,
}

/// The message of a listing.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ListDir {
    path: String,
    depth: u32,
}

/// The message of a move.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Move {
    source: String,
    destination: String,
}

/// Writes the kind and the permissions of a file as `ls` does.
fn permissions(metadata: &Metadata) -> String {
    let kind = match metadata.kind {
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        _ => '-',
    };
    let bits = (0..9).rev().map(|bit| match (metadata.mode >> bit & 1, bit % 3) {
        (0, _) => '-',
        (_, 2) => 'r',
        (_, 1) => 'w',
        (_, _) => 'x',
    });
    std::iter::once(kind).chain(bits).collect()
}

/// Writes a file as the clients read it. Waits.
pub fn entry(agent: &Agent, names: &mut Names, path: &str, metadata: &Metadata) -> Value {
    let (owner, group) = names.of(agent, metadata.uid, metadata.gid);
    let kind = match metadata.kind {
        FileKind::File => "FILE_TYPE_FILE",
        FileKind::Directory => "FILE_TYPE_DIRECTORY",
        FileKind::Symlink => "FILE_TYPE_SYMLINK",
        _ => "FILE_TYPE_UNSPECIFIED",
    };
    let seconds = u64::try_from(metadata.mtime_s).unwrap_or(0).min(253_402_300_799);
    let mut value = json!({
        "name": name_of(path),
        "type": kind,
        "path": path,
        "size": metadata.size.to_string(),
        "mode": metadata.mode,
        "permissions": permissions(metadata),
        "owner": owner,
        "group": group,
        "modifiedTime": clock::rfc3339(seconds * 1000 + u64::from(metadata.mtime_ns / 1_000_000)),
    });
    if let Some(target) = &metadata.target {
        value["symlinkTarget"] = json!(String::from_utf8_lossy(target));
        value["isSymlink"] = json!(true);
    }
    value
}

fn name_of(path: &str) -> &str {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    if name.is_empty() { "/" } else { name }
}

/// Runs a call about files with the agent and the account of its user, in a thread.
async fn run<T: Send + 'static>(
    door: &Door,
    id: &str,
    headers: &HeaderMap,
    work: Work,
    call: impl FnOnce(&Agent, &Account) -> Result<T, CallError> + Send + 'static,
) -> Result<T, CallError> {
    let in_use = enter(&door.app, id).await?;
    let user = user_of(headers);
    let call = move || {
        let agent = in_use.agent()?;
        let account = Account::find(&agent, user.as_deref())?;
        Ok(call(&agent, &account))
    };
    door.app.blocking.run(work, call).await?
}

/// `Stat`
pub async fn stat(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    headers: HeaderMap,
    Message(at): Message<At>,
) -> Answer {
    let call = move |agent: &Agent, account: &Account| {
        let path = account.absolute(&at.path);
        let metadata = agent.stat(&path, false)?;
        Ok(entry(agent, &mut Names::default(), &path, &metadata))
    };
    let entry = run(&door, &id, &headers, Work::Short, call).await?;
    Ok(axum::Json(json!({ "entry": entry })))
}

/// Returns the entries below a directory, `depth` levels deep.
fn walk(agent: &Agent, top: &str, depth: u32) -> Result<Vec<Value>, CallError> {
    let (mut names, mut entries) = (Names::default(), Vec::new());
    let mut level = vec![top.to_owned()];
    for number in 0..depth {
        let mut below = Vec::new();
        for folder in std::mem::take(&mut level) {
            let listed = match agent.list_within(&folder, MAX_LISTING) {
                // A directory may go while the tree is walked.
                Err(_) if number > 0 => continue,
                listed => listed?,
            };
            for found in listed {
                let name = String::from_utf8_lossy(&found.name);
                let path = format!("{}/{name}", folder.trim_end_matches('/'));
                entries.push(entry(agent, &mut names, &path, &found.metadata));
                if found.metadata.kind == FileKind::Directory {
                    below.push(path);
                }
            }
            if entries.len() > MAX_ENTRIES {
                let message =
                    format!("there are more than {MAX_ENTRIES} entries: list fewer levels");
                return Err(CallError::new("resource_exhausted", message));
            }
        }
        level = below;
        if level.is_empty() {
            break;
        }
    }
    Ok(entries)
}

/// `ListDir`
pub async fn list(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    headers: HeaderMap,
    Message(wanted): Message<ListDir>,
) -> Answer {
    let call = move |agent: &Agent, account: &Account| {
        walk(agent, &account.absolute(&wanted.path), wanted.depth.max(1))
    };
    let entries = run(&door, &id, &headers, Work::Long, call).await?;
    Ok(axum::Json(json!({ "entries": entries })))
}

/// Makes a directory, and those above it. Returns false if it is there.
fn make(agent: &Agent, path: &str) -> Result<bool, CallError> {
    match agent.stat(path, true).map(|metadata| metadata.kind) {
        Ok(FileKind::Directory) => Ok(false),
        Ok(_) => Err(CallError::new("invalid_argument", "the path is a file")),
        Err(_) => Ok(agent.mkdir(path, None, true).map(|()| true)?),
    }
}

/// `MakeDir`
pub async fn make_dir(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    headers: HeaderMap,
    Message(at): Message<At>,
) -> Answer {
    let act = Act::new("mkdir", &owner, &id).what(&at.path);
    let call = move |agent: &Agent, account: &Account| {
        let path = account.absolute(&at.path);
        if !make(agent, &path)? {
            return Err(CallError::new("already_exists", "the directory exists"));
        }
        Ok(entry(agent, &mut Names::default(), &path, &agent.stat(&path, false)?))
    };
    let outcome = run(&door, &id, &headers, Work::Short, call).await;
    note(&door, act, &outcome);
    Ok(axum::Json(json!({ "entry": outcome? })))
}

/// `Move`
pub async fn rename(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    headers: HeaderMap,
    Message(wanted): Message<Move>,
) -> Answer {
    let what = format!("{} -> {}", wanted.source, wanted.destination);
    let act = Act::new("move_file", &owner, &id).what(&what);
    let call = move |agent: &Agent, account: &Account| {
        let from = account.absolute(&wanted.source);
        let to = account.absolute(&wanted.destination);
        agent.stat(&from, false)?;
        if let Some((folder, _)) = to.trim_end_matches('/').rsplit_once('/')
            && !folder.is_empty()
        {
            make(agent, folder)?;
        }
        agent.rename(&from, &to)?;
        Ok(entry(agent, &mut Names::default(), &to, &agent.stat(&to, false)?))
    };
    let outcome = run(&door, &id, &headers, Work::Short, call).await;
    note(&door, act, &outcome);
    Ok(axum::Json(json!({ "entry": outcome? })))
}

/// `Remove`
pub async fn remove(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    headers: HeaderMap,
    Message(at): Message<At>,
) -> Answer {
    let act = Act::new("remove_file", &owner, &id).what(&at.path);
    let call = move |agent: &Agent, account: &Account| {
        match agent.remove(account.absolute(&at.path), true) {
            // What is not there need not be removed.
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
            removed => Ok(removed?),
        }
    };
    let outcome = run(&door, &id, &headers, Work::Long, call).await;
    note(&door, act, &outcome);
    outcome.map(|()| axum::Json(json!({})))
}

/// Writes an act to the audit log.
fn note<T>(door: &Door, act: Act, outcome: &Result<T, CallError>) {
    let told = outcome.as_ref().map(drop).map_err(|error| {
        ApiError::bad_request(error.json()["message"].as_str().unwrap_or_default())
    });
    door.app.audit.write(&act.outcome(&told));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_written_as_ls_does() {
        let metadata = |kind, mode| Metadata {
            kind,
            mode,
            uid: 0,
            gid: 0,
            size: 0,
            nlink: 1,
            mtime_s: 0,
            mtime_ns: 0,
            ctime: None,
            target: None,
        };
        assert_eq!(permissions(&metadata(FileKind::File, 0o644)), "-rw-r--r--");
        assert_eq!(permissions(&metadata(FileKind::Directory, 0o1751)), "drwxr-x--x");
    }

    #[test]
    fn name_is_the_last_part_of_a_path() {
        assert_eq!((name_of("/a/b/"), name_of("/a"), name_of("/")), ("b", "a", "/"));
    }
}
