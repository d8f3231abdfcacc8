//! Builds the initramfs of every guest: a newc cpio archive with the agent as `/init`.
//!
//! Built in memory, so that booting needs neither cpio nor root nor a file on disk.

/// Mount points for the agent, and the folder of the modules.
const DIRECTORIES: [&str; 8] = ["dev", "proc", "sys", "run", "tmp", "modules", "newroot", "upper"];

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFCHR: u32 = 0o020_000;

/// The end marker of the archive; no file may have this name.
const TRAILER: &str = "TRAILER!!!";

/// Builds an uncompressed initramfs: the agent, and `modules` with their load order in
/// `/modules/order`.
///
/// Each module is (name without `.ko`, uncompressed ELF), dependencies first.
pub fn initramfs(agent: &[u8], modules: &[(String, Vec<u8>)]) -> Vec<u8> {
    let content = agent.len() + modules.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
    let mut cpio = Cpio { out: Vec::with_capacity(content + 16 * 1024), inode: 0 };
    for directory in DIRECTORIES {
        cpio.entry(directory, S_IFDIR | 0o755, (0, 0), &[]);
    }
    // The kernel opens /dev/console before anything is mounted; without it PID 1 has no output.
    cpio.entry("dev/console", S_IFCHR | 0o600, (5, 1), &[]);
    cpio.entry("dev/null", S_IFCHR | 0o666, (1, 3), &[]);
    cpio.entry("init", S_IFREG | 0o755, (0, 0), agent);
    let mut order = String::new();
    for (name, bytes) in modules {
        cpio.entry(&format!("modules/{name}.ko"), S_IFREG | 0o644, (0, 0), bytes);
        order.push_str(name);
        order.push('\n');
    }
    cpio.entry("modules/order", S_IFREG | 0o644, (0, 0), order.as_bytes());
    cpio.entry(TRAILER, 0, (0, 0), &[]);
    cpio.out
}

/// Builds an archive of plain files (name, mode, content) to append to an initramfs: the kernel
/// unpacks the archives in order, and a later file replaces an earlier one of its name.
pub fn appendix(files: &[(&str, u32, &[u8])]) -> Vec<u8> {
    let mut cpio = Cpio { out: Vec::new(), inode: 0 };
    for (name, mode, content) in files {
        cpio.entry(name, S_IFREG | mode, (0, 0), content);
    }
    cpio.entry(TRAILER, 0, (0, 0), &[]);
    cpio.out
}

struct Cpio {
    out: Vec<u8>,
    inode: u32,
}

impl Cpio {
    /// Writes one entry in the format of the kernel's
    /// Documentation/driver-api/early-userspace/buffer-format.rst: thirteen hexadecimal words, the
    /// name with its NUL, then the content, both padded to 4 bytes.
    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.inode += 1;
        let links = if mode & S_IFDIR == S_IFDIR { 2 } else { 1 };
        let (uid, gid, mtime, checksum) = (0, 0, 0, 0);
        let words = [
            self.inode,
            mode,
            uid,
            gid,
            links,
            mtime,
            content.len() as u32,
            0,
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            checksum,
        ];
        self.out.extend_from_slice(b"070701");
        for word in words {
            self.out.extend_from_slice(format!("{word:08x}").as_bytes());
        }
        self.out.extend_from_slice(name.as_bytes());
        self.out.push(0);
        self.pad();
        self.out.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.out.resize(self.out.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Entry = (String, u32, (u32, u32), Vec<u8>);

    /// Lists (name, mode, device, content) of every entry, parsed independently of the writer.
    fn list(archive: &[u8]) -> Vec<Entry> {
        let (mut at, mut entries) = (0, Vec::new());
        loop {
            assert_eq!(&archive[at..at + 6], b"070701", "at {at}");
            let word = |n: usize| {
                let start = at + 6 + n * 8;
                let text = std::str::from_utf8(&archive[start..start + 8]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let name_at = at + 110;
            let name_end = name_at + word(11) as usize;
            let name = String::from_utf8(archive[name_at..name_end - 1].to_vec()).unwrap();
            let start = name_end.next_multiple_of(4);
            let end = start + word(6) as usize;
            if name == TRAILER {
                return entries;
            }
            entries.push((name, word(1), (word(9), word(10)), archive[start..end].to_vec()));
            at = end.next_multiple_of(4);
        }
    }

    #[test]
    fn archive_with_modules_has_all_that_boots() {
        let modules = [("b".to_owned(), b"BBB".to_vec()), ("a".to_owned(), b"A".to_vec())];
        let entries = list(&initramfs(b"agent!", &modules));
        let find = |name: &str| entries.iter().find(|entry| entry.0 == name).unwrap();
        assert_eq!(find("init").1, 0o100_755);
        assert_eq!(find("init").3, b"agent!");
        assert_eq!((find("dev/console").1, find("dev/console").2), (0o020_600, (5, 1)));
        assert_eq!((find("dev/null").1, find("dev/null").2), (0o020_666, (1, 3)));
        assert_eq!(find("modules/b.ko").3, b"BBB");
        assert_eq!(find("modules/order").3, b"b\na\n");
        assert_eq!(find("newroot").1, 0o040_755);
    }

    #[test]
    fn appendix_has_its_files_and_no_other() {
        let entries = list(&appendix(&[("a/b", 0o755, b"x"), ("c", 0o644, b"")]));
        let names: Vec<_> = entries.iter().map(|entry| (entry.0.as_str(), entry.1)).collect();
        assert_eq!(names, [("a/b", 0o100_755), ("c", 0o100_644)]);
    }

    #[test]
    fn archive_without_modules_has_an_empty_order() {
        let entries = list(&initramfs(b"x", &[]));
        assert_eq!(entries.last().unwrap().0, "modules/order");
        assert!(entries.last().unwrap().3.is_empty());
    }
}
