//! Changes of VMs, found by looking at their directories again and again, so that no VM has to tell
//! and a stuck one cannot block.
//!
//! A VM that comes and goes between two looks is not seen.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::denial_log::DenialLog;
use crate::failure::Failure;
use crate::vm_dir::{Base, VmEntry, VmStatus, now};

/// A change of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    /// Seconds since 1970.
    pub time: u64,
    pub id: String,
    pub name: Option<String>,
    pub event: EventKind,
    /// The template of a VM that starts, the reason of an end, the target of a denied connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    Starting,
    Running,
    Paused,
    Exited,
    /// The VM's process was killed, and left no word about its end.
    Dead,
    /// The VM's directory is gone.
    Removed,
    /// The guest tried to reach a target that its policy denies.
    Denied,
}

impl EventKind {
    pub fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Exited => "exited",
            Self::Dead => "dead",
            Self::Removed => "removed",
            Self::Denied => "denied",
        }
    }

    fn of(status: &VmStatus) -> Self {
        match status {
            VmStatus::Starting => Self::Starting,
            VmStatus::Running => Self::Running,
            VmStatus::Paused => Self::Paused,
            VmStatus::Exited(_) => Self::Exited,
            VmStatus::Dead => Self::Dead,
        }
    }
}

/// A VM as the last look saw it.
struct Seen {
    name: Option<String>,
    kind: EventKind,
    denials: DenialLog,
}

/// The VMs of one runtime directory, watched.
pub struct Watcher {
    base: Base,
    seen: BTreeMap<String, Seen>,
}

impl Watcher {
    /// Begins to watch. VMs that are there already are no events, and neither is what they did.
    pub fn begin() -> Result<Self, Failure> {
        let base = Base::open()?;
        let seen = base.list()?.into_iter().map(|vm| {
            let (kind, denials) = (EventKind::of(&vm.state), DenialLog::at_end(&vm));
            (vm.record.id, Seen { name: vm.record.name, kind, denials })
        });
        let seen = seen.collect();
        Ok(Self { base, seen })
    }

    /// Returns the number of VMs that the last look saw.
    pub fn vms(&self) -> usize {
        self.seen.len()
    }

    /// Returns what has happened since the last look.
    pub fn look(&mut self) -> Result<Vec<Event>, Failure> {
        let mut events = Vec::new();
        let entries = self.base.list()?;
        for vm in &entries {
            let kind = EventKind::of(&vm.state);
            let before = self.seen.remove(&vm.record.id);
            let is_change = before.as_ref().is_none_or(|seen| seen.kind != kind);
            let mut denials = before.map_or_else(|| DenialLog::of(vm), |seen| seen.denials);
            let denied = denials.read().unwrap_or_default();
            let denied =
                denied.into_iter().map(|target| event(vm, EventKind::Denied, Some(target)));
            events.extend(denied);
            if is_change {
                events.push(changed(vm, kind));
            }
            let name = vm.record.name.clone();
            self.seen.insert(vm.record.id.clone(), Seen { name, kind, denials });
        }
        let is_there = |id: &str| entries.iter().any(|vm| vm.record.id == id);
        let gone = self.seen.extract_if(.., |id, _| !is_there(id));
        events.extend(gone.map(|(id, seen)| Event {
            time: now(),
            id,
            name: seen.name,
            event: EventKind::Removed,
            detail: None,
            exit_code: None,
        }));
        Ok(events)
    }
}

fn event(vm: &VmEntry, event: EventKind, detail: Option<String>) -> Event {
    let (id, name) = (vm.record.id.clone(), vm.record.name.clone());
    Event { time: now(), id, name, event, detail, exit_code: None }
}

fn changed(vm: &VmEntry, kind: EventKind) -> Event {
    match &vm.state {
        VmStatus::Exited(ending) => Event {
            time: ending.at,
            exit_code: ending.exit_code,
            ..event(vm, kind, Some(ending.reason.clone()))
        },
        VmStatus::Starting | VmStatus::Running => event(vm, kind, Some(vm.record.template.clone())),
        VmStatus::Paused | VmStatus::Dead => event(vm, kind, None),
    }
}
