//! Makes a sandbox, runs a command in it and ends it, once for each line of standard input.
//!
//! Prints how long it took until the command had ended, in milliseconds: a program of your own
//! needs no more than this, and `tests/serve/create.py` compares the service with it.

use std::io;
use std::time::Instant;

use pvmm::exec::ExecRequest;
use pvmm_sandbox::{CreateOptions, Failure, Sandboxes, vmm_process};

fn main() -> Result<(), Failure> {
    // First of all: this program is started again as the process of each VM.
    vmm_process::begin()?;
    let sandboxes = Sandboxes::open()?;
    let template = std::env::args().nth(1).unwrap_or_else(|| "base".to_owned());
    for line in io::stdin().lines() {
        let _ = line?;
        let begun = Instant::now();
        let sandbox = sandboxes.create(&CreateOptions::of(&template))?;
        let output = sandbox
            .agent()?
            .exec(&ExecRequest::shell("/bin/true"))
            .map_err(|error| Failure::fault(error.to_string()))?;
        assert!(output.status.success());
        println!("{:.1}", begun.elapsed().as_secs_f64() * 1000.0);
        sandbox.end()?;
    }
    Ok(())
}
