//! `pvmm pause` and `resume` of a running VM.

use crate::cli::OneVm;
use crate::exit::Outcome;
use crate::output;
use pvmm_sandbox::control;
use pvmm_sandbox::vm_dir::Base;

pub fn pause(args: OneVm) -> Outcome {
    set_paused(&args, true)
}

pub fn resume(args: OneVm) -> Outcome {
    set_paused(&args, false)
}

fn set_paused(args: &OneVm, paused: bool) -> Outcome {
    control::pause(&Base::open()?.find(&args.vm)?, paused)?;
    output::line(&args.vm)?;
    Ok(0)
}
