//! `pvmm checkpoint`, `log`, `checkout` and `rollback`: the tree of a running VM's checkpoints.

use crate::cli::{Checkout, Checkpoint, Log, OneVm};
use crate::exit::Outcome;
use crate::output;
use pvmm_sandbox::checkpoint_tree;
use pvmm_sandbox::control;
use pvmm_sandbox::vm_dir::{Base, now_ms};

pub fn checkpoint(args: Checkpoint) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    let name = match args.delete {
        Some(name) => {
            control::delete_checkpoint(&vm, &name)?;
            name
        }
        None => control::checkpoint(&vm, args.name.as_deref())?.name,
    };
    output::line(&name)?;
    Ok(0)
}

pub fn log(args: Log) -> Outcome {
    let all = control::checkpoints(&Base::open()?.find(&args.vm)?)?;
    if args.json {
        output::json(&all)?;
    } else {
        let now = now_ms();
        let age = |ms: u64| format!("{} ago", output::age(now.saturating_sub(ms) / 1000));
        output::raw(checkpoint_tree::draw(&all, |it| age(it.created_ms)).as_bytes())?;
    }
    Ok(0)
}

pub fn checkout(args: Checkout) -> Outcome {
    control::checkout(&Base::open()?.find(&args.vm)?, Some(&args.name))?;
    output::line(&args.name)?;
    Ok(0)
}

pub fn rollback(args: OneVm) -> Outcome {
    control::checkout(&Base::open()?.find(&args.vm)?, None)?;
    output::line(&args.vm)?;
    Ok(0)
}
