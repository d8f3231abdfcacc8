//! `pvmm events`: prints what happens to VMs, one line each, until it is interrupted.

use std::os::fd::AsFd;
use std::time::Duration;

use pvmm_sandbox::events::{Event, Watcher};
use pvmm_sandbox::sys::poll;
use pvmm_sandbox::sys::signals::{FORWARDED, Signals};
use pvmm_sandbox::vm_dir::Base;

use crate::cli::Events;
use crate::exit::{self, Failure, Outcome};
use crate::output;

/// The interval between two looks.
const LOOK: Duration = Duration::from_millis(100);

pub fn events(args: Events, quiet: bool) -> Outcome {
    let only = args.vm.as_deref().map(|vm| Base::open()?.find(vm)).transpose()?;
    let signals = Signals::hold(&FORWARDED)?;
    let mut watcher = Watcher::begin()?;
    output::remark(quiet, &format!("watching; VMs that are there: {}", watcher.vms()));
    loop {
        for event in watcher.look()? {
            if only.as_ref().is_none_or(|vm| vm.record.id == event.id) {
                output::line(&line(&event, args.json)?)?;
            }
        }
        if poll::readable(&[signals.as_fd()], Some(LOOK))?[0] {
            return Err(Failure::silent(exit::by_signal(signals.next()?)));
        }
    }
}

/// Formats an event as one line. Names of targets come from the guest and are escaped.
fn line(event: &Event, as_json: bool) -> Result<String, Failure> {
    if as_json {
        return serde_json::to_string(event).map_err(|error| Failure::fault(error.to_string()));
    }
    let name = event.name.as_deref().unwrap_or("-");
    let detail = event.detail.as_deref().unwrap_or_default();
    let code = event.exit_code.map(|code| format!("({code}) ")).unwrap_or_default();
    let text = format!(
        "{} {} {name:12} {:8} {code}{}",
        pvmm_service::rfc3339(event.time * 1000),
        event.id,
        event.event.word(),
        output::one_line(detail)
    );
    Ok(text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use pvmm_sandbox::events::EventKind;

    use super::*;

    #[test]
    fn line_of_an_event_has_no_control_characters() {
        let event = Event {
            time: 0,
            id: "0123456789ab".into(),
            name: None,
            event: EventKind::Denied,
            detail: Some("a\x1b[2J.test:443/tcp".into()),
            exit_code: None,
        };
        let text = line(&event, false).unwrap();
        let expected =
            "1970-01-01T00:00:00.000Z 0123456789ab -            denied   a\\u{1b}[2J.test:443/tcp";
        assert_eq!(text, expected);
        assert!(line(&event, true).unwrap().contains("\"event\":\"denied\""));
    }
}
