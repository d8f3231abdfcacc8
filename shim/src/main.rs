//! `containerd-shim-pvmm-v1`: containerd's runtime `io.containerd.pvmm.v1`.
//!
//! containerd calls it three ways. `start` (`start`) binds the socket of a pod, leaves a daemon
//! behind it and prints its address. The daemon (`daemon`) serves containerd's task API (`task`):
//! one VM per pod (`pod`), in it a container per task (`container`) whose processes (`process`) are
//! run by crun in the guest. `delete` (`delete`) cleans up after a daemon that is gone.

mod bundle;
mod checkpoint;
mod container;
mod daemon;
mod delete;
mod error;
mod events;
mod flags;
mod pod;
mod process;
mod rootfs;
mod spec;
mod start;
mod stats;
mod stdio;
mod sys;
mod task;

use std::process::ExitCode;

use pvmm_sandbox::vmm_process;

use crate::error::ShimError;
use crate::flags::{Action, Flags};

fn main() -> ExitCode {
    let begun = vmm_process::begin().map_err(ShimError::io("cannot forbid core dumps"));
    let done = match begun.and_then(|()| Flags::parse(std::env::args_os().skip(1))) {
        Ok(Action::Help) => {
            println!("{}", flags::HELP);
            Ok(())
        }
        Ok(Action::Version) => {
            println!("containerd-shim-pvmm-v1 {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Ok(Action::Start(flags)) => start::start(&flags),
        Ok(Action::Delete(flags)) => delete::delete(&flags),
        Ok(Action::Serve(flags)) => daemon::serve(&flags),
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("containerd-shim-pvmm-v1: {error}");
            ExitCode::FAILURE
        }
    }
}
