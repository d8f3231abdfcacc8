//! `pvmm checkpoint`, `rollback`, `pause` and `resume`: a running VM's own time.

use crate::cli::OneVm;
use crate::control::{self, Request};
use crate::exit::Outcome;
use crate::output;
use crate::vm_dir::Base;

pub fn checkpoint(args: OneVm) -> Outcome {
    ask(&args, Request::Checkpoint)
}

pub fn rollback(args: OneVm) -> Outcome {
    ask(&args, Request::Rollback)
}

pub fn pause(args: OneVm) -> Outcome {
    ask(&args, Request::Pause)
}

pub fn resume(args: OneVm) -> Outcome {
    ask(&args, Request::Resume)
}

fn ask(args: &OneVm, request: Request) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    control::ask(&vm, request)?;
    output::line(&args.vm)?;
    Ok(0)
}
