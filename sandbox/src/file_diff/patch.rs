//! The contents of a file at two moments: whether they are equal, and the lines that differ.

use std::cell::Cell;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, FileKind};
use similar::TextDiff;

use super::compare::{Entry, FileDiff};
use crate::failure::Failure;
use crate::guest_agent;

/// The most bytes that are read to compare contents; files beyond count as changed.
const MAX_COMPARED: u64 = 4 << 30;
/// The largest file with a patch.
const MAX_FILE: u64 = 256 << 10;
/// The most bytes of all patches.
const MAX_PATCHES: usize = 4 << 20;
/// How long to look for a small patch; a larger one is found at once.
const SEARCH: Duration = Duration::from_secs(1);
const BUFFER: usize = 64 << 10;

/// The contents of two guests.
pub struct Contents<'a> {
    old: &'a Agent,
    new: &'a Agent,
    deadline: Instant,
    /// The bytes that may still be compared.
    left: Cell<u64>,
}

impl<'a> Contents<'a> {
    pub fn new(old: &'a Agent, new: &'a Agent, deadline: Instant) -> Self {
        Self { old, new, deadline, left: Cell::new(MAX_COMPARED) }
    }

    /// Returns whether a file of `size` bytes has equal contents in both guests; false if that
    /// would take too long to find out, or if a guest cannot read it.
    pub fn equal(&self, path: &[u8], size: u64) -> Result<bool, Failure> {
        super::check(self.deadline)?;
        let Some(left) = self.left.get().checked_sub(size) else { return Ok(false) };
        self.left.set(left);
        let open = |agent: &Agent| agent.open_read(OsStr::from_bytes(path), None);
        let (Ok(old), Ok(new)) = (open(self.old), open(self.new)) else { return Ok(false) };
        // The guests may send more than they said.
        Ok(same(old.take(size + 1), new.take(size + 1)).unwrap_or(false))
    }

    /// Adds the lines that differ to each text file that is not too large.
    pub fn add_patches(&self, diff: &mut FileDiff) -> Result<(), Failure> {
        let mut left = MAX_PATCHES;
        for change in &mut diff.changes {
            super::check(self.deadline)?;
            let small = |entry: &Option<Entry>| {
                entry.as_ref().is_none_or(|it| it.kind == FileKind::File && it.size <= MAX_FILE)
            };
            let has_content = change.what.is_empty() || change.what.contains(&"content");
            if !has_content || !small(&change.old) || !small(&change.new) {
                continue;
            }
            let read = |agent: &Agent, entry: &Option<Entry>| match entry {
                Some(_) => agent.read_file(OsStr::from_bytes(&change.bytes), MAX_FILE),
                None => Ok(Vec::new()),
            };
            let old = read(self.old, &change.old).map_err(guest_agent::refuse)?;
            let new = read(self.new, &change.new).map_err(guest_agent::refuse)?;
            let names = (
                change.old.as_ref().map(|_| &change.path[..]),
                change.new.as_ref().map(|_| &change.path[..]),
            );
            let found = patch(&old, &new, names).filter(|patch| patch.len() <= left);
            left -= found.as_ref().map_or(0, String::len);
            change.patch = found;
        }
        Ok(())
    }
}

/// Returns the lines that differ as a unified diff; `None` for files that are no text. A file of
/// which there is no name does not exist.
fn patch(old: &[u8], new: &[u8], names: (Option<&str>, Option<&str>)) -> Option<String> {
    let text = |bytes| std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
    let (old, new) = (text(old)?, text(new)?);
    let header = |side: &str, name: Option<&str>| {
        name.map_or_else(|| "/dev/null".to_owned(), |name| format!("{side}{}", name.escape_debug()))
    };
    let diff = TextDiff::configure().timeout(SEARCH).diff_lines(old, new);
    let text = diff.unified_diff().header(&header("a", names.0), &header("b", names.1)).to_string();
    (!text.is_empty()).then_some(text)
}

/// Returns whether both have the same bytes.
fn same(one: impl Read, other: impl Read) -> io::Result<bool> {
    let mut one = BufReader::with_capacity(BUFFER, one);
    let mut other = BufReader::with_capacity(BUFFER, other);
    loop {
        let (here, there) = (one.fill_buf()?, other.fill_buf()?);
        let len = here.len().min(there.len());
        if len == 0 {
            return Ok(here.is_empty() && there.is_empty());
        }
        if here.get(..len) != there.get(..len) {
            return Ok(false);
        }
        one.consume(len);
        other.consume(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_equal_only_if_every_byte_is() {
        let long = vec![7; 3 * BUFFER + 5];
        let mut other = long.clone();
        assert!(same(&long[..], &other[..]).unwrap());
        other[2 * BUFFER] = 8;
        assert!(!same(&long[..], &other[..]).unwrap());
        assert!(!same(&long[..], &long[..BUFFER]).unwrap());
        // Pieces of other sizes.
        assert!(same((&long[..9]).chain(&long[9..]), &long[..]).unwrap());
    }

    #[test]
    fn patch_of_a_text_has_its_lines_and_of_other_bytes_there_is_none() {
        let made = patch(b"a\nb\n", b"a\nc\n", (Some("/x"), Some("/x"))).unwrap();
        assert_eq!(made, "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n");
        let added = patch(b"", b"one\n", (None, Some("/x"))).unwrap();
        assert!(added.starts_with("--- /dev/null\n+++ b/x\n"), "{added}");
        assert_eq!(patch(b"\xff", b"a", (Some("/x"), Some("/x"))), None);
        assert_eq!(patch(b"a\0", b"a", (Some("/x"), Some("/x"))), None);
    }
}
