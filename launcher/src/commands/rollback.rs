//! `pvmm checkpoint`, `rollback`, `pause` and `resume` of a running VM.

use crate::cli::OneVm;
use crate::exit::Outcome;
use crate::output;
use pvmm_sandbox::control::{self, ControlRequest};
use pvmm_sandbox::vm_dir::Base;

pub fn checkpoint(args: OneVm) -> Outcome {
    ask(&args, ControlRequest::Checkpoint)
}

pub fn rollback(args: OneVm) -> Outcome {
    ask(&args, ControlRequest::Rollback)
}

pub fn pause(args: OneVm) -> Outcome {
    ask(&args, ControlRequest::Pause)
}

pub fn resume(args: OneVm) -> Outcome {
    ask(&args, ControlRequest::Resume)
}

fn ask(args: &OneVm, request: ControlRequest) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    control::ask(&vm, request)?;
    output::line(&args.vm)?;
    Ok(0)
}
