//! `pvmm cp`: copies files and folders into and out of a VM, as `cp -r` would.
//!
//! The destination is decided here for both directions. A file is sent by itself, a folder as one
//! tar archive (`tree.rs`), so that a thousand files do not wait for a thousand answers.

mod into_guest;
mod out_of_guest;
mod tree;

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use pvmm::agent::{Agent, AgentError};

use crate::args::Place;
use crate::cli::Cp;
use crate::exit::{self, Failure, Outcome};
use crate::output;
use crate::progress::Transfer;
use pvmm_sandbox::guest_agent;
use pvmm_sandbox::sys::signals::{FORWARDED, Signals};
use pvmm_sandbox::vm_dir::Base;

pub fn cp(args: Cp, quiet: bool) -> Outcome {
    match (args.source, args.target) {
        (Place::Host(source), Place::Guest { vm, path }) => {
            into_guest::check(&source)?;
            let mut copy = Copy::open(&vm, args.archive, Caps::NONE, quiet)?;
            into_guest::copy(&mut copy, &source, &from_root(path))?;
        }
        (Place::Guest { vm, path }, Place::Host(target)) => {
            let caps = Caps { bytes: args.max_size << 20, files: args.max_files };
            let mut copy = Copy::open(&vm, args.archive, caps, quiet)?;
            out_of_guest::copy(&mut copy, &from_root(path), &target)?;
        }
        (Place::Host(_), Place::Host(_)) => {
            return Err(Failure::usage("neither SOURCE nor TARGET names a VM")
                .hint("write one of them as VM:PATH, as in: pvmm cp notes.txt web:/root/"));
        }
        (Place::Guest { .. }, Place::Guest { .. }) => {
            return Err(Failure::usage("SOURCE and TARGET both name a VM")
                .hint("copy to a path on this host first, and from there to the other VM"));
        }
    }
    Ok(0)
}

/// Makes a guest path absolute: a relative one starts at the root, as a VM has no current
/// directory.
fn from_root(path: PathBuf) -> PathBuf {
    Path::new("/").join(path)
}

/// Limits on what a guest may send; the sizes that the guest reports are not trusted.
#[derive(Clone, Copy)]
struct Caps {
    bytes: u64,
    files: u64,
}

impl Caps {
    /// No limits, for data that the user sends into a guest.
    const NONE: Self = Self { bytes: u64::MAX, files: u64::MAX };

    fn too_large(self, path: &Path) -> Failure {
        let most = output::bytes(self.bytes);
        Failure::fault(format!("{} in the VM is more than {most}: gave up", path.display()))
            .hint("allow more with --max-size, as in: --max-size 100G")
    }

    fn too_many(self, path: &Path) -> Failure {
        let most = self.files;
        Failure::fault(format!("{} in the VM has more than {most} files: gave up", path.display()))
            .hint("allow more with --max-files")
    }
}

/// The connection and settings that both directions need.
struct Copy {
    agent: Agent,
    caps: Caps,
    /// Files keep their numeric owners.
    owners: bool,
    signals: Signals,
    transfer: Transfer,
}

impl Copy {
    fn open(vm: &str, owners: bool, caps: Caps, quiet: bool) -> Result<Self, Failure> {
        let vm = Base::open()?.find(vm)?;
        vm.require_running()?;
        let signals = Signals::hold(&FORWARDED)?;
        let agent =
            guest_agent::connect(&vm.dir, guest_agent::PATIENCE).map_err(guest_agent::refuse)?;
        Ok(Self { agent, caps, owners, signals, transfer: Transfer::new(quiet) })
    }

    fn stop_if_interrupted(&self) -> Result<(), Failure> {
        if self.signals.is_pending() {
            Err(Failure::silent(exit::by_signal(self.signals.next()?)))
        } else {
            Ok(())
        }
    }
}

/// Returns the name of the copy; `None` if only the contents of `source` are meant (`dir/.`).
fn name_of(source: &Path) -> Option<OsString> {
    let text = source.as_os_str().as_encoded_bytes();
    let contents = text == b"." || text.ends_with(b"/.") || text.ends_with(b"/..") || text == b"..";
    if contents { None } else { source.file_name().map(OsStr::to_owned) }
}

/// Returns where the copy goes: into an existing directory, or to `target` itself.
fn destination(source: &Path, target: &Path, target_is_directory: bool) -> PathBuf {
    match (target_is_directory, name_of(source)) {
        (true, Some(name)) => target.join(name),
        _ => target.to_owned(),
    }
}

fn ends_with_slash(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

fn on_host(act: &str, path: &Path) -> impl Fn(io::Error) -> Failure {
    let what = format!("cannot {act} {}", path.display());
    move |error| {
        let message = format!("{what}: {}", exit::io_text(&error));
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => Failure::usage(message),
            _ => Failure::fault(message),
        }
    }
}

/// Maps the error of a request about `path` in the guest; an errno from there is a usage error.
fn in_guest(act: &str, path: &Path) -> impl Fn(AgentError) -> Failure {
    let what = format!("cannot {act} {} in the VM", path.display());
    move |error| match error.errno() {
        Some(errno) => Failure::usage(format!("{what}: {}", exit::errno_text(errno))),
        None => {
            let failure = guest_agent::refuse(error);
            Failure { message: format!("{what}: {}", failure.message), ..failure }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destination_in_existing_directory_is_inside_it() {
        let inside = |source: &str| destination(Path::new(source), Path::new("/t"), true);
        assert_eq!(inside("/a/b"), Path::new("/t/b"));
        assert_eq!(inside("/a/b/"), Path::new("/t/b"));
        assert_eq!(inside("/a/b/."), Path::new("/t"));
        assert_eq!(inside("."), Path::new("/t"));
        assert_eq!(destination(Path::new("/a/b"), Path::new("/t"), false), Path::new("/t"));
    }

    #[test]
    fn from_root_of_relative_path_begins_at_the_root() {
        assert_eq!(from_root("etc/hosts".into()), Path::new("/etc/hosts"));
        assert_eq!(from_root("/etc".into()), Path::new("/etc"));
    }
}
