//! `pvmm code`: runs code in an interpreter session of a VM, which keeps its variables between
//! calls.
//!
//! Text output goes to the streams that a program would use; `--json` returns every output in all
//! its forms.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use pvmm::agent::{
    Agent, CodeError, CodeEvent, CodeOutput, CodeRequest, Interrupter, MimeBundle, RunReport,
    RunStatus, SessionInfo, SessionOptions,
};
use serde_json::{Map, Value, json};

use crate::attach;
use crate::cli::{Code, CodeLanguage};
use crate::exit::{self, Failure, Outcome};
use crate::output::{self, Table};
use pvmm_sandbox::guest_agent;
use pvmm_sandbox::sys::poll;
use pvmm_sandbox::sys::signals::{FORWARDED, Signals};
use pvmm_sandbox::vm_dir::Base;

/// The exit code when the code threw an exception.
const THREW: u8 = 1;
/// The longest code; a larger program belongs in a file.
const MAX_CODE: u64 = 900 << 10;
/// A second Ctrl-C within this time ends the command; the session is interrupted in any case.
const TWICE: Duration = Duration::from_secs(2);

pub fn code(args: Code) -> Outcome {
    let text = match (&args.code, args.list || args.close) {
        (Some(code), _) => Some(code.clone()),
        (None, true) => None,
        (None, false) => Some(read_input()?),
    };
    let vm = Base::open()?.find(&args.vm)?;
    vm.require_running()?;
    let signals = Signals::hold(&FORWARDED)?;
    let agent =
        guest_agent::connect(&vm.dir, guest_agent::PATIENCE).map_err(guest_agent::refuse)?;
    let name = args.session.clone().unwrap_or_else(|| args.lang.name().to_owned());
    let Some(text) = text else {
        return if args.list {
            list(&agent, args.json)
        } else {
            agent.close_session(&name).map(|()| 0).map_err(|e| refuse(&e, &name, args.lang))
        };
    };
    let options = SessionOptions::named(args.lang.language(), &name);
    let session = agent.open_session(&options).map_err(|e| refuse(&e, &name, args.lang))?;
    let request = CodeRequest { timeout: args.timeout, ..CodeRequest::new(text) };
    if args.json {
        collected(&agent, &session, &request, signals, args.lang)
    } else {
        streamed(&agent, &session, &request, signals, args.lang)
    }
}

fn read_input() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    io::stdin().lock().take(MAX_CODE + 1).read_to_end(&mut bytes).map_err(|error| {
        Failure::fault(format!("cannot read the code: {}", exit::io_text(&error)))
    })?;
    if bytes.len() as u64 > MAX_CODE {
        return Err(Failure::usage("the code is longer than 900 KiB")
            .hint("copy it into the VM with 'pvmm cp' and run it there"));
    }
    String::from_utf8(bytes).map_err(|_| Failure::usage("the code is not UTF-8 text"))
}

/// Maps an agent's refusal to an error in terms of the user's arguments.
fn refuse(error: &pvmm::agent::AgentError, name: &str, lang: CodeLanguage) -> Failure {
    match error.errno() {
        Some(libc::EEXIST) => {
            Failure::usage(format!("session '{name}' is not one of {}", lang.name()))
                .hint("give it another --session name")
        }
        Some(libc::ENOENT) if error.to_string().contains("session") => {
            Failure::usage(format!("there is no session '{name}'"))
        }
        Some(libc::ENOENT) => {
            let message = format!("the guest has no {}", lang.program());
            Failure { code: exit::NOT_FOUND, ..Failure::fault(message) }
        }
        _ => Failure::fault(error.to_string()),
    }
}

fn list(agent: &Agent, as_json: bool) -> Outcome {
    let sessions = agent.sessions().map_err(guest_agent::refuse)?;
    if as_json {
        let rows: Vec<Value> = sessions.iter().map(row).collect();
        output::json(&rows)?;
        return Ok(0);
    }
    let mut table = Table::new(&["SESSION", "LANGUAGE", "VERSION", "STATE", "CALLS"]);
    for it in &sessions {
        let state = if it.busy { "busy" } else { "idle" };
        let language = CodeLanguage::of(it.language).name();
        let cells = [&it.session, language, &it.version, state, &it.runs.to_string()];
        table.row(cells.map(str::to_owned).to_vec());
    }
    table.print()?;
    Ok(0)
}

fn row(it: &SessionInfo) -> Value {
    json!({
        "session": it.session, "language": CodeLanguage::of(it.language).name(),
        "version": it.version, "busy": it.busy, "calls": it.runs,
    })
}

/// Runs the code and prints its output as it arrives.
fn streamed(
    agent: &Agent,
    session: &SessionInfo,
    request: &CodeRequest,
    signals: Signals,
    lang: CodeLanguage,
) -> Outcome {
    let failed = |e| refuse(&e, &session.session, lang);
    let mut run = agent.start_code(&session.session, request).map_err(failed)?;
    interrupt_on_signal(signals, run.interrupter());
    let (mut stdout, mut stderr) =
        (attach::Sink::new(&io::stdout()), attach::Sink::new(&io::stderr()));
    loop {
        let event = run.next_event(None).map_err(failed)?;
        match event {
            Some(CodeEvent::Stdout(bytes)) => stdout.write(&bytes)?,
            Some(CodeEvent::Stderr(bytes)) => drop(stderr.write(&bytes)),
            Some(CodeEvent::Display(bundle) | CodeEvent::Result(bundle)) => {
                stdout.write(plain(&bundle).as_bytes())?;
            }
            Some(CodeEvent::Error(error)) => {
                drop(stderr.write(in_lines(&error.traceback).as_bytes()))
            }
            Some(CodeEvent::Ended(report)) => return ended(&report),
            None => {}
        }
    }
}

