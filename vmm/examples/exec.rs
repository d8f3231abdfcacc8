//! Runs commands in a guest: input, both outputs, exit status, streams, time limit.
//!
//! `cargo run --release --package pvmm --example exec`

mod guest;

use std::error::Error;
use std::io::Write;
use std::time::Duration;

use pvmm::exec::{ExecRequest, ProcessEvent};
use pvmm::{Kvm, Vm};

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let kvm = Kvm::open()?;
    let mut vm = Vm::boot(&kvm, guest::guest(dir.path())?)?;
    vm.resume()?;
    let agent = vm.agent(guest::soon())?;

    // `exec` runs a command to its end and collects its output. Each output is kept up to a cap,
    // because the guest decides how much it writes.
    let output = agent.exec(&ExecRequest::argv(["sort"]).input("pear\napple\n"))?;
    println!("sorted: {:?}", String::from_utf8_lossy(&output.stdout.bytes));

    // A command that fails is no error: its status says so.
    let line = "echo for you; echo for the log >&2; exit $CODE";
    let output = agent.exec(&ExecRequest::shell(line).env("CODE", "7"))?;
    println!("stdout: {:?}", String::from_utf8_lossy(&output.stdout.bytes));
    println!("stderr: {:?}", String::from_utf8_lossy(&output.stderr.bytes));
    println!("status: {:?}", output.status.status);

    // After the time limit the command is ended, with every process that it started.
    let request = ExecRequest::shell("echo begun; sleep 600").timeout(Duration::from_secs(2));
    let output = agent.exec(&request)?;
    println!("timed out: {}, as a shell {}", output.status.timed_out, output.status.shell_code());

    // A program that is not there has a status too, the one that a shell gives.
    let output = agent.exec(&ExecRequest::argv(["no-such-program"]))?;
    println!("not there: as a shell {}", output.status.shell_code());

    // `start` is for a conversation. Output arrives as events while the process runs; dropping the
    // process would end it in the guest.
    let upper = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)";
    let request = ExecRequest::argv(["python3", "-c", upper]).piped_stdin();
    let mut process = agent.start(&request)?;
    let mut stdin = process.take_stdin().ok_or("a standard input was requested")?;
    for word in ["hello", "goodbye"] {
        writeln!(stdin, "{word}")?;
        if let Some(ProcessEvent::Stdout(bytes)) = process.next_event(Some(guest::soon()))? {
            println!("{word} -> {}", String::from_utf8_lossy(&bytes).trim_end());
        }
    }
    stdin.close()?;
    println!("ended: {:?}", process.wait()?.status);
    Ok(())
}
