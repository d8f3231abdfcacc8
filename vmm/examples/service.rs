//! A service with VMs in it: one template, a thread for each VM, a line of requests.
//!
//! `cargo run --release --package pvmm --example service`

mod guest;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use pvmm::agent::{Agent, Refresh};
use pvmm::exec::{ExecError, ExecRequest};
use pvmm::{Error, ErrorKind, Kvm, Template, Vm};

/// The requests of the clients. The fourth one crashes the kernel of the guest that it runs in.
const REQUESTS: [&str; 6] = [
    "run echo $((6 * 7))",
    "read /no/such/file",
    "run exit 3",
    "run echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger; sleep 600",
    "dance",
    "run python3 -c 'print(sum(range(100)))'",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let template = template(dir.path())?;
    let (template, dir, next) = (&template, dir.path(), &AtomicUsize::new(0));
    let mut answers = Vec::new();
    thread::scope(|scope| {
        let work = |name| scope.spawn(move || work(template, dir, name, next));
        for worker in ["one", "two", "three"].map(work) {
            answers.extend(worker.join().map_err(|_| "a worker panicked")??);
        }
        Ok::<_, Box<dyn std::error::Error>>(())
    })?;
    answers.sort();
    for (n, answer) in answers {
        println!("{n}: {answer}");
    }
    // Each VM went with the worker that owned it: its threads, its memory, its socket.
    println!("left in the directory: {}", dir.read_dir()?.count());
    Ok(())
}

/// Boots once. Every VM of the service starts where this one stood when it was frozen.
fn template(dir: &Path) -> Result<Template, Box<dyn std::error::Error>> {
    let kvm = Kvm::open()?;
    let mut vm = Vm::boot(&kvm, guest::guest(dir)?)?;
    vm.resume()?;
    vm.agent(guest::soon())?;
    let socket = vm.vsock_path().ok_or("no vsock")?.to_owned();
    let control = Agent::connect_control(&socket, guest::soon())?;
    control.freeze(guest::soon())?;
    let template = vm.freeze()?;
    drop(control);
    Ok(template)
}

/// Takes requests until there are no more. Returns their numbers and answers.
fn work(
    template: &Template,
    dir: &Path,
    name: &str,
    next: &AtomicUsize,
) -> Result<Vec<(usize, String)>, Error> {
    let (mut answers, mut running) = (Vec::new(), None);
    loop {
        let n = next.fetch_add(1, Ordering::Relaxed);
        let Some(request) = REQUESTS.get(n) else { return Ok(answers) };
        let (vm, agent) = match running.take() {
            Some(running) => running,
            None => template
                .fork(guest::fork_in(dir, name))?
                .refreshed(&Refresh::new(n as u64 + 1)?, guest::soon())?,
        };
        let (answer, is_usable) = match answer(&agent, request) {
            Ok(text) => (text, true),
            Err(error) => match error.kind() {
                // The client's mistake, which did the VM no harm.
                ErrorKind::InvalidConfig | ErrorKind::GuestRefused => (format!("{error:#}"), true),
                // The guest is gone or stuck. The next request gets another one.
                ErrorKind::AgentLost | ErrorKind::Timeout => ("the guest was lost".into(), false),
                // The host's trouble, which is the same for every request.
                _ => return Err(error),
            },
        };
        answers.push((n, answer));
        if is_usable {
            running = Some((vm, agent));
        }
    }
}

/// Answers one request. A command that fails is an answer; an error is about the VM or the request.
fn answer(agent: &Agent, request: &str) -> Result<String, Error> {
    let bytes = match request.split_once(' ') {
        Some(("read", path)) => agent.read_file(path, 64 << 10)?,
        Some(("run", line)) => {
            let run = ExecRequest::shell(line).timeout(guest::PATIENCE);
            let output = agent.exec(&run).map_err(|error| match error {
                ExecError::Agent(error) => error.into(),
                ExecError::Overdue(_) => Error::new(ErrorKind::Timeout, "run", error),
                _ => Error::new(ErrorKind::InvalidConfig, "run", error),
            })?;
            if !output.status.success() {
                return Ok(format!("exit code {}", output.status.shell_code()));
            }
            output.stdout.bytes
        }
        _ => return Err(Error::plain(ErrorKind::InvalidConfig, "a request reads or runs")),
    };
    Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}