fn plain(bundle: &MimeBundle) -> String {
    match bundle.text("text/plain") {
        Some(text) => in_lines(&text),
        None => {
            let kinds: Vec<&str> = bundle.parts.iter().map(|(mime, _)| &mime[..]).collect();
            in_lines(&format!("<{}>", kinds.join(", ")))
        }
    }
}

fn in_lines(text: &str) -> String {
    format!("{}\n", text.trim_end_matches('\n'))
}

fn ended(report: &RunReport) -> Outcome {
    match report.status {
        RunStatus::Died { .. } => {
            Err(Failure::fault("the interpreter ended, and its variables are gone")
                .hint("the next call starts a new session"))
        }
        _ if report.timed_out => Ok(exit::TIMEOUT),
        RunStatus::Error {} => Ok(THREW),
        RunStatus::Ok {} => Ok(0),
    }
}

/// Runs the code and prints everything as one JSON document.
fn collected(
    agent: &Agent,
    session: &SessionInfo,
    request: &CodeRequest,
    signals: Signals,
    lang: CodeLanguage,
) -> Outcome {
    // When this process exits its connection closes, and the agent interrupts the code.
    attach::in_background("signals", move || {
        if let Ok(signal) = signals.next() {
            exit::leave(Ok(exit::by_signal(signal)));
        }
    });
    let output = agent
        .run_code(&session.session, request)
        .map_err(|e| refuse(&e, &session.session, lang))?;
    output::json(&document(session, &output))?;
    ended(&output.report)
}

fn document(session: &SessionInfo, output: &CodeOutput) -> Value {
    let status = match output.report.status {
        RunStatus::Ok {} => "ok",
        RunStatus::Error {} => "error",
        RunStatus::Died { .. } => "died",
    };
    json!({
        "session": session.session,
        "language": CodeLanguage::of(session.language).name(),
        "call": output.report.run,
        "status": status,
        "timed_out": output.report.timed_out,
        "truncated": output.truncated,
        "duration_ms": output.report.duration_us / 1000,
        "stdout": String::from_utf8_lossy(&output.stdout),
        "stderr": String::from_utf8_lossy(&output.stderr),
        "displays": output.displays.iter().map(bundle_json).collect::<Vec<_>>(),
        "result": output.result.as_ref().map(bundle_json),
        "error": output.error.as_ref().map(error_json),
    })
}

fn error_json(error: &CodeError) -> Value {
    json!({ "name": error.name, "value": error.value, "traceback": error.traceback })
}

/// Converts each form by its MIME type: JSON as itself, text as text, the rest in base64.
fn bundle_json(bundle: &MimeBundle) -> Value {
    let form = |mime: &str, data: &[u8]| {
        let is_json = mime == "application/json" || mime.ends_with("+json");
        if let Some(value) = is_json.then(|| serde_json::from_slice(data).ok()).flatten() {
            return value;
        }
        let is_text = mime.starts_with("text/") || mime == "image/svg+xml" || is_json;
        if is_text {
            Value::String(String::from_utf8_lossy(data).into_owned())
        } else {
            Value::String(base64(data))
        }
    };
    let forms = bundle.parts.iter().map(|(mime, data)| (mime.clone(), form(mime, data)));
    Value::Object(forms.collect::<Map<_, _>>())
}

fn base64(data: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(data.len().div_ceil(3) * 4);
    for group in data.chunks(3) {
        let byte = |index: usize| u32::from(group.get(index).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            if digit <= group.len() {
                text.push(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize].into())
            } else {
                text.push('=')
            }
        }
    }
    text
}

/// Interrupts the code on Ctrl-C; a second one soon after, or another signal, ends the command.
fn interrupt_on_signal(signals: Signals, interrupter: Interrupter) {
    attach::in_background("signals", move || {
        let mut last: Option<Instant> = None;
        while poll::readable(&[signals.as_fd()], None).is_ok() {
            let Ok(signal) = signals.next() else { return };
            let again = last.is_some_and(|at| at.elapsed() < TWICE);
            if signal != libc::SIGINT || again || interrupter.interrupt().is_err() {
                exit::leave(Ok(exit::by_signal(signal)));
            }
            last = Some(Instant::now());
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_every_remainder_is_padded() {
        for (data, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(base64(data.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }

    #[test]
    fn bundle_in_json_keeps_each_form_as_it_is_used() {
        let part = |mime: &str, data: &[u8]| (mime.to_owned(), data.to_vec());
        let bundle = MimeBundle {
            parts: vec![
                part("text/html", "<b>é</b>".as_bytes()),
                part("image/png", b"\x89P"),
                part("application/json", br#"{"a":1}"#),
                part("application/x+json", b"not json"),
            ],
        };
        let expected = json!({
            "text/html": "<b>é</b>", "image/png": "iVA=", "application/json": {"a": 1},
            "application/x+json": "not json",
        });
        assert_eq!(bundle_json(&bundle), expected);
    }
}
