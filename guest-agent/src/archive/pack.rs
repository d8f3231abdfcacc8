//! Packs a tree into an archive: kinds, modes, owners, links, holes, and each hard-linked file
//! once.
//!
//! The tree may change meanwhile. A file that vanished is left out; one whose length changed is
//! sent with its original length, truncated or filled with zeros, so that the archive stays valid.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, GnuExtSparseHeader, Header, HeaderMode};

use super::{ArchiveError, At, Holes};

/// The most files with several names that are remembered; others are sent once for each name.
const MAX_LINKED: usize = 1 << 16;
/// The most pieces of one file; a file with more is sent with its holes as zeros.
const MAX_PIECES: usize = 1 << 16;

/// Packs the tree at the directory `root`, with names relative to it, and returns the number of
/// entries. `left_out` is called for everything that is neither file nor folder nor link; without
/// it, FIFOs and devices are packed and the unpacking end reports them.
pub fn pack(
    root: &Path,
    out: impl Write,
    holes: Holes,
    left_out: Option<&mut dyn FnMut(&Path)>,
) -> Result<u64, ArchiveError> {
    let mut builder = Builder::new(out);
    builder.mode(HeaderMode::Complete);
    let mut pack = Pack { builder, holes, left_out, linked: HashMap::new(), entries: 0 };
    let facts = fs::metadata(root).at(root, "read")?;
    pack.entry(root, Path::new("."), &facts)?;
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        pack.folder(root, &folder, &mut folders)?;
    }
    pack.builder.finish().at(root, "send")?;
    pack.builder.get_mut().flush().at(root, "send")?;
    Ok(pack.entries)
}

struct Pack<'a, W: Write> {
    builder: Builder<W>,
    holes: Holes,
    left_out: Option<&'a mut dyn FnMut(&Path)>,
    /// The first name of each file that has several.
    linked: HashMap<(u64, u64), PathBuf>,
    entries: u64,
}

