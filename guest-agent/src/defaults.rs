//! Environment, working directory and user that the root filesystem gives to commands which name
//! none: a file that the build of a Dockerfile leaves there.
//!
//! The file has records that end in a NUL byte: `env NAME=VALUE`, `cwd PATH` and `user NAME`.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

const FILE: &str = "/etc/pvmm/defaults";
const MAX_FILE: u64 = 256 << 10;

/// The defaults of the root filesystem.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Defaults {
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    pub cwd: Option<Vec<u8>>,
    pub user: Option<String>,
}

impl Defaults {
    /// Reads the file. Without one there are no defaults.
    pub fn read() -> Self {
        let mut text = Vec::new();
        // Not blocking: a FIFO in that place must not block the agent.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(FILE);
        match file.and_then(|file| file.take(MAX_FILE).read_to_end(&mut text)) {
            Ok(_) => Self::parse(&text),
            Err(_) => Self::default(),
        }
    }

    /// Reads records; those that make no sense are left out.
    fn parse(text: &[u8]) -> Self {
        let mut found = Self::default();
        for record in text.split(|byte| *byte == 0) {
            let Some(at) = record.iter().position(|byte| *byte == b' ') else { continue };
            let value = &record[at + 1..];
            match &record[..at] {
                b"env" => {
                    let equals = value.iter().position(|byte| *byte == b'=').filter(|at| *at > 0);
                    let entry = equals.map(|at| (value[..at].to_vec(), value[at + 1..].to_vec()));
                    found.env.extend(entry);
                }
                b"cwd" if value.starts_with(b"/") => found.cwd = Some(value.to_vec()),
                b"user" => found.user = String::from_utf8(value.to_vec()).ok(),
                _ => {}
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_and_nonsense_is_left_out() {
        let text = b"env A=b c=d\0env E=\0cwd /app\0user ann\0env =x\0cwd app\0odd\0env no";
        let found = Defaults::parse(text);
        let env = [("A", "b c=d"), ("E", "")].map(|(name, value)| (name.into(), value.into()));
        assert_eq!(found.env, env);
        assert_eq!(found.cwd.as_deref(), Some(&b"/app"[..]));
        assert_eq!(found.user.as_deref(), Some("ann"));
        assert_eq!(Defaults::parse(b""), Defaults::default());
    }
}
