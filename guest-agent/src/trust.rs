//! Adds an authority to the guest's trust stores, so that programs accept its certificates.
//!
//! A file for tools that rebuild the stores, an entry in each bundle that programs read, and
//! variables for programs that look elsewhere.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use pvmm_guest_agent::message::ByteBuf;

/// The authority alone, where Debian's and Alpine's tools look for local ones.
const OWN: &str = "usr/local/share/ca-certificates/pvmm.crt";
/// The bundle of Debian, Alpine, Arch and Gentoo. Made if there is none.
const BUNDLE: &str = "etc/ssl/certs/ca-certificates.crt";
/// Bundles of others, which get the authority if they exist.
const OTHERS: [&str; 3] =
    ["etc/pki/tls/certs/ca-bundle.crt", "etc/ssl/ca-bundle.pem", "etc/ssl/cert.pem"];
/// Variables of OpenSSL, curl, Python's requests and Node.
const VARIABLES: [(&str, &str); 4] = [
    ("SSL_CERT_FILE", BUNDLE),
    ("CURL_CA_BUNDLE", BUNDLE),
    ("REQUESTS_CA_BUNDLE", BUNDLE),
    ("NODE_EXTRA_CA_CERTS", OWN),
];
/// The largest bundle that is read; real ones have a quarter of a megabyte.
const BUNDLE_MAX: u64 = 16 << 20;

/// Returns the variables that lead programs to the stores.
pub fn env() -> Vec<(ByteBuf, ByteBuf)> {
    let bytes = |text: String| ByteBuf::from(text.into_bytes());
    let entry = |(name, path): (&str, &str)| (bytes(name.to_owned()), bytes(format!("/{path}")));
    VARIABLES.map(entry).to_vec()
}

/// Adds an authority's certificate (PEM) to the stores below `root`.
pub fn add(root: &Path, certificate: &[u8]) -> io::Result<()> {
    let (own, bundle) = (root.join(OWN), root.join(BUNDLE));
    for path in [&own, &bundle] {
        fs::create_dir_all(path.parent().unwrap_or(root))?;
    }
    let mut file = open(OpenOptions::new().write(true).create(true).truncate(true), &own)?;
    file.write_all(certificate)?;
    let others: Vec<PathBuf> =
        OTHERS.map(|path| root.join(path)).into_iter().filter(|path| path.is_file()).collect();
    if !bundle.exists() {
        let known = others.first().map(|other| read(other)).transpose()?.unwrap_or_default();
        let mut file = open(OpenOptions::new().write(true).create_new(true), &bundle)?;
        file.write_all(&known)?;
    }
    // One may be a link to another, which then has the certificate already.
    std::iter::once(&bundle).chain(&others).try_for_each(|path| append(path, certificate))
}

fn append(path: &Path, certificate: &[u8]) -> io::Result<()> {
    let known = read(path)?;
    if known.windows(certificate.len().max(1)).any(|part| part == certificate) {
        return Ok(());
    }
    let mut file = open(OpenOptions::new().append(true), path)?;
    let end = if known.ends_with(b"\n") || known.is_empty() { "" } else { "\n" };
    file.write_all(&[end.as_bytes(), certificate].concat())
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(OpenOptions::new().read(true), path)?.take(BUNDLE_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file, without ever blocking: the workload may have put anything there.
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let options = options.mode(0o644).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let file = options.open(path).map_err(named)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(ErrorKind::InvalidInput.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AUTHORITY: &[u8] = b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";

    fn place(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("pvmm-trust-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("etc/ssl/certs")).unwrap();
        root
    }

    #[test]
    fn authority_is_added_once_to_every_bundle_that_exists() {
        let root = place("once");
        fs::write(root.join(BUNDLE), "known").unwrap();
        std::os::unix::fs::symlink("certs/ca-certificates.crt", root.join("etc/ssl/cert.pem"))
            .unwrap();
        for _ in 0..2 {
            add(&root, AUTHORITY).unwrap();
        }
        let bundle = fs::read(root.join(BUNDLE)).unwrap();
        assert_eq!(bundle, [b"known\n", AUTHORITY].concat());
        assert_eq!(fs::read(root.join(OWN)).unwrap(), AUTHORITY);
        assert!(!root.join(OTHERS[0]).exists());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn image_with_another_bundle_gets_one_that_has_its_authorities_too() {
        let root = place("other");
        fs::create_dir_all(root.join("etc/pki/tls/certs")).unwrap();
        fs::write(root.join(OTHERS[0]), "known\n").unwrap();
        add(&root, AUTHORITY).unwrap();
        for path in [BUNDLE, OTHERS[0]] {
            assert_eq!(fs::read(root.join(path)).unwrap(), [b"known\n", AUTHORITY].concat());
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn image_without_any_gets_a_bundle_and_what_is_no_file_is_refused() {
        let root = place("none");
        add(&root, AUTHORITY).unwrap();
        assert_eq!(fs::read(root.join(BUNDLE)).unwrap(), AUTHORITY);
        fs::remove_file(root.join(BUNDLE)).unwrap();
        fs::create_dir(root.join(BUNDLE)).unwrap();
        assert!(add(&root, AUTHORITY).is_err());
        fs::remove_dir_all(root).unwrap();
    }
}
