//! Firecracker's door: the binary in the place of `firecracker`, with its flags and its API.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `args.rs` | what may stand on the command line, and which code the process ends with |
//! | `http.rs`, `server.rs` | how requests come in, and what a bad client can do |
//! | `routes.rs`, `bodies/` | which request is which, and what its JSON is |
//! | `before_boot.rs`, `config_file.rs` | how a machine is described |
//! | `running.rs` | what may be asked of one that lives |
//! | `door.rs` | the one thread that owns the machine and the socket |
//! | `snapshot.rs`, `fork.rs` | how a machine is written, loaded, and gone on with by others |
//! | `snapshot_editor.rs` | what can be done with the two files of a snapshot afterwards |
//! | `exec.rs` | how a command runs in the guest while others are served |
//! | `logger.rs`, `metrics.rs`, `metric_names.rs`, `mmds.rs`, `keyboard.rs` | what else a client can set, hear and say |

mod args;
mod before_boot;
mod bodies;
mod config_file;
mod door;
mod exec;
mod fork;
mod http;
mod keyboard;
mod logger;
mod metric_names;
mod metrics;
mod mmds;
mod routes;
mod rules;
mod running;
mod server;
mod snapshot;
mod snapshot_editor;

use std::ffi::OsString;
use std::path::Path;

use args::{Command, VERSION, Wrong, code};

/// A program of Firecracker's that this one stands in for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Firecracker,
    SnapshotEditor,
}

const PROGRAMS: [(&str, Program); 2] =
    [("firecracker", Program::Firecracker), ("snapshot-editor", Program::SnapshotEditor)];

/// Which program is meant, and the words for it, if this one was called by a name of theirs or by the verb.
pub fn words(mut argv: Vec<OsString>) -> Option<(Program, Vec<OsString>)> {
    let called = argv.first().and_then(|name| Path::new(name).file_name()?.to_str());
    let by_name = PROGRAMS.iter().find(|(name, _)| called.is_some_and(|it| it.starts_with(name)));
    if let Some((_, program)) = by_name {
        return Some((*program, argv.split_off(1)));
    }
    let by_verb = PROGRAMS.iter().find(|(name, _)| argv.get(1).is_some_and(|verb| verb == name));
    by_verb.map(|(_, program)| (*program, argv.split_off(2)))
}

/// Runs to the end and returns the code of the process.
pub fn run(program: Program, words: Vec<OsString>) -> u8 {
    let words = words.into_iter().map(|word| word.to_string_lossy().into_owned());
    if program == Program::SnapshotEditor {
        return snapshot_editor::run(&words.collect::<Vec<_>>());
    }
    match args::parse(words) {
        Ok(Command::Help) => print(&args::help()),
        Ok(Command::Version) => print(&format!("Firecracker v{VERSION}\n\n")),
        Ok(Command::SnapshotVersion) => print(&format!("v{}\n", snapshot::VERSION)),
        Ok(Command::DescribeSnapshot(path)) => match snapshot::describe(&path) {
            Ok(version) => print(&format!("v{version}\n")),
            Err(message) => {
                eprintln!("Error: {message}");
                code::GENERIC
            }
        },
        Ok(Command::Run(args)) => door::run(*args),
        Err(Wrong { code, message }) => {
            eprintln!("Error: {message}\n\nFor more information try --help.");
            code
        }
    }
}

fn print(text: &str) -> u8 {
    match crate::output::raw(text.as_bytes()) {
        Ok(()) => code::OK,
        Err(_) => code::GENERIC,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(line: &str) -> Option<usize> {
        let found = words(line.split(' ').map(OsString::from).collect());
        found.map(|(program, words)| {
            assert_eq!(program == Program::SnapshotEditor, line.contains("editor"));
            words.len()
        })
    }

    #[test]
    fn door_is_opened_by_name_and_by_verb() {
        assert_eq!(words_of("/usr/local/bin/firecracker --version"), Some(1));
        assert_eq!(words_of("firecracker-v1.16.0-x86_64"), Some(0));
        assert_eq!(words_of("pvmm firecracker --api-sock x"), Some(2));
        assert_eq!(words_of("/usr/bin/snapshot-editor info-vmstate"), Some(1));
        assert_eq!(words_of("pvmm snapshot-editor edit-memory rebase"), Some(2));
        assert_eq!(words_of("/opt/firecracker/pvmm run"), None);
        assert_eq!(words_of("pvmm run firecracker"), None);
    }
}
