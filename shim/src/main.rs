//! `containerd-shim-pvmm-v1`: containerd's runtime `io.containerd.pvmm.v1`.
//!
//! containerd calls it three ways. `start` (`start`) binds the socket of a pod, leaves a daemon
//! behind it and prints its address. The daemon (`daemon`) serves containerd's task API (`task`):
//! one VM per pod (`pod`), in it a container per task (`container`) whose processes (`process`) are
//! run by crun in the guest. `delete` (`delete`) cleans up after a daemon that is gone.

mod bundle;
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
mod stdio;
mod sys;
mod task;

use std::process::ExitCode;

use pvmm_sandbox::vmm_process;

use crate::flags::{Action, Flags};

fn main() -> ExitCode {
    pvmm_sandbox::sys::process::keep_one_heap();
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    if name == vmm_process::copy::NAME {
        vmm_process::copy::run();
    }
    let done = match Flags::parse(words) {
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
