//! `cargo xtask tarball`: an archive for hosts that are not Debian, to be unpacked over /usr/local.
//!
//! Names are sorted, owners and times are fixed, so equal programs give an equal archive.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::{checkout, dist, progress};

/// Files of the checkout, and their places in the archive.
const FILES: [(&str, &str); 5] = [
    ("LICENSE", "share/doc/pvmm/LICENSE"),
    ("README.md", "share/doc/pvmm/README.md"),
    ("CHANGELOG.md", "share/doc/pvmm/CHANGELOG.md"),
    ("launcher/debian/pvmm-serve.socket", "lib/systemd/system/pvmm-serve.socket"),
    ("launcher/debian/pvmm.conf", "lib/sysusers.d/pvmm.conf"),
];

/// The unit that names the place of the program.
const SERVICE: &str = "launcher/debian/pvmm-serve.service";

/// A file of the archive: its mode and its contents.
type Entry = (u32, Vec<u8>);

/// Makes the archive from what [`dist::prepare`] has made, and returns its path.
pub fn build() -> Result<PathBuf, Box<dyn Error>> {
    let name = format!("pvmm-{}-x86_64-linux", dist::VERSION);
    let path = dist::packages().join(format!("{name}.tar.gz"));
    progress::step(format!("the archive: {}", path.display()));
    let entries = entries()?;
    let file = BufWriter::new(File::create(&path)?);
    let mut file = write(&name, &entries, file)?;
    file.flush()?;
    Ok(path)
}

fn entries() -> Result<BTreeMap<String, Entry>, Box<dyn Error>> {
    let (root, dist) = (checkout::root(), dist::dir());
    let mut entries = BTreeMap::new();
    for (_, program) in dist::PROGRAMS {
        let bytes = fs::read(dist::programs().join(program))?;
        entries.insert(format!("bin/{program}"), (0o755, bytes));
    }
    let mut add = |from: PathBuf, to: String| -> io::Result<()> {
        entries.insert(to, (0o644, fs::read(from)?));
        Ok(())
    };
    for page in dist::files(&dist.join("man"))? {
        let name = page.file_name().unwrap_or_default().to_string_lossy().into_owned();
        add(page, format!("share/man/man1/{name}"))?;
    }
    let completions = dist.join("completions");
    for (from, to) in [
        ("pvmm.bash", "share/bash-completion/completions/pvmm"),
        ("_pvmm", "share/zsh/site-functions/_pvmm"),
        ("pvmm.fish", "share/fish/vendor_completions.d/pvmm.fish"),
    ] {
        add(completions.join(from), to.into())?;
    }
    add(dist.join(dist::SBOM), format!("share/doc/pvmm/{}", dist::SBOM))?;
    for (from, to) in FILES {
        add(root.join(from), to.into())?;
    }
    let unit = fs::read_to_string(root.join(SERVICE))?.replace("=/usr/bin/", "=/usr/local/bin/");
    let place = "lib/systemd/system/pvmm-serve.service".to_owned();
    entries.insert(place, (0o644, unit.into_bytes()));
    Ok(entries)
}

/// Writes the archive of the entries, below a folder called `name`.
fn write<W: Write>(name: &str, entries: &BTreeMap<String, Entry>, to: W) -> io::Result<W> {
    let mut archive = tar::Builder::new(GzEncoder::new(to, Compression::best()));
    for (place, (mode, bytes)) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(*mode);
        header.set_mtime(dist::TIME);
        header.set_uid(0);
        header.set_gid(0);
        archive.append_data(&mut header, format!("{name}/{place}"), bytes.as_slice())?;
    }
    archive.into_inner()?.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_of_equal_files_is_equal_and_has_neither_times_nor_owners() {
        let entries = BTreeMap::from([
            ("bin/b".to_owned(), (0o755, b"program".to_vec())),
            ("a".to_owned(), (0o644, b"text".to_vec())),
        ]);
        let first = write("pvmm-1", &entries, Vec::new()).unwrap();
        assert_eq!(first, write("pvmm-1", &entries, Vec::new()).unwrap());
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(first.as_slice()));
        let seen = archive.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let header = entry.header();
            let owner = (header.uid().unwrap(), header.gid().unwrap());
            assert_eq!((owner, header.mtime().unwrap()), ((0, 0), dist::TIME));
            (entry.path().unwrap().display().to_string(), header.mode().unwrap())
        });
        let seen: Vec<_> = seen.collect();
        assert_eq!(seen, [("pvmm-1/a".into(), 0o644), ("pvmm-1/bin/b".into(), 0o755)]);
    }
}
