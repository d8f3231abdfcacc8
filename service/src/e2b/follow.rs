//! Follows a process for a client: its output, signs of life, and its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pvmm::agent::Agent;
use pvmm::exec::{ExecStatus, ExitStatus, Process, ProcessEvent};
use serde_json::{Value, json};

use crate::audit::Act;
use crate::blocking::Work;
use crate::error::ApiError;
use crate::life::InUse;
use crate::metrics::Operation;
use crate::store::State as SandboxState;

use super::connect::{self, Outgoing};
use super::error::CallError;
use super::inputs;
use super::state::Door;

/// How often a silent process is looked at, for a client that is gone.
const TICK: Duration = Duration::from_secs(1);

/// Returns the words for a signal.
fn signal_words(signal: i32) -> String {
    let words = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGABRT => "aborted",
        libc::SIGKILL => "killed",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGPIPE => "broken pipe",
        libc::SIGTERM => "terminated",
        other => return format!("signal: {other}"),
    };
    format!("signal: {words}")
}

/// Writes the end of a process as the clients read it.
fn ending(status: &ExitStatus) -> Value {
    let (code, exited, words) = match status.status {
        ExecStatus::Exited { code } => (code, true, format!("exit status {code}")),
        ExecStatus::Signaled { signal, .. } => (-1, false, signal_words(signal)),
        ExecStatus::CouldNotStart { .. } => {
            (i32::from(status.shell_code()), true, "it could not be started".to_owned())
        }
    };
    let mut end = json!({ "exitCode": code, "exited": exited, "status": words });
    if code != 0 {
        end["error"] = json!(words);
    }
    json!({ "event": { "end": end } })
}

/// A process that a client follows, and the terms on which the client does.
pub struct Follow {
    /// The sandbox, which stays awake meanwhile.
    pub in_use: InUse,
    /// The agent in its guest.
    pub agent: Agent,
    /// The attached process.
    pub process: Process,
    /// The sandbox, and the number of the process.
    pub key: inputs::Key,
    /// The process id in the guest.
    pub pid: u32,
    /// Whether the process has a terminal.
    pub terminal: bool,
    /// How often the client wants a sign of life.
    pub ping: Duration,
    /// When the client stops to wait; the process may go on.
    pub until: Option<Instant>,
    /// Whether the process has ended.
    pub over: bool,
}

impl Follow {
    /// Sends events until the process ends, the client goes away, or its time is over.
    fn run(&mut self, events: &Outgoing) -> Result<Option<ExitStatus>, CallError> {
        let mut pinged = Instant::now();
        let mut open = events.send(&json!({ "event": { "start": { "pid": self.pid } } }));
        while open {
            let tick = Instant::now() + TICK;
            let wait = self.until.map_or(tick, |until| until.min(tick));
            let data = |kind: &str, bytes: &[u8]| {
                let output = json!({ kind: STANDARD.encode(bytes) });
                json!({ "event": { "data": output } })
            };
            let out = if self.terminal { "pty" } else { "stdout" };
            let event = self.process.next_event(Some(wait));
            open = match event.map_err(|error| self.explain(error.into()))? {
                Some(ProcessEvent::Stdout(bytes)) => events.send(&data(out, &bytes)),
                Some(ProcessEvent::Stderr(bytes)) => events.send(&data("stderr", &bytes)),
                Some(ProcessEvent::Exited(status)) => {
                    self.over = true;
                    return self.concluded(&status, events).map(|()| Some(status));
                }
                None if self.until.is_some_and(|until| until <= Instant::now()) => {
                    return Err(CallError::new("deadline_exceeded", "the time limit is over"));
                }
                None if pinged.elapsed() >= self.ping => {
                    pinged = Instant::now();
                    events.send(&json!({ "event": { "keepalive": {} } }))
                }
                None => !events.is_closed(),
            };
        }
        Ok(None)
    }

    /// Says why the guest does not answer any more.
    fn explain(&self, error: ApiError) -> CallError {
        let paused = {
            let fields = self.in_use.entry().lock();
            fields.leaving || fields.row.state == SandboxState::Hibernated
        };
        if paused {
            let message = "the sandbox was paused: connect to it and to the process again";
            return CallError::new("unavailable", message);
        }
        self.in_use.explain(error).into()
    }

    fn concluded(&self, status: &ExitStatus, events: &Outgoing) -> Result<(), CallError> {
        if status.timed_out {
            return Err(CallError::new("deadline_exceeded", "the command exceeded its time limit"));
        }
        let lost = status.stdout.dropped.saturating_add(status.stderr.dropped);
        if lost > 0 {
            let message = format!("{lost} bytes of the output are lost: the client is too slow");
            return Err(CallError::new("data_loss", message));
        }
        events.send(&ending(status));
        Ok(())
    }

    /// Forgets a process that has ended, unless someone else still follows it. What it left in the
    /// background goes on.
    fn forget(&self) {
        let listed = self.agent.processes().unwrap_or_default();
        if listed.iter().any(|it| it.id == self.key.1 && it.attached == 0) {
            let _ = self.agent.leave_process(self.key.1);
        }
    }
}

/// Follows a process in a thread of its own.
pub async fn follow(door: &Arc<Door>, owner: &str, what: String, mut it: Follow) -> Response {
    let (events, response) = connect::outgoing();
    let (door, owner, begun) = (Arc::clone(door), owner.to_owned(), Instant::now());
    let shared = Arc::clone(&door.app);
    let work = move || {
        let outcome = it.run(&events);
        door.app.metrics.note(Operation::Exec, begun.elapsed(), outcome.is_ok());
        let mut act = Act::new("exec", &owner, &it.key.0).what(&what).since(begun);
        if let Ok(Some(status)) = &outcome {
            act = act.exit(status.shell_code().into());
        }
        events.end(outcome.map(drop));
        door.app.audit.write(&act);
        if it.over {
            door.inputs.forget(&it.key);
            it.forget();
        }
        drop(it.in_use);
    };
    match shared.blocking.start(Work::Long, work).await {
        Ok(()) => response,
        Err(error) => connect::streamed(Err(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(status: ExecStatus) -> ExitStatus {
        ExitStatus {
            status,
            timed_out: false,
            background: false,
            oom: false,
            stdout: Default::default(),
            stderr: Default::default(),
            duration: Duration::ZERO,
            usage: Default::default(),
        }
    }

    #[test]
    fn end_has_a_code_and_words() {
        let end = |how| ending(&status(how))["event"]["end"].clone();
        let fine = json!({ "exitCode": 0, "exited": true, "status": "exit status 0" });
        assert_eq!(end(ExecStatus::Exited { code: 0 }), fine);
        assert_eq!(end(ExecStatus::Exited { code: 3 })["error"], "exit status 3");
        let killed = end(ExecStatus::Signaled { signal: 9, core_dumped: false });
        assert_eq!((&killed["exitCode"], &killed["error"]), (&json!(-1), &json!("signal: killed")));
    }
}
