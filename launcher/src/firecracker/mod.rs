//! Firecracker compatibility: the `firecracker` and `snapshot-editor` programs, with the flags, the
//! HTTP API and the exit codes of the originals.
//!
//! | file | responsibility |
//! | --- | --- |
//! | `args.rs` | command line and exit codes |
//! | `http.rs`, `http_server.rs` | HTTP parsing, the API socket, limits on misbehaving clients |
//! | `routes.rs`, `bodies/` | mapping of a request to an `ApiCall`, and the JSON types |
//! | `before_boot.rs`, `config_file.rs` | configuration of a VM that has not booted |
//! | `cpu_templates.rs` | the bits of the named CPU templates |
//! | `running.rs` | requests to a VM that exists |
//! | `rules.rs` | which requests are allowed in which stage |
//! | `api_server.rs` | the thread that owns the VM and the API socket |
//! | `snapshot.rs`, `fork.rs` | writing and loading snapshots, and forks between processes |
//! | `snapshot_editor.rs` | editing the two files of a snapshot |
//! | `seccomp_file.rs` | system call filters of the caller's own |
//! | `exec.rs` | commands in the guest, run in the background |
//! | `logger.rs`, `metrics.rs`, `metric_names.rs`, `mmds.rs`, `keyboard.rs` | log, metrics, metadata and serial input |

mod api_server;
mod args;
mod before_boot;
mod bodies;
mod boot_timer;
mod config_file;
mod cpu_templates;
mod exec;
mod fork;
mod http;
mod http_server;
mod keyboard;
mod learner;
mod logger;
mod metric_names;
mod metrics;
mod mmds;
mod routes;
mod rules;
mod running;
mod seccomp_file;
mod snapshot;
mod snapshot_editor;

use std::ffi::OsString;
use std::path::Path;

use args::{Command, VERSION, Wrong, code};

/// A Firecracker program that this binary can run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Firecracker,
    SnapshotEditor,
}

const PROGRAMS: [(&str, Program); 2] =
    [("firecracker", Program::Firecracker), ("snapshot-editor", Program::SnapshotEditor)];

/// Returns the program to run as and its arguments, or `None` for an ordinary `pvmm` command line.
///
/// The program is chosen by the name in `argv[0]`, or else by the first argument.
pub fn words(mut argv: Vec<OsString>) -> Option<(Program, Vec<OsString>)> {
    let called = argv.first().and_then(|name| Path::new(name).file_name()?.to_str());
    let by_name = PROGRAMS.iter().find(|(name, _)| called.is_some_and(|it| it.starts_with(name)));
    if let Some((_, program)) = by_name {
        return Some((*program, argv.split_off(1)));
    }
    let by_verb = PROGRAMS.iter().find(|(name, _)| argv.get(1).is_some_and(|verb| verb == name));
    by_verb.map(|(_, program)| (*program, argv.split_off(2)))
}

/// Runs `program` to its end and returns the exit code of the process.
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
        Ok(Command::Run(args)) => api_server::run(*args),
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
    fn api_server_is_started_by_name_and_by_verb() {
        assert_eq!(words_of("/usr/local/bin/firecracker --version"), Some(1));
        assert_eq!(words_of("firecracker-v1.16.0-x86_64"), Some(0));
        assert_eq!(words_of("pvmm firecracker --api-sock x"), Some(2));
        assert_eq!(words_of("/usr/bin/snapshot-editor info-vmstate"), Some(1));
        assert_eq!(words_of("pvmm snapshot-editor edit-memory rebase"), Some(2));
        assert_eq!(words_of("/opt/firecracker/pvmm run"), None);
        assert_eq!(words_of("pvmm run firecracker"), None);
    }
}
