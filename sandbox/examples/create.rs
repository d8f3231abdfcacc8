//! Makes a sandbox, runs a command in it and ends it, once for each line of standard input.
//!
//! Prints how long it took until the command had ended, in milliseconds: a program of your own
//! needs no more than this, and `tests/serve/create.py` compares the service with it. As in the
//! service, processes for the next sandboxes are started while the command runs.

use std::io;
use std::thread;
use std::time::Instant;

use pvmm::exec::ExecRequest;
use pvmm_sandbox::{CreateOptions, Failure, Sandboxes, vmm_process};

/// How many processes wait for the next sandboxes.
const WAITING: usize = 4;

fn main() -> Result<(), Failure> {
    // First of all: this program is started again as the process of each VM.
    vmm_process::begin()?;
    let sandboxes = Sandboxes::with_shells(WAITING)?;
    sandboxes.prepare()?;
    let template = std::env::args().nth(1).unwrap_or_else(|| "base".to_owned());
    for line in io::stdin().lines() {
        let _ = line?;
        let begun = Instant::now();
        let sandbox = sandboxes.create(&CreateOptions::of(&template))?;
        let prepared = thread::spawn({
            let sandboxes = sandboxes.clone();
            move || sandboxes.prepare()
        });
        let output = sandbox
            .agent()?
            .exec(&ExecRequest::argv(["/bin/bash", "-c", "/bin/true"]))
            .map_err(|error| Failure::fault(error.to_string()))?;
        assert!(output.status.success());
        println!("{:.1}", begun.elapsed().as_secs_f64() * 1000.0);
        sandbox.end()?;
        prepared.join().expect("preparing does not panic")?;
    }
    Ok(())
}
