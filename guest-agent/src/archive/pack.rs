//! A tree into an archive, as it is: kinds, modes, owners, links, holes, and one name for each hard link.
//!
//! Others may change the tree meanwhile. A file that vanished is left out; one that changed its length is
//! sent with the length it had, cut off or filled up with zeros, so that the archive stays whole.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, GnuExtSparseHeader, Header, HeaderMode};

use super::{ArchiveError, At, Holes};

/// Files with more names than one that are remembered; others are sent once for each name.
const MAX_LINKED: usize = 1 << 16;
/// Pieces of one file; one in more pieces is sent with its holes as zeros.
const MAX_PIECES: usize = 1 << 16;

/// Packs the tree at `root`, a directory, with names relative to it. What is neither file nor folder nor link
/// is told to `left_out`; without one, FIFOs and devices are packed and whoever unpacks tells. Returns how
/// many entries there are.
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
    /// Everything in one directory but what is below its directories, which come later.
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
        // The last one in is the next one out.
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
            // There is no word for one in an archive.
            return Ok(());
        } else {
            self.builder.append_data(&mut header, name, io::empty()).at(path, "send")?;
        }
        self.entries += 1;
        Ok(())
    }

    fn file(&mut self, path: &Path, name: &Path, mut header: Header) -> Result<(), ArchiveError> {
        // Not through a link that was put there meanwhile, and without waiting for a FIFO.
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

    /// Where a file has data, as places and lengths; none if it has no holes worth the name.
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
        // The last piece says how long the file is.
        if pieces.last().is_none_or(|(at, len)| at + len < end) {
            pieces.push((end, 0));
        }
        Some(pieces)
    }

    /// A file of pieces, in the old GNU form: four in the header, the others in blocks after it.
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
        // The map lies between header and data and is whole blocks, so only the data asks for padding.
        let contents = io::Cursor::new(map).chain(Pieces { file, pieces: pieces.iter(), left: 0 });
        self.builder.append_data(&mut header, name, contents)
    }
}

/// A file as long as it was, whatever becomes of it.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        read_or_zeros(&mut self.file, buffer, &mut self.left)
    }
}

/// The pieces of a file, one after another.
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
