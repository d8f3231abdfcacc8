//! Copies files of the context into the guest, as one archive.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use pvmm::agent::{Agent, AgentError, FileKind, FileWriter};

use super::context::{self, Found, Item, ItemKind};
use super::log::{Log, stop_if_interrupted};
use super::parse::Copy;
use crate::failure::{Failure, io_text};
use crate::guest_agent;

/// The largest of the guest's files that is read for names of users.
const MAX_PASSWD: u64 = 1 << 20;
const CHUNK: usize = 64 << 10;

/// Copies files of the context into the guest.
pub fn put(
    agent: &Agent,
    found: &[Found],
    target: &Path,
    is_folder: bool,
    copy: &Copy,
    log: &mut dyn Log,
) -> Result<(), Failure> {
    let owner = match &copy.owner {
        Some(owner) => owner_of(agent, owner)?,
        None => (0, 0),
    };
    let there = match agent.stat(target, true) {
        Ok(facts) => facts.kind == FileKind::Directory,
        Err(error) if error.errno() == Some(libc::ENOENT) => false,
        Err(error) => return Err(guest_agent::refuse(error)),
    };
    let is_folder = is_folder || there;
    // A single file may be given another name.
    let (folder, name) = match found {
        [Found::File(item)] if !(is_folder || copy.unpacks && context::is_archive(item)) => {
            (target.parent().unwrap_or(target), target.file_name().map(PathBuf::from))
        }
        _ => (target, None),
    };
    agent.mkdir(folder, None, true).map_err(guest_agent::refuse)?;
    let mut tar = Archive::open(agent, folder)?;
    for found in found {
        match found {
            Found::File(item) if copy.unpacks && context::is_archive(item) => {
                unpack(agent, item, folder)?;
            }
            Found::File(item) => {
                let name = name.as_ref().unwrap_or(&item.name);
                tar.append(item, name, owner, copy.mode)?;
            }
            Found::Folder(items) => {
                for item in items {
                    stop_if_interrupted(log)?;
                    tar.append(item, &item.name, owner, copy.mode)?;
                }
            }
        }
    }
    tar.finish()
}

/// An archive that is unpacked in the guest while it is written.
struct Archive {
    builder: tar::Builder<BufWriter<FileWriter>>,
}

impl Archive {
    fn open(agent: &Agent, folder: &Path) -> Result<Archive, Failure> {
        let writer = agent.open_write_tar(folder, true).map_err(guest_agent::refuse)?;
        let builder = tar::Builder::new(BufWriter::with_capacity(CHUNK, writer));
        Ok(Archive { builder })
    }

    fn append(
        &mut self,
        item: &Item,
        name: &Path,
        owner: (u32, u32),
        mode: Option<u32>,
    ) -> Result<(), Failure> {
        let mut header = tar::Header::new_gnu();
        header.set_uid(owner.0.into());
        header.set_gid(owner.1.into());
        header.set_mode(mode.unwrap_or(item.mode));
        header.set_mtime(item.mtime);
        header.set_size(item.size);
        let appended = match &item.kind {
            ItemKind::Directory => {
                header.set_entry_type(tar::EntryType::Directory);
                self.builder.append_data(&mut header, name, io::empty())
            }
            ItemKind::Symlink(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                self.builder.append_link(&mut header, name, target)
            }
            ItemKind::File => File::open(&item.path).and_then(|file| {
                // A file that grows meanwhile is cut, and one that shrinks is filled.
                let content = file.chain(io::repeat(0)).take(item.size);
                self.builder.append_data(&mut header, name, content)
            }),
        };
        appended.map_err(|error| not_copied(&item.path, error))
    }

    fn finish(self) -> Result<(), Failure> {
        let failed = |error| not_copied(Path::new("the files"), error);
        let mut buffered = self.builder.into_inner().map_err(failed)?;
        buffered.flush().map_err(failed)?;
        let writer = buffered.into_inner().map_err(|error| failed(error.into_error()))?;
        writer.finish().map(drop).map_err(guest_agent::refuse)
    }
}

fn unpack(agent: &Agent, item: &Item, folder: &Path) -> Result<(), Failure> {
    let failed = |error| not_copied(&item.path, error);
    let file = File::open(&item.path).map_err(failed)?;
    let mut stream = pvmm_images::compression::open(file).map_err(failed)?;
    let writer = agent.open_write_tar(folder, true).map_err(guest_agent::refuse)?;
    let mut buffered = BufWriter::with_capacity(CHUNK, writer);
    io::copy(&mut stream, &mut buffered).map_err(failed)?;
    let writer = buffered.into_inner().map_err(|error| failed(error.into_error()))?;
    writer.finish().map(drop).map_err(guest_agent::refuse)
}

fn not_copied(path: &Path, error: io::Error) -> Failure {
    match error.downcast::<AgentError>() {
        Ok(error) => guest_agent::refuse(error),
        Err(error) => {
            Failure::usage(format!("cannot copy {}: {}", path.display(), io_text(&error)))
        }
    }
}

/// Returns the ids of `USER[:GROUP]`, names as the guest's files have them.
fn owner_of(agent: &Agent, owner: &str) -> Result<(u32, u32), Failure> {
    let (user, group) = match owner.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (owner, None),
    };
    let read = |path: &str| agent.read_file(path, MAX_PASSWD).unwrap_or_default();
    let unknown =
        |name: &str| Failure::usage(format!("--chown: there is no {name:?} in the guest"));
    let (uid, own_group) = ids(&read("/etc/passwd"), user).ok_or_else(|| unknown(user))?;
    let gid = match group {
        Some(group) => ids(&read("/etc/group"), group).ok_or_else(|| unknown(group))?.0,
        None => own_group.unwrap_or(uid),
    };
    Ok((uid, gid))
}

/// Finds a name in `/etc/passwd` or `/etc/group`; a number stands for itself. Returns the id and,
/// of a user, the group.
fn ids(file: &[u8], name: &str) -> Option<(u32, Option<u32>)> {
    if let Ok(id) = name.parse() {
        return Some((id, None));
    }
    String::from_utf8_lossy(file).lines().find_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        let id = fields.get(2).filter(|_| fields[0] == name)?;
        Some((id.parse().ok()?, fields.get(3).and_then(|group| group.parse().ok())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_users_are_found_and_numbers_need_no_file() {
        let passwd = b"root:x:0:0::/root:/bin/sh\nme:x:1000:1001::/:/bin/sh\nbad\n";
        assert_eq!(ids(passwd, "me"), Some((1000, Some(1001))));
        assert_eq!(ids(passwd, "42"), Some((42, None)));
        assert_eq!(ids(passwd, "you"), None);
        assert_eq!(ids(b"staff:x:50:me\n", "staff"), Some((50, None)));
    }
}
