//! The folder that COPY and ADD take files from.
//!
//! Nothing outside of it is read: a source that leads out, also by a link, is refused by name.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use pvmm_images::cache;

use crate::failure::{Failure, io_text};

const IGNORE_FILE: &str = ".dockerignore";
/// The most files of one COPY.
const MAX_ITEMS: usize = 200_000;

/// A build context.
pub struct Context {
    root: PathBuf,
    /// Patterns of `.dockerignore`, and whether each takes files in again.
    ignored: Vec<(Vec<String>, bool)>,
}

/// A file, folder or link to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The path below the target.
    pub name: PathBuf,
    /// The path on this host.
    pub path: PathBuf,
    pub kind: ItemKind,
    pub mode: u32,
    pub size: u64,
    pub mtime: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemKind {
    File,
    Directory,
    Symlink(PathBuf),
}

/// A source of COPY, as it was found.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    File(Item),
    /// The contents of a folder, in order.
    Folder(Vec<Item>),
}

impl Context {
    pub fn open(root: &Path) -> Result<Context, Failure> {
        let root = fs::canonicalize(root).map_err(|error| unreadable(root, &error))?;
        let ignored = match fs::read_to_string(root.join(IGNORE_FILE)) {
            Ok(text) => patterns(&text),
            Err(_) => Vec::new(),
        };
        Ok(Context { root, ignored })
    }

