//! `pvmm watch`: prints changes in a folder of a VM as they happen, one per line.

use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{AgentError, Change, WatchEvent};
use serde_json::json;

use crate::cli::Watch;
use crate::exit::{self, Failure, Outcome};
use crate::output;
use pvmm_sandbox::guest_agent;
use pvmm_sandbox::sys::signals::{FORWARDED, Signals};
use pvmm_sandbox::vm_dir::Base;

/// The interval between checks for a signal.
const LOOK: Duration = Duration::from_millis(200);

pub fn watch(args: Watch) -> Outcome {
    let (vm, path) = args.place;
    let path = Path::new("/").join(path);
    let vm = Base::open()?.find(&vm)?;
    vm.require_running()?;
    let signals = Signals::hold(&FORWARDED)?;
    let agent =
        guest_agent::connect(&vm.dir, guest_agent::PATIENCE).map_err(guest_agent::refuse)?;
    let mut watch = agent.watch(&path, args.recursive).map_err(|error| match error.errno() {
        Some(errno) => {
            let why = exit::errno_text(errno);
            Failure::usage(format!("cannot watch {} in the VM: {why}", path.display()))
        }
        None => guest_agent::refuse(error),
    })?;
    loop {
        if signals.is_pending() {
            return Err(Failure::silent(exit::by_signal(signals.next()?)));
        }
        match watch.next(Some(Instant::now() + LOOK)) {
            Ok(None) => {}
            Ok(Some(event)) => {
                output::line(&line(&event, args.json))?;
                if event.change == Change::Gone {
                    return Ok(0);
                }
            }
            Err(AgentError::WatchEnded) => return Ok(0),
            Err(error) => return Err(guest_agent::refuse(error)),
        }
    }
}

/// Formats an event as one line. File names come from the guest and are escaped.
fn line(event: &WatchEvent, as_json: bool) -> String {
    let change = match event.change {
        Change::Created => "created",
        Change::Modified => "modified",
        Change::Written => "written",
        Change::Attributes => "attributes",
        Change::Deleted => "deleted",
        Change::MovedFrom => "moved-from",
        Change::MovedTo => "moved-to",
        Change::Overflow => "overflow",
        Change::Gone => "gone",
        Change::Other => "other",
    };
    let path = String::from_utf8_lossy(&event.path);
    if as_json {
        let (directory, cookie) = (event.directory, event.cookie);
        return json!({ "change": change, "path": path, "directory": directory, "cookie": cookie })
            .to_string();
    }
    let slash = if event.directory { "/" } else { "" };
    let path: String = path.chars().flat_map(shown).collect();
    format!("{change:10} {path}{slash}").trim_end().to_owned()
}

/// Escapes control characters, which could move the cursor.
fn shown(c: char) -> impl Iterator<Item = char> {
    let escaped = if c.is_control() { Some(c.escape_default()) } else { None };
    let plain = if escaped.is_none() { Some(c) } else { None };
    escaped.into_iter().flatten().chain(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_a_name_with_control_characters_is_one_line() {
        let event = WatchEvent {
            change: Change::Created,
            path: b"a\n\x1b[2Jb\xff"[..].to_vec().into(),
            directory: true,
            cookie: 0,
        };
        assert_eq!(line(&event, false), "created    a\\n\\u{1b}[2Jb\u{fffd}/");
        let json: serde_json::Value = serde_json::from_str(&line(&event, true)).unwrap();
        assert_eq!(json["change"], "created");
    }
}
