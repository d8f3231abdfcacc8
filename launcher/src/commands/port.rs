//! `pvmm port`: forwards ports of the host into a running VM, for as long as the command runs.
//!
//! Connections go through the VM's vsock device and its agent, so that a guest without a network
//! can be reached too.

use std::os::fd::AsFd;

use crate::cli::Port;
use crate::exit::{self, Failure, Outcome};
use crate::output;
use pvmm_sandbox::ports;
use pvmm_sandbox::sys::poll;
use pvmm_sandbox::sys::signals::{FORWARDED, Signals};
use pvmm_sandbox::vm_dir::Base;

pub fn port(args: Port) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    vm.require_running()?;
    let bound = ports::bind(&args.ports)?;
    let signals = Signals::hold(&FORWARDED)?;
    for port in &bound {
        output::line(&port.to_string())?;
    }
    ports::keep(
        &vm.dir.run().vsock(),
        || vm.dir.is_alive(),
        &bound,
        |text| output::remark(false, text),
        |time| poll::readable(&[signals.as_fd()], Some(time)).map_or(true, |ready| ready[0]),
    )?;
    Err(Failure::silent(exit::by_signal(signals.next()?)))
}