    /// Finds what a source of COPY names: one path, or all that match it if it has `*` or `?`.
    pub fn find(&self, source: &str) -> Result<Vec<Found>, Failure> {
        let names = components(source)?;
        let mut paths = vec![PathBuf::new()];
        for name in &names {
            let mut next = Vec::new();
            for path in paths {
                if !is_pattern(name) {
                    next.push(path.join(name));
                    continue;
                }
                let mut found: Vec<_> = fs::read_dir(self.root.join(&path))
                    .into_iter()
                    .flatten()
                    .flatten()
                    .map(|entry| entry.file_name())
                    .filter(|found| found.to_str().is_some_and(|found| matches(name, found)))
                    .collect();
                found.sort_unstable();
                next.extend(found.into_iter().map(|found| path.join(found)));
            }
            paths = next;
        }
        let mut found = Vec::new();
        for path in paths {
            if self.is_ignored(&path) {
                continue;
            }
            let host = self.root.join(&path);
            match fs::canonicalize(&host) {
                Ok(real) if real.starts_with(&self.root) => found.push(self.take(&real, &path)?),
                Ok(_) => {
                    return Err(Failure::usage(format!("{source:?} leads out of the context")));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => (),
                Err(error) => return Err(unreadable(&host, &error)),
            }
        }
        if found.is_empty() {
            let message = format!("{source:?} is not in the context {}", self.root.display());
            return Err(Failure::usage(message));
        }
        Ok(found)
    }

    fn take(&self, real: &Path, path: &Path) -> Result<Found, Failure> {
        let facts = fs::metadata(real).map_err(|error| unreadable(real, &error))?;
        if !facts.is_dir() {
            let name = PathBuf::from(path.file_name().unwrap_or_default());
            return Ok(Found::File(item(name, real.to_owned(), &facts)?));
        }
        let (mut items, mut todo) = (Vec::new(), vec![PathBuf::new()]);
        while let Some(directory) = todo.pop() {
            let host = real.join(&directory);
            let entries = fs::read_dir(&host).map_err(|error| unreadable(&host, &error))?;
            let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
            names.sort_unstable();
            for name in names {
                let (host, inner) = (host.join(&name), directory.join(&name));
                let facts =
                    fs::symlink_metadata(&host).map_err(|error| unreadable(&host, &error))?;
                let ignored = self.is_ignored(&path.join(&inner));
                if facts.is_dir() && (!ignored || self.ignored.iter().any(|(_, again)| *again)) {
                    todo.push(inner.clone());
                }
                if !ignored {
                    items.push(item(inner, host, &facts)?);
                }
                if items.len() > MAX_ITEMS {
                    return Err(Failure::usage(format!("more than {MAX_ITEMS} files to copy")));
                }
            }
        }
        items.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(Found::Folder(items))
    }

    /// Whether `.dockerignore` leaves a path or a folder above it out; the last match counts.
    fn is_ignored(&self, path: &Path) -> bool {
        let names: Vec<_> = path.iter().map(|name| name.to_string_lossy()).collect();
        let names: Vec<&str> = names.iter().map(|name| &**name).collect();
        let covers = |pattern: &[String]| {
            (1..=names.len()).any(|length| matches_path(pattern, &names[..length]))
        };
        let last = self.ignored.iter().rev().find(|(pattern, _)| covers(pattern));
        last.is_some_and(|(_, again)| !again)
    }
}

fn item(name: PathBuf, path: PathBuf, facts: &fs::Metadata) -> Result<Item, Failure> {
    let kind = if facts.is_dir() {
        ItemKind::Directory
    } else if facts.is_file() {
        ItemKind::File
    } else if facts.is_symlink() {
        ItemKind::Symlink(fs::read_link(&path).map_err(|error| unreadable(&path, &error))?)
    } else {
        let message = format!("{} is neither a file, a folder nor a link", path.display());
        return Err(Failure::usage(message));
    };
    let mtime = u64::try_from(facts.mtime()).unwrap_or(0);
    let size = if facts.is_file() { facts.len() } else { 0 };
    Ok(Item { name, path, kind, mode: facts.mode() & 0o777, size, mtime })
}

/// Returns a digest of what would be copied: names, kinds, modes and contents, but no times.
pub fn digest(found: &[Found]) -> Result<String, Failure> {
    let mut keys = Vec::new();
    for found in found {
        let (word, items) = match found {
            Found::File(item) => ("file", std::slice::from_ref(item)),
            Found::Folder(items) => ("folder", &items[..]),
        };
        keys.push(word.to_owned());
        for item in items {
            let content = match &item.kind {
                ItemKind::File => cache::file_digest(&item.path)
                    .map_err(|error| unreadable(&item.path, &error))?
                    .into_bytes(),
                ItemKind::Directory => b"directory".to_vec(),
                ItemKind::Symlink(target) => [b"symlink ", target.as_os_str().as_bytes()].concat(),
            };
            let mode = format!("{:o}", item.mode);
            let name = item.name.as_os_str().as_bytes();
            keys.push(cache::key([name, mode.as_bytes(), &content]));
        }
    }
    Ok(cache::key(keys.iter().map(String::as_bytes)))
}

/// Whether a file is an archive that ADD unpacks: its name says so, or its first bytes do.
pub fn is_archive(item: &Item) -> bool {
    const MAGIC: (usize, &[u8]) = (257, b"ustar");
    let Ok(stream) = File::open(&item.path).and_then(pvmm_images::compression::open) else {
        return false;
    };
    let mut head = Vec::new();
    let (at, magic) = MAGIC;
    let read = stream.take((at + magic.len()) as u64).read_to_end(&mut head);
    item.kind == ItemKind::File && read.is_ok() && head.get(at..) == Some(magic)
}

fn components(source: &str) -> Result<Vec<String>, Failure> {
    let mut names = Vec::new();
    for component in Path::new(source).components() {
        match component {
            Component::Normal(name) => names.push(name.to_string_lossy().into_owned()),
            // A path that begins with a slash begins at the context, too.
            Component::RootDir | Component::CurDir => (),
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Failure::usage(format!("{source:?} leads out of the context")));
            }
        }
    }
    Ok(names)
}

fn patterns(text: &str) -> Vec<(Vec<String>, bool)> {
    let mut patterns = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (line, again) = match line.strip_prefix('!') {
            Some(line) => (line, true),
            None => (line, false),
        };
        let names = line.split('/').filter(|name| !name.is_empty() && *name != ".");
        patterns.push((names.map(str::to_owned).collect(), again));
    }
    patterns
}

fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?'])
}

/// Matches a path against a pattern, in which `**` stands for any number of names.
fn matches_path(pattern: &[String], names: &[&str]) -> bool {
    match (pattern.split_first(), names.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if first == "**" => {
            (0..=names.len()).any(|skip| matches_path(rest, &names[skip..]))
        }
        (Some((first, rest)), Some((name, names))) => {
            matches(first, name) && matches_path(rest, names)
        }
        _ => false,
    }
}