impl<W: Write> Pack<'_, W> {
    /// Packs the entries of one directory and adds its subdirectories to `folders`.
    fn folder(
        &mut self,
        root: &Path,
        folder: &Path,
        folders: &mut Vec<PathBuf>,
    ) -> Result<(), ArchiveError> {
        let path = root.join(folder);
        let mut names: Vec<OsString> = Vec::new();
        let listing = match fs::read_dir(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            listing => listing.at(&path, "read")?,
        };
        for entry in listing {
            names.push(entry.at(&path, "read")?.file_name());
        }
        names.sort_unstable();
        let below = folders.len();
        for name in names {
            let (path, name) = (path.join(&name), folder.join(&name));
            let facts = match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                facts => facts.at(&path, "read")?,
            };
            self.entry(&path, &name, &facts)?;
            if facts.is_dir() {
                folders.push(name);
            }
        }
        // `folders` is a stack: the last one added is packed next.
        folders[below..].reverse();
        Ok(())
    }

    fn entry(&mut self, path: &Path, name: &Path, facts: &Metadata) -> Result<(), ArchiveError> {
        let kind = facts.file_type();
        let mut header = Header::new_gnu();
        header.set_metadata_in_mode(facts, HeaderMode::Complete);
        header.set_size(0);
        if kind.is_file() {
            return self.file(path, name, header);
        }
        if kind.is_symlink() {
            let target = match fs::read_link(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                target => target.at(path, "read")?,
            };
            header.set_entry_type(EntryType::Symlink);
            self.builder.append_link(&mut header, name, target).at(path, "send")?;
        } else if let Some(left_out) = self.left_out.as_mut().filter(|_| !kind.is_dir()) {
            left_out(path);
            return Ok(());
        } else if kind.is_socket() {
            // Tar has no entry type for sockets.
            return Ok(());
        } else {
            self.builder.append_data(&mut header, name, io::empty()).at(path, "send")?;
        }
        self.entries += 1;
        Ok(())
    }

    fn file(&mut self, path: &Path, name: &Path, mut header: Header) -> Result<(), ArchiveError> {
        // Does not follow a link that was put there meanwhile, and does not wait for a FIFO.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            file => file.at(path, "open")?,
        };
        let facts = file.metadata().at(path, "read")?;
        if !facts.is_file() {
            return Ok(());
        }
        header.set_metadata_in_mode(&facts, HeaderMode::Complete);
        self.entries += 1;
        if facts.nlink() > 1 {
            let key = (facts.dev(), facts.ino());
            if let Some(first) = self.linked.get(&key) {
                header.set_entry_type(EntryType::Link);
                header.set_size(0);
                return self.builder.append_link(&mut header, name, first).at(path, "send");
            }
            if self.linked.len() < MAX_LINKED {
                self.linked.insert(key, name.to_owned());
            }
        }
        match self.pieces(&file, &facts) {
            Some(pieces) => self.pieces_of(file, name, header, &facts, &pieces).at(path, "send"),
            None => {
                let contents = Exactly { file, left: facts.len() };
                self.builder.append_data(&mut header, name, contents).at(path, "send")
            }
        }
    }

    /// Returns the data ranges of a file, as offsets and lengths; `None` if it has no holes worth
    /// keeping.
    fn pieces(&self, file: &File, facts: &Metadata) -> Option<Vec<(u64, u64)>> {
        let end = facts.len();
        if facts.blocks().saturating_mul(512) >= end {
            return None;
        }
        let (mut pieces, mut at) = (Vec::new(), 0);
        while at < end {
            let data = (self.holes.next_data)(file, at).ok()?.unwrap_or(end).min(end);
            if data >= end {
                break;
            }
            let hole = (self.holes.next_hole)(file, data).ok()?.unwrap_or(end).clamp(data + 1, end);
            pieces.push((data, hole - data));
            at = hole;
            if pieces.len() > MAX_PIECES {
                return None;
            }
        }
        // The last piece marks the length of the file.
        if pieces.last().is_none_or(|(at, len)| at + len < end) {
            pieces.push((end, 0));
        }
        Some(pieces)
    }

    /// Packs a file as pieces, in the old GNU format: four in the header, the others in blocks
    /// after it.
    fn pieces_of(
        &mut self,
        file: File,
        name: &Path,
        mut header: Header,
        facts: &Metadata,
        pieces: &[(u64, u64)],
    ) -> io::Result<()> {
        let size = pieces.iter().map(|(_, len)| len).sum();
        header.set_entry_type(EntryType::GNUSparse);
        header.set_size(size);
        let gnu = header.as_gnu_mut().ok_or(ErrorKind::InvalidInput)?;
        gnu.set_real_size(facts.len());
        let (first, rest) = pieces.split_at(pieces.len().min(gnu.sparse.len()));
        for (place, (offset, len)) in gnu.sparse.iter_mut().zip(first) {
            place.set_offset(*offset);
            place.set_length(*len);
        }
        gnu.set_is_extended(!rest.is_empty());
        let mut map = Vec::new();
        let per_block = GnuExtSparseHeader::new().sparse.len();
        let blocks = rest.len().div_ceil(per_block);
        for (number, chunk) in rest.chunks(per_block).enumerate() {
            let mut block = GnuExtSparseHeader::new();
            for (place, (offset, len)) in block.sparse.iter_mut().zip(chunk) {
                place.set_offset(*offset);
                place.set_length(*len);
            }
            block.set_is_extended(number + 1 < blocks);
            map.extend_from_slice(block.as_bytes());
        }
        // The map lies between header and data and consists of whole blocks, so only the data needs
        // padding.
        let contents = io::Cursor::new(map).chain(Pieces { file, pieces: pieces.iter(), left: 0 });
        self.builder.append_data(&mut header, name, contents)
    }
}

/// Reads a file with its original length, even if it changes.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        read_or_zeros(&mut self.file, buffer, &mut self.left)
    }
}

/// Reads the pieces of a file, one after another.
struct Pieces<'a> {
    file: File,
    pieces: std::slice::Iter<'a, (u64, u64)>,
    left: u64,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.left == 0 {
            let Some((offset, len)) = self.pieces.next() else { return Ok(0) };
            self.file.seek(SeekFrom::Start(*offset))?;
            self.left = *len;
        }
        read_or_zeros(&mut self.file, buffer, &mut self.left)
    }
}

fn read_or_zeros(file: &mut File, buffer: &mut [u8], left: &mut u64) -> io::Result<usize> {
    let most = (buffer.len() as u64).min(*left) as usize;
    let count = match file.read(&mut buffer[..most])? {
        0 => {
            buffer[..most].fill(0);
            most
        }
        count => count,
    };
    *left -= count as u64;
    Ok(count)
}
