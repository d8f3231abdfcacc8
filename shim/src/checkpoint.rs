//! A checkpoint as containerd gets it: the files of a snapshot in one archive, without their holes.
//!
//! containerd packs a folder with every hole written out as zeros, and the memory and the disks of
//! a VM are mostly holes. GNU tar unpacks the archive: its sparse files are of version 1.0.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

/// Where ranges of data begin and end in an archive.
const BLOCK: u64 = 512;

/// Writes the files of `folder`, which has no folders in it, to a new archive.
pub fn pack(folder: &Path, archive: &Path) -> io::Result<()> {
    let mut names = fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<io::Result<Vec<OsString>>>()?;
    names.sort();
    let mut builder = Builder::new(File::create_new(archive)?);
    for name in names {
        let file = File::open(folder.join(&name))?;
        let name = name.to_str().ok_or(io::ErrorKind::InvalidInput)?;
        append(&mut builder, name, &file)?;
    }
    builder.into_inner().map(drop)
}

fn append(builder: &mut Builder<File>, name: &str, file: &File) -> io::Result<()> {
    let size = file.metadata()?.len();
    let ranges = data_ranges(file, size)?;
    let records = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", name),
        ("GNU.sparse.realsize", &size.to_string()),
    ];
    let records: String = records.map(|(key, value)| record(key, value)).concat();
    let place = format!("PaxHeaders/{name}");
    let extended = header(EntryType::XHeader, &place, records.len() as u64)?;
    builder.append(&extended, records.as_bytes())?;

    let map = map(&ranges, size);
    let data: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let place = format!("GNUSparseFile.0/{name}");
    let header = header(EntryType::Regular, &place, map.len() as u64 + data)?;
    builder.append(&header, map.as_slice().chain(Data { file, ranges }))
}

fn header(kind: EntryType, path: &str, size: u64) -> io::Result<Header> {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_path(path)?;
    header.set_mode(0o600);
    header.set_size(size);
    header.set_cksum();
    Ok(header)
}

/// Returns one line of an extended header, which begins with its own length.
fn record(key: &str, value: &str) -> String {
    let rest = format!(" {key}={value}\n");
    let mut length = rest.len() + 1;
    while length != rest.len() + length.to_string().len() {
        length = rest.len() + length.to_string().len();
    }
    format!("{length}{rest}")
}

/// Returns the list of ranges that stands before the data. The last one is empty, and is where the
/// file ends.
fn map(ranges: &VecDeque<Range<u64>>, size: u64) -> Vec<u8> {
    let mut text = format!("{}\n", ranges.len() + 1);
    for range in ranges {
        text += &format!("{}\n{}\n", range.start, range.end - range.start);
    }
    text += &format!("{size}\n0\n");
    let mut map = text.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK as usize), 0);
    map
}

/// Returns the ranges of a file that are not holes, in whole blocks but for the end of the file.
fn data_ranges(file: &File, size: u64) -> io::Result<VecDeque<Range<u64>>> {
    let mut ranges: VecDeque<Range<u64>> = VecDeque::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start / BLOCK * BLOCK,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = rustix::fs::seek(file, SeekFrom::Hole(start.max(at)))?;
        at = hole.next_multiple_of(BLOCK).min(size);
        match ranges.back_mut() {
            Some(last) if last.end >= start => last.end = at,
            _ => ranges.push_back(start..at),
        }
    }
    Ok(ranges)
}

/// Reads ranges of a file one after the other.
struct Data<'a> {
    file: &'a File,
    ranges: VecDeque<Range<u64>>,
}

impl Read for Data<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(range) = self.ranges.front_mut() else { return Ok(0) };
        let left = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        let read = self.file.read_at(&mut buffer[..length], range.start)?;
        if read == 0 && length > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        range.start += read as u64;
        if range.start == range.end {
            self.ranges.pop_front();
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn gnu_tar_gives_back_files_and_their_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, out) = (dir.path().join("in"), dir.path().join("out"));
        fs::create_dir(&folder).unwrap();
        fs::create_dir(&out).unwrap();
        let hollow = File::create(folder.join("hollow")).unwrap();
        hollow.set_len(64 << 20).unwrap();
        hollow.write_all_at(b"in the middle", 8 << 20).unwrap();
        let ending = File::create(folder.join("ending")).unwrap();
        ending.write_all_at(b"at the end", (4 << 20) + 1).unwrap();
        fs::write(folder.join("plain"), vec![7; 70_001]).unwrap();
        File::create(folder.join("empty")).unwrap();
        File::create(folder.join("hole")).unwrap().set_len(1 << 20).unwrap();

        let archive = dir.path().join("archive.tar");
        pack(&folder, &archive).unwrap();
        assert!(fs::metadata(&archive).unwrap().len() < 1 << 20);
        let done = Command::new("tar").arg("-C").arg(&out).arg("-xf").arg(&archive).status();
        assert!(done.unwrap().success());
        for name in ["hollow", "ending", "plain", "empty", "hole"] {
            let (before, after) = (folder.join(name), out.join(name));
            assert!(fs::read(before).unwrap() == fs::read(after).unwrap(), "{name}");
        }
        assert!(fs::metadata(out.join("hollow")).unwrap().blocks() * 512 < 1 << 20);
    }

    #[test]
    fn record_begins_with_its_own_length() {
        for length in 1..200 {
            let record = record("k", &"v".repeat(length));
            let said: usize = record.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(said, record.len());
        }
    }
}
