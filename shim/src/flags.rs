//! The command line that containerd gives to a shim, with flags as Go's programs take them.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::ShimError;

/// The identity of a call: which container of which namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    pub namespace: String,
    pub id: String,
    /// The address of containerd's own API.
    pub address: String,
    /// The folder of the container; the current one if containerd does not say.
    pub bundle: Option<PathBuf>,
}

/// A call of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Help,
    Version,
    Start(Flags),
    Delete(Flags),
    /// Serve the socket that is open as the standard input.
    Serve(Flags),
}

pub const HELP: &str = "\
containerd's runtime io.containerd.pvmm.v1: the containers of a pod in a VM of their own.

containerd starts this program, which must be in its PATH:
  containerd-shim-pvmm-v1 -namespace NAME -address SOCKET -id ID [-bundle FOLDER] start|delete
By hand: ctr run --runtime io.containerd.pvmm.v1 IMAGE NAME COMMAND
Once before, as containerd's user: pvmm template build container && pvmm template bake container";

/// The last word of the daemon that `start` leaves behind.
pub const SERVE: &str = "serve";

impl Flags {
    /// Parses the words after the program's name. A flag has one dash or two, and its value follows
    /// after `=` or as a word of its own.
    pub fn parse(words: impl Iterator<Item = OsString>) -> Result<Action, ShimError> {
        let refuse = |why: String| ShimError::Invalid(why);
        let mut flags = Self::default();
        let mut words = words.map(|word| {
            word.into_string().map_err(|word| refuse(format!("{word:?} is not UTF-8")))
        });
        while let Some(word) = words.next() {
            let word = word?;
            let Some(flag) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
                return match word.as_str() {
                    "start" => Ok(Action::Start(flags)),
                    "delete" => Ok(Action::Delete(flags)),
                    SERVE => Ok(Action::Serve(flags)),
                    _ => Err(refuse(format!("there is no action {word:?}; use start or delete"))),
                };
            };
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (flag, None),
            };
            match name {
                "h" | "help" => return Ok(Action::Help),
                "v" | "version" => return Ok(Action::Version),
                "debug" | "info" => continue,
                _ => (),
            }
            let value = match value {
                Some(value) => value,
                None => words.next().ok_or_else(|| refuse(format!("-{name} has no value")))??,
            };
            match name {
                "namespace" => flags.namespace = value,
                "id" => flags.id = value,
                "address" => flags.address = value,
                "bundle" => flags.bundle = Some(value.into()),
                // The program that older shims publish events with, and the socket of others.
                "publish-binary" | "socket" => (),
                _ => return Err(refuse(format!("there is no flag -{name}"))),
            }
        }
        Err(refuse("it is started by containerd: use start or delete".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Action, ShimError> {
        Flags::parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn command_line_of_containerd_is_understood() {
        let line = "-namespace k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd \
                    -id one -debug start";
        let flags = Flags {
            namespace: "k8s.io".into(),
            id: "one".into(),
            address: "/run/c.sock".into(),
            bundle: None,
        };
        assert_eq!(parse(line).unwrap(), Action::Start(flags.clone()));
        let line = "--namespace=k8s.io --address=/run/c.sock --id=one -bundle /b delete";
        let deleted = Flags { bundle: Some("/b".into()), ..flags };
        assert_eq!(parse(line).unwrap(), Action::Delete(deleted));
        assert_eq!(parse("-v").unwrap(), Action::Version);
        assert_eq!(parse("--help").unwrap(), Action::Help);
    }

    #[test]
    fn command_line_of_nobody_is_refused() {
        for (line, named) in [("-id", "-id has no value"), ("-x y start", "-x"), ("run", "\"run\"")]
        {
            assert!(parse(line).unwrap_err().to_string().contains(named), "{line}");
        }
        assert!(parse("-debug").is_err());
    }
}
