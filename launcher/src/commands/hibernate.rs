//! `pvmm hibernate`, `wake` and `ttl`: how long a VM is in memory.

use pvmm_sandbox::{Sandboxes, hibernated};

use crate::cli::{Hibernate, Ttl, Wake};
use crate::exit::Outcome;
use crate::output;

pub fn hibernate(args: Hibernate) -> Outcome {
    let sandbox = Sandboxes::open()?.get(&args.vm)?;
    output::line(hibernated::hibernate(&sandbox)?.label())?;
    Ok(0)
}

pub fn wake(args: Wake) -> Outcome {
    let sandbox = hibernated::find(&args.vm)?.wake(&Sandboxes::open()?)?;
    output::line(sandbox.id())?;
    Ok(0)
}

pub fn ttl(args: Ttl) -> Outcome {
    Sandboxes::open()?.get(&args.vm)?.set_ttl(args.ttl.0)?;
    output::line(&args.vm)?;
    Ok(0)
}
