//! Tells local programs where the server is and which token it accepts.
//!
//! A token that the server made is kept in its data directory, so that it stays the same. A running
//! server has a file in the runtime directory. Both are readable by the user alone.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use pvmm_sandbox::Failure;
use serde::{Deserialize, Serialize};

use crate::ids;

const TOKEN_FILE: &str = "token";
const ANNOUNCEMENT: &str = "serve.json";
/// The longest announcement that is read.
const LONGEST: u64 = 64 << 10;

/// The address and the token of a running server.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Announcement {
    /// The address, as clients write it.
    pub url: String,
    /// A token that the server accepts.
    pub token: String,
}

/// Creates a directory that only the user can enter.
pub fn private_dir(path: &Path) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::usage(format!("cannot make {}: {error}", path.display()));
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
    match mode & 0o077 {
        0 => Ok(()),
        _ => Err(Failure::usage(format!("{} is open to other users", path.display()))
            .hint(format!("chmod 700 {}", path.display()))),
    }
}

/// Writes a file that only the user can read, as a whole.
fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let _ = fs::remove_file(&new);
    let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)
}

/// Returns the token of a data directory, which is made at the first call, and the file with it.
pub fn kept_token(data_dir: &Path) -> Result<(String, PathBuf), Failure> {
    let path = data_dir.join(TOKEN_FILE);
    let failed = |error: io::Error| Failure::fault(format!("{}: {error}", path.display()));
    let token = match fs::read_to_string(&path) {
        Ok(text) if !text.trim().is_empty() => text.trim().to_owned(),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {
            let token = ids::new_token().map_err(failed)?;
            write_private(&path, &format!("{token}\n")).map_err(failed)?;
            token
        }
    };
    Ok((token, path))
}

/// The announcement of a running server, which is removed when this is dropped.
pub struct Announced {
    path: PathBuf,
    text: String,
}

impl Drop for Announced {
    fn drop(&mut self) {
        // Another server may have replaced it meanwhile.
        if fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Announcement {
    /// Returns the announcement of the server that runs for this user, which must accept a
    /// connection: a server that was killed leaves its announcement behind.
    pub fn find(runtime_dir: &Path) -> Result<Self, Failure> {
        let nobody = || Failure::usage("no service is running here").hint("start one: pvmm serve");
        let path = runtime_dir.join(ANNOUNCEMENT);
        let mut text = String::new();
        let read = fs::File::open(&path)
            .and_then(|file| file.take(LONGEST).read_to_string(&mut text))
            .and_then(|_| serde_json::from_str(&text).map_err(io::Error::from));
        let found: Self = match read {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(nobody()),
            Err(error) => return Err(Failure::fault(format!("{}: {error}", path.display()))),
        };
        if found.accepts() { Ok(found) } else { Err(nobody()) }
    }

    fn accepts(&self) -> bool {
        if let Some(path) = self.url.strip_prefix("unix:") {
            return UnixStream::connect(path).is_ok();
        }
        let address = self.url.split_once("://").map_or("", |(_, address)| address);
        TcpStream::connect(address.trim_end_matches('/')).is_ok()
    }

    /// Returns the announcement as one line of JSON.
    pub fn line(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Writes the announcement to the runtime directory.
    pub fn publish(&self, runtime_dir: &Path) -> Result<Announced, Failure> {
        private_dir(runtime_dir)?;
        let (path, text) = (runtime_dir.join(ANNOUNCEMENT), self.line());
        write_private(&path, &text)
            .map_err(|error| Failure::fault(format!("{}: {error}", path.display())))?;
        Ok(Announced { path, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn kept_token_stays_the_same_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let (token, path) = kept_token(dir.path()).unwrap();
        assert_eq!(kept_token(dir.path()).unwrap().0, token);
        assert!(token.starts_with(ids::TOKEN_PREFIX));
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn announcement_is_private_and_goes_with_its_server() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = dir.path().join("run");
        let first = Announcement { url: "http://127.0.0.1:1".into(), token: "a".into() };
        let second = Announcement { url: "http://127.0.0.1:2".into(), token: "b".into() };
        let announced = first.publish(&runtime).unwrap();
        assert_eq!(mode(&runtime.join(ANNOUNCEMENT)), 0o600);
        let later = second.publish(&runtime).unwrap();
        drop(announced);
        assert!(runtime.join(ANNOUNCEMENT).exists());
        drop(later);
        assert!(!runtime.join(ANNOUNCEMENT).exists());
    }

    #[test]
    fn announcement_is_found_as_long_as_its_server_accepts() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = dir.path().join("run");
        assert!(Announcement::find(&runtime).unwrap_err().message.contains("no service"));
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", socket.local_addr().unwrap());
        let announcement = Announcement { url, token: "a".into() };
        let _announced = announcement.publish(&runtime).unwrap();
        assert_eq!(Announcement::find(&runtime).unwrap(), announcement);
        drop(socket);
        assert!(Announcement::find(&runtime).unwrap_err().message.contains("no service"));
    }

    #[test]
    fn directory_that_others_can_enter_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(private_dir(dir.path()).unwrap_err().message.contains("open to other users"));
    }
}
