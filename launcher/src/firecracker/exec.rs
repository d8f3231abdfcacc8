//! `PUT /pvmm/exec`: runs a command in the guest on its own thread, so that the API server keeps
//! serving other clients meanwhile.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::{ExecRequest, ExecStatus, Output, OutputCap};
use serde_json::json;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::bodies::Exec;
use super::http::{Answer, Refusal};
use super::http_server::ClientId;

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long to wait for the connection to the agent.
const CONNECT: Duration = Duration::from_secs(10);
/// The part of each output stream that is kept: the answer is in memory until the client has read
/// it.
const OUTPUT: OutputCap = OutputCap { head: 1 << 20, tail: 64 << 10 };
/// The most commands at once; more are refused.
const MOST: usize = 32;

/// Commands that are running, and the answers of commands that have ended.
pub struct Execs {
    sender: Sender<(ClientId, Answer)>,
    ended: Receiver<(ClientId, Answer)>,
    /// Readable when a command has ended.
    pub event: EventFd,
    running: usize,
}

impl Execs {
    pub fn new() -> std::io::Result<Self> {
        let (sender, ended) = mpsc::channel();
        Ok(Self { sender, ended, event: EventFd::new(EFD_NONBLOCK)?, running: 0 })
    }

    pub fn start(&mut self, client: ClientId, socket: PathBuf, exec: Exec) -> Result<(), Refusal> {
        let request = request(exec)?;
        if self.running >= MOST {
            return Err(Refusal::bad(format!(
                "exec: {MOST} commands run already; try again later."
            )));
        }
        let failed = |error| Refusal { status: 500, message: format!("exec: {error}") };
        let (sender, event) = (self.sender.clone(), self.event.try_clone().map_err(failed)?);
        let run = move || {
            let answer = match ran(&socket, &request) {
                Ok(output) => Answer::json(&shown(&output)),
                Err(message) => Refusal::bad(format!("exec: {message}")).into(),
            };
            // Sending fails only if the process is about to end; then no one waits for the answer.
            let _ = sender.send((client, answer));
            let _ = event.write(1);
        };
        std::thread::Builder::new().name("exec".to_owned()).spawn(run).map_err(failed)?;
        self.running += 1;
        Ok(())
    }

    /// Takes the answers of the commands that have ended.
    pub fn take_ended(&mut self) -> Vec<(ClientId, Answer)> {
        // The event only wakes the event loop; the answers come through the channel.
        let _ = self.event.read();
        let ended: Vec<_> = self.ended.try_iter().collect();
        self.running = self.running.saturating_sub(ended.len());
        ended
    }
}

fn request(exec: Exec) -> Result<ExecRequest, Refusal> {
    let Exec { argv, shell, env, cwd, user, stdin, timeout_ms } = exec;
    let mut request = match (argv, shell) {
        (Some(argv), None) => ExecRequest::argv(argv),
        (None, Some(line)) => ExecRequest::shell(line),
        _ => return Err(Refusal::bad("exec: give either argv or shell.")),
    };
    for (name, value) in env {
        request = request.env(name, value);
    }
    if let Some(cwd) = cwd {
        request = request.cwd(cwd);
    }
    if let Some(user) = user {
        request = request.user(user);
    }
    if let Some(stdin) = stdin {
        request = request.input(stdin);
    }
    let timeout = timeout_ms.map_or(DEFAULT_TIMEOUT, Duration::from_millis);
    Ok(request.timeout(timeout).output_cap(OUTPUT))
}

fn ran(socket: &std::path::Path, request: &ExecRequest) -> Result<Output, String> {
    let agent =
        Agent::connect(socket, Instant::now() + CONNECT).map_err(|error| error.to_string())?;
    agent.exec(request).map_err(|error| error.to_string())
}

fn shown(output: &Output) -> serde_json::Value {
    let status = &output.status;
    let signal = match status.status {
        ExecStatus::Signaled { signal, .. } => Some(signal),
        _ => None,
    };
    json!({
        "exit_code": status.shell_code(),
        "signal": signal,
        "timed_out": status.timed_out,
        "out_of_memory": status.oom,
        "duration_ms": u64::try_from(status.duration.as_millis()).unwrap_or(u64::MAX),
        "stdout": String::from_utf8_lossy(&output.stdout.bytes),
        "stdout_bytes": output.stdout.total,
        "stdout_truncated": output.stdout.truncated(),
        "stderr": String::from_utf8_lossy(&output.stderr.bytes),
        "stderr_bytes": output.stderr.total,
        "stderr_truncated": output.stderr.truncated(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(body: &str) -> Result<ExecRequest, Refusal> {
        request(serde_json::from_str(body).unwrap())
    }

    #[test]
    fn command_is_words_or_a_line_and_not_both() {
        assert!(wish(r#"{"argv":["true"],"env":{"A":"b"},"cwd":"/","timeout_ms":5}"#).is_ok());
        assert!(wish(r#"{"shell":"true","user":"nobody","stdin":"x"}"#).is_ok());
        assert_eq!(wish(r#"{"argv":["true"],"shell":"true"}"#).unwrap_err().status, 400);
        assert_eq!(wish("{}").unwrap_err().status, 400);
    }

    #[test]
    fn command_without_a_guest_ends_with_an_answer() {
        let mut execs = Execs::new().unwrap();
        let exec: Exec = serde_json::from_str(r#"{"argv":["true"]}"#).unwrap();
        for client in 0..MOST as u64 {
            execs.start(client, "/no/such/socket".into(), exec.clone()).unwrap();
        }
        assert!(execs.start(99, "/no/such/socket".into(), exec).is_err());
        let mut answers = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(30);
        while answers.len() < MOST && Instant::now() < deadline {
            answers.extend(execs.take_ended());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(answers.len(), MOST);
        assert!(answers.iter().all(|(_, answer)| answer.status == 400));
    }
}
