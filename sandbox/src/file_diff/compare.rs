//! Compares the files of two moments.

use std::collections::BTreeMap;
use std::fmt::Write;

use pvmm::agent::{FileKind, Metadata};
use serde::Serialize;

use super::walk::Files;
use crate::failure::{Failure, one_line};

/// The most changes that are listed.
const MAX_CHANGES: usize = 10_000;

/// The files that differ between two moments, in the order of their paths.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FileDiff {
    pub from: String,
    /// `None` is the present.
    pub to: Option<String>,
    pub added: u64,
    pub changed: u64,
    pub removed: u64,
    pub changes: Vec<FileChange>,
    /// The number of changes beyond those that are listed.
    pub left_out: u64,
    /// Directories that could not be listed in one of the moments.
    pub unreadable: u64,
}

/// How a file differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    Added,
    Changed,
    Removed,
}

/// A file at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    pub kind: FileKind,
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// The target of a symbolic link.
    pub target: Option<String>,
}

/// A file that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileChange {
    pub change: ChangeKind,
    /// Bytes that are no text are replaced.
    pub path: String,
    #[serde(skip)]
    pub(super) bytes: Vec<u8>,
    /// The parts that differ of a changed file: `kind`, `content`, `target`, `mode`, `owner`.
    pub what: Vec<&'static str>,
    pub old: Option<Entry>,
    pub new: Option<Entry>,
    /// The lines of a text file that differ, if they were asked for.
    pub patch: Option<String>,
}

impl Entry {
    fn of(metadata: &Metadata) -> Self {
        let target = metadata.target.as_ref();
        Self {
            kind: metadata.kind,
            size: if metadata.kind == FileKind::File { metadata.size } else { 0 },
            mode: metadata.mode,
            uid: metadata.uid,
            gid: metadata.gid,
            target: target.map(|target| String::from_utf8_lossy(target).into_owned()),
        }
    }
}

/// Compares two lists of files. `equal` compares the contents of a file of equal sizes, which are
/// given, that was written since.
pub fn compare(
    old: Files,
    new: Files,
    equal: impl Fn(&[u8], u64) -> Result<bool, Failure>,
) -> Result<FileDiff, Failure> {
    let mut diff = FileDiff { unreadable: old.unreadable + new.unreadable, ..FileDiff::default() };
    let mut pairs: BTreeMap<Vec<u8>, (Option<Metadata>, Option<Metadata>)> = BTreeMap::new();
    for (path, metadata) in old.all {
        pairs.insert(path, (Some(metadata), None));
    }
    for (path, metadata) in new.all {
        pairs.entry(path).or_default().1 = Some(metadata);
    }
    for (path, pair) in pairs {
        let (change, what) = match &pair {
            (Some(old), Some(new)) => match differences(&path, old, new, &equal)? {
                what if what.is_empty() => continue,
                what => (ChangeKind::Changed, what),
            },
            (None, _) => (ChangeKind::Added, Vec::new()),
            (_, None) => (ChangeKind::Removed, Vec::new()),
        };
        diff.push(FileChange {
            change,
            path: String::from_utf8_lossy(&path).into_owned(),
            bytes: path,
            what,
            old: pair.0.as_ref().map(Entry::of),
            new: pair.1.as_ref().map(Entry::of),
            patch: None,
        });
    }
    Ok(diff)
}

/// Returns what differs of a file.
fn differences(
    path: &[u8],
    old: &Metadata,
    new: &Metadata,
    equal: &impl Fn(&[u8], u64) -> Result<bool, Failure>,
) -> Result<Vec<&'static str>, Failure> {
    if old.kind != new.kind {
        return Ok(vec!["kind"]);
    }
    let mut what = Vec::new();
    if old.kind == FileKind::File {
        let times = |it: &Metadata| (it.mtime_s, it.mtime_ns, it.ctime);
        let touched = times(old) != times(new);
        if old.size != new.size || (touched && !equal(path, old.size)?) {
            what.push("content");
        }
    }
    let named = [
        ("target", old.target != new.target),
        ("mode", old.mode != new.mode),
        ("owner", (old.uid, old.gid) != (new.uid, new.gid)),
    ];
    what.extend(named.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name));
    Ok(what)
}

impl FileDiff {
    fn push(&mut self, change: FileChange) {
        match change.change {
            ChangeKind::Added => self.added += 1,
            ChangeKind::Changed => self.changed += 1,
            ChangeKind::Removed => self.removed += 1,
        }
        if self.changes.len() < MAX_CHANGES {
            self.changes.push(change);
        } else {
            self.left_out += 1;
        }
    }

