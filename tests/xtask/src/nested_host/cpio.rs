//! Writes the "newc" archive that the kernel unpacks as its first file system.
//!
//! The archive is not compressed: the CPU of the nested host is emulated, and would need more time
//! to decompress than the outer machine needs to pass the bytes.

use std::io::{self, Write};

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

/// An archive being written to `W`.
pub struct Archive<W> {
    out: W,
    inode: u32,
    written: usize,
}

impl<W: Write> Archive<W> {
    pub fn new(out: W) -> Self {
        Archive { out, inode: 1, written: 0 }
    }

    pub fn directory(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, DIRECTORY, &[])
    }

    /// Adds a file that everyone may read and execute.
    pub fn file(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        self.entry(name, PROGRAM, content)
    }

    /// Writes the end mark and returns the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len()).map_err(io::Error::other)?;
        // inode, mode, uid, gid, links, mtime, size, device ×2, rdevice ×2, name length, checksum
        let name_size = name.len() as u32 + 1;
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.inode += 1;
        self.put(header.as_bytes())?;
        self.put(name.as_bytes())?;
        self.put(b"\0")?;
        self.pad()?;
        self.put(content)?;
        self.pad()
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.out.write_all(bytes)
    }

    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(4) - self.written;
        self.put(&[0; 4][..missing])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_of_one_file_has_every_part_on_four_bytes() {
        let mut archive = Archive::new(Vec::new());
        archive.file("init", b"12345").unwrap();
        let bytes = archive.finish().unwrap();
        // 110 bytes of header, 5 of name, 1 of padding, 5 of content, 3 of padding.
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[110..115], b"init\0");
        assert_eq!(&bytes[116..121], b"12345");
        assert_eq!(&bytes[124..130], b"070701");
        assert_eq!(&bytes[124 + 110..124 + 121], b"TRAILER!!!\0");
        assert_eq!(bytes.len() % 4, 0);
    }
}
