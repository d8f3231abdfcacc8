//! Reads the files of a Debian package.
//!
//! Done in Rust, so that nothing is installed and no maintainer script ever runs.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use lzma_rust2::XzReader;
use ruzstd::decoding::StreamingDecoder;

const AR_MAGIC: &[u8; 8] = b"!<arch>\n";
const AR_HEADER: usize = 60;

#[derive(Debug, thiserror::Error)]
pub enum DebError {
    #[error("cannot read package {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a Debian package: delete it and retry", path.display())]
    NotAPackage { path: PathBuf },
    #[error("package {} has its files in {member}, of which only .xz, .zst, .gz and plain tar are known", path.display())]
    UnknownCompression { path: PathBuf, member: String },
}

/// The tar stream of a package's files.
pub(crate) type Files = tar::Archive<Box<dyn Read>>;

/// The part of a package to read.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// Maintainer scripts and metadata.
    Control,
    /// The files to install.
    Data,
}

pub(crate) fn open(path: &Path, part: Part) -> Result<Files, DebError> {
    let failed = |source| DebError::Read { path: path.to_owned(), source };
    let not_a_package = || DebError::NotAPackage { path: path.to_owned() };
    let prefix = match part {
        Part::Control => "control.tar",
        Part::Data => "data.tar",
    };
    let mut file = File::open(path).map_err(failed)?;
    let mut magic = [0; 8];
    file.read_exact(&mut magic).map_err(|_| not_a_package())?;
    if &magic != AR_MAGIC {
        return Err(not_a_package());
    }
    loop {
        let mut header = [0; AR_HEADER];
        file.read_exact(&mut header).map_err(|_| not_a_package())?;
        let text = |range: std::ops::Range<usize>| {
            String::from_utf8_lossy(&header[range]).trim_end().trim_end_matches('/').to_owned()
        };
        let (name, size) = (text(0..16), text(48..58).parse::<u64>());
        let size = size.map_err(|_| not_a_package())?;
        if let Some(suffix) = name.strip_prefix(prefix) {
            let member = BufReader::with_capacity(64 * 1024, file.take(size));
            let stream: Box<dyn Read> = match suffix {
                "" => Box::new(member),
                ".xz" => Box::new(XzReader::new(member, true)),
                ".gz" => Box::new(flate2::read::GzDecoder::new(member)),
                ".zst" => Box::new(
                    StreamingDecoder::new(member).map_err(|err| failed(io::Error::other(err)))?,
                ),
                _ => {
                    let path = path.to_owned();
                    return Err(DebError::UnknownCompression { path, member: name });
                }
            };
            return Ok(tar::Archive::new(stream));
        }
        // Members of an ar archive start at even offsets.
        let skip = i64::try_from(size.next_multiple_of(2)).map_err(|_| not_a_package())?;
        file.seek(SeekFrom::Current(skip)).map_err(failed)?;
    }
}

/// Returns a package's path relative to the root, or `None` if it has `..` components.
pub(crate) fn inner_path(path: &Path) -> Option<PathBuf> {
    use std::path::Component;
    let mut inner = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => inner.push(name),
            Component::CurDir | Component::RootDir => (),
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(inner)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Writes a package with these files (path, content) and nothing else.
    pub(crate) fn package(path: &Path, files: &[(&str, &[u8])]) {
        let mut data = tar::Builder::new(Vec::new());
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            data.append_data(&mut header, name, *content).unwrap();
        }
        write_package(path, "data.tar", &data.into_inner().unwrap());
    }

    pub(crate) fn write_package(path: &Path, member: &str, data: &[u8]) {
        let mut deb = AR_MAGIC.to_vec();
        for (name, content) in [("debian-binary", &b"2.0"[..]), (member, data)] {
            let size = content.len();
            let header = format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{size:<10}`\n", 0, 0, 0, 100_644);
            deb.extend_from_slice(header.as_bytes());
            deb.extend_from_slice(content);
            deb.resize(deb.len().next_multiple_of(2), b'\n');
        }
        std::fs::write(path, deb).unwrap();
    }

    #[test]
    fn package_with_a_file_gives_it_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.deb");
        package(&path, &[("usr/bin/a", b"hello")]);
        let mut files = open(&path, Part::Data).unwrap();
        let mut entry = files.entries().unwrap().next().unwrap().unwrap();
        assert_eq!(entry.path().unwrap(), Path::new("usr/bin/a"));
        assert_eq!(io::read_to_string(&mut entry).unwrap(), "hello");
    }

    #[test]
    fn file_that_is_no_package_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.deb");
        std::fs::write(&path, "just text, long enough for a header").unwrap();
        assert!(matches!(open(&path, Part::Data), Err(DebError::NotAPackage { .. })));
        assert!(matches!(open(dir.path(), Part::Data), Err(DebError::NotAPackage { .. })));
    }

    #[test]
    fn package_with_unknown_compression_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.deb");
        write_package(&path, "data.tar.lzo", b"x");
        let Err(err) = open(&path, Part::Data) else { panic!("opened") };
        assert!(err.to_string().contains("data.tar.lzo"), "{err}");
    }

    #[test]
    fn inner_path_with_parent_is_refused() {
        assert_eq!(inner_path(Path::new("./usr/bin")), Some("usr/bin".into()));
        assert_eq!(inner_path(Path::new("/etc")), Some("etc".into()));
        assert_eq!(inner_path(Path::new("a/../../etc")), None);
    }
}