    /// Renders the diff for people, one file in each line; patches follow their files. `clean`
    /// renders a line of a patch.
    pub fn text(&self, clean: impl Fn(&str) -> String) -> String {
        let mut text = String::new();
        for change in &self.changes {
            // Writing to a String never fails.
            let _ = writeln!(text, "{}", change.line());
            for line in change.patch.iter().flat_map(|patch| patch.lines()) {
                let _ = writeln!(text, "{}", clean(line));
            }
        }
        if self.left_out > 0 {
            let _ = writeln!(text, "... and {} more", self.left_out);
        }
        if self.unreadable > 0 {
            let _ = writeln!(text, "{} directories could not be listed", self.unreadable);
        }
        let Self { added, changed, removed, .. } = self;
        let _ = writeln!(text, "{added} added, {changed} changed, {removed} removed");
        text
    }
}

impl FileChange {
    fn line(&self) -> String {
        let letter = match self.change {
            ChangeKind::Added => 'A',
            ChangeKind::Changed => 'M',
            ChangeKind::Removed => 'D',
        };
        let is_dir = self.old.iter().chain(&self.new).any(|it| it.kind == FileKind::Directory);
        let mut line = format!("{letter}  {}{}", self.path, if is_dir { "/" } else { "" });
        let size = |entry: &Entry| (entry.kind == FileKind::File).then_some(entry.size);
        match (self.old.as_ref().and_then(size), self.new.as_ref().and_then(size)) {
            (Some(old), Some(new)) if old != new => {
                let _ = write!(line, "  {old} -> {new} bytes");
            }
            (Some(size), _) | (_, Some(size)) => {
                let _ = write!(line, "  {size} bytes");
            }
            (None, None) => {}
        }
        let others: Vec<_> = self.what.iter().filter(|it| **it != "content").copied().collect();
        if !others.is_empty() {
            let _ = write!(line, "  ({})", others.join(", "));
        }
        one_line(&line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(size: u64, written: i64) -> Metadata {
        Metadata {
            kind: FileKind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size,
            nlink: 1,
            mtime_s: written,
            mtime_ns: 0,
            ctime: Some((written, 0)),
            target: None,
        }
    }

    fn files(all: &[(&str, Metadata)]) -> Files {
        let all = all.iter().map(|(path, it)| (path.as_bytes().to_vec(), it.clone()));
        Files { all: all.collect(), unreadable: 0 }
    }

    fn diff(old: &[(&str, Metadata)], new: &[(&str, Metadata)], equal: bool) -> FileDiff {
        compare(files(old), files(new), |_, _| Ok(equal)).unwrap()
    }

    #[test]
    fn added_changed_and_removed_files_are_told_apart() {
        let old = [("/a", file(1, 1)), ("/b", file(2, 1)), ("/same", file(3, 1))];
        let new = [("/b", file(5, 2)), ("/c\n", file(4, 2)), ("/same", file(3, 1))];
        let found = diff(&old, &new, false);
        assert_eq!((found.added, found.changed, found.removed), (1, 1, 1));
        let text = "D  /a  1 bytes\nM  /b  2 -> 5 bytes\nA  /c\\n  4 bytes\n";
        assert!(found.text(str::to_owned).starts_with(text), "{}", found.text(str::to_owned));
    }

    #[test]
    fn file_that_was_written_is_changed_only_if_its_content_is_other() {
        let mut hidden = file(3, 1);
        hidden.ctime = Some((9, 9));
        for new in [file(3, 2), hidden] {
            let pair = |equal| diff(&[("/a", file(3, 1))], &[("/a", new.clone())], equal);
            assert_eq!(pair(true).changes, []);
            assert_eq!(pair(false).changes[0].what, ["content"]);
        }
    }

    #[test]
    fn other_mode_owner_and_kind_are_changes() {
        let of = |change: fn(&mut Metadata)| {
            let mut new = file(3, 1);
            change(&mut new);
            diff(&[("/a", file(3, 1))], &[("/a", new)], true).changes[0].what.clone()
        };
        assert_eq!(of(|it| it.mode = 0o600), ["mode"]);
        assert_eq!(of(|it| it.gid = 5), ["owner"]);
        assert_eq!(of(|it| it.kind = FileKind::Symlink), ["kind"]);
    }

    #[test]
    fn changes_beyond_the_limit_are_counted() {
        let many: Vec<_> = (0..MAX_CHANGES + 7).map(|n| (format!("/{n}"), file(1, 1))).collect();
        let many: Vec<_> = many.iter().map(|(path, it)| (&path[..], it.clone())).collect();
        let found = diff(&[], &many, true);
        assert_eq!((found.changes.len(), found.left_out), (MAX_CHANGES, 7));
        assert_eq!(found.added as usize, MAX_CHANGES + 7);
    }
}