/// Matches a name against a pattern with `*` and `?`.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut position, mut star) = (0, 0, None);
    while position < name.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, position));
                at += 1;
            }
            Some(char) if *char == '?' || *char == name[position] => {
                (at, position) = (at + 1, position + 1)
            }
            // The last star takes one character more.
            _ => match star {
                Some((star_at, taken)) => {
                    star = Some((star_at, taken + 1));
                    (at, position) = (star_at + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|char| *char == '*')
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::usage(format!("cannot read {}: {}", path.display(), io_text(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(files: &[(&str, &str)]) -> (tempfile::TempDir, Context) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join("context").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let context = Context::open(&dir.path().join("context")).unwrap();
        (dir, context)
    }

    fn names(found: &[Found]) -> Vec<String> {
        let items = found.iter().flat_map(|found| match found {
            Found::File(item) => std::slice::from_ref(item).iter(),
            Found::Folder(items) => items.iter(),
        });
        items.map(|item| item.name.display().to_string()).collect()
    }

    #[test]
    fn source_is_a_file_a_folder_or_a_pattern() {
        let (_dir, context) =
            context(&[("a.py", "1"), ("b.py", "2"), ("src/c.py", "3"), ("src/d/e", "4")]);
        assert_eq!(names(&context.find("a.py").unwrap()), ["a.py"]);
        assert_eq!(names(&context.find("/a.py").unwrap()), ["a.py"]);
        assert_eq!(names(&context.find("*.py").unwrap()), ["a.py", "b.py"]);
        assert_eq!(names(&context.find("src").unwrap()), ["c.py", "d", "d/e"]);
        assert_eq!(names(&context.find(".").unwrap()).len(), 6);
        assert_eq!(names(&context.find("s*/?.py").unwrap()), ["c.py"]);
        assert!(context.find("missing").unwrap_err().message.contains("not in the context"));
        assert!(context.find("*.txt").is_err());
    }

    #[test]
    fn source_outside_the_context_is_refused() {
        let (dir, context) = context(&[("a", "1")]);
        fs::write(dir.path().join("secret"), "s").unwrap();
        std::os::unix::fs::symlink("../secret", dir.path().join("context/link")).unwrap();
        for source in ["../secret", "a/../../secret", "link", "l*"] {
            assert!(context.find(source).unwrap_err().message.contains("leads out"), "{source}");
        }
        // As part of a folder a link is copied as a link.
        let found = context.find(".").unwrap();
        let Found::Folder(items) = &found[0] else { panic!("{found:?}") };
        assert_eq!(items[1].kind, ItemKind::Symlink("../secret".into()));
    }

    #[test]
    fn ignored_files_are_not_found_unless_taken_in_again() {
        let ignore = "# note\n.git\n**/*.log\nnode/\n!node/keep\n";
        let (_dir, context) = context(&[
            (".dockerignore", ignore),
            (".git/x", ""),
            ("a/b/c.log", ""),
            ("d.log", ""),
            ("node/x", ""),
            ("node/keep", ""),
        ]);
        let found = names(&context.find(".").unwrap());
        assert_eq!(found, [".dockerignore", "a", "a/b", "node/keep"]);
        assert!(context.find("d.log").is_err());
    }

    #[test]
    fn digest_changes_with_content_name_and_mode_but_not_with_time() {
        let of = |files: &[(&str, &str)]| {
            let (_dir, context) = context(files);
            digest(&context.find("a*").unwrap()).unwrap()
        };
        assert_eq!(of(&[("a", "1")]), of(&[("a", "1"), ("b", "2")]));
        assert_ne!(of(&[("a", "1")]), of(&[("a", "2")]));
        assert_ne!(of(&[("a", "1")]), of(&[("ab", "1")]));
        assert_ne!(of(&[("a", "1")]), of(&[("a/x", "1")]));
    }

    #[test]
    fn pattern_with_many_stars_takes_no_time() {
        assert!(!matches(&"*a".repeat(50), &"a".repeat(49)));
        assert!(matches("a*b?d*", "axxbcd"));
    }
}
