//! Changes in directories, as a stream or collected until a client asks for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use pvmm::agent::{Agent, Change, Watch, WatchEvent};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::blocking::Work;
use crate::ids;
use crate::life::{InUse, enter};

use super::accounts::{Account, Names, user_of};
use super::connect::{self, Incoming, Message, Outgoing};
use super::error::CallError;
use super::filesystem::entry;
use super::state::{Door, Target};

/// How often a silent watch is looked at.
const TICK: Duration = Duration::from_secs(1);

type Answer = Result<axum::Json<Value>, CallError>;

/// The message of a new watch.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Wanted {
    path: String,
    recursive: bool,
    include_entry: bool,
}

/// The message of a call about a watcher.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct About {
    watcher_id: String,
}

/// A watch on a directory of a guest.
struct Following {
    agent: Agent,
    watch: Watch,
    folder: String,
    include_entry: bool,
    names: Names,
}

impl Following {
    /// Begins a watch. Waits.
    fn begin(in_use: &InUse, user: Option<&str>, wanted: &Wanted) -> Result<Self, CallError> {
        let agent = in_use.agent()?;
        let folder = Account::find(&agent, user)?.absolute(&wanted.path);
        let watch = agent.watch(&folder, wanted.recursive)?;
        let (include_entry, names) = (wanted.include_entry, Names::default());
        Ok(Self { agent, watch, folder, include_entry, names })
    }

    /// Waits for a change for a while, and returns the events that it is for clients.
    fn next(&mut self) -> Result<Vec<Value>, CallError> {
        match self.watch.next(Some(Instant::now() + TICK))? {
            Some(event) => Ok(self.shape(&event)),
            None => Ok(Vec::new()),
        }
    }

    fn shape(&mut self, event: &WatchEvent) -> Vec<Value> {
        let name = String::from_utf8_lossy(&event.path).into_owned();
        let mut events = Vec::new();
        for kind in kinds(event) {
            let mut shaped = json!({ "name": name, "type": kind });
            let path = format!("{}/{name}", self.folder.trim_end_matches('/'));
            if self.include_entry
                && let Ok(metadata) = self.agent.stat(&path, false)
            {
                shaped["entry"] = entry(&self.agent, &mut self.names, &path, &metadata);
            }
            events.push(shaped);
        }
        events
    }
}

/// Returns the kinds of an event. A file that is written over the API appears whole under its name,
/// which is a write too; the name that it has until then is nobody's.
fn kinds(event: &WatchEvent) -> &'static [&'static str] {
    let name = event.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    if name.starts_with(b".pvmm-") && name.ends_with(b".tmp") {
        return &[];
    }
    match event.change {
        Change::Created => &["EVENT_TYPE_CREATE"],
        Change::Modified => &["EVENT_TYPE_WRITE"],
        Change::Attributes => &["EVENT_TYPE_CHMOD"],
        Change::Deleted | Change::Gone => &["EVENT_TYPE_REMOVE"],
        Change::MovedFrom => &["EVENT_TYPE_RENAME"],
        Change::MovedTo if event.directory => &["EVENT_TYPE_CREATE"],
        Change::MovedTo => &["EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE"],
        Change::Written | Change::Overflow | Change::Other => &[],
    }
}

/// Sends events until the client goes away.
fn stream(following: &mut Following, ping: Duration, events: &Outgoing) -> Result<(), CallError> {
    let mut pinged = Instant::now();
    let mut open = events.send(&json!({ "start": {} }));
    while open {
        let changes = following.next()?;
        open = !events.is_closed()
            && changes.iter().all(|event| events.send(&json!({ "filesystem": event })));
        if open && pinged.elapsed() >= ping {
            pinged = Instant::now();
            open = events.send(&json!({ "keepalive": {} }));
        }
    }
    Ok(())
}

async fn begin(
    door: &Door,
    id: &str,
    headers: &HeaderMap,
    wanted: Wanted,
) -> Result<(Following, InUse), CallError> {
    let (in_use, user) = (enter(&door.app, id).await?, user_of(headers));
    let work = move || {
        let following = Following::begin(&in_use, user.as_deref(), &wanted);
        Ok(following.map(|following| (following, in_use)))
    };
    door.app.blocking.run(Work::Short, work).await?
}

/// `WatchDir`
pub async fn watch(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let wanted: Result<Wanted, _> = Incoming::new(body).only().await;
    let begun = match wanted {
        Ok(wanted) => begin(&door, &id, &headers, wanted).await,
        Err(error) => Err(error),
    };
    let (mut following, in_use) = match begun {
        Ok(begun) => begun,
        Err(error) => return connect::streamed(Err(error)),
    };
    let (events, response) = connect::outgoing();
    let ping = connect::ping_interval(&headers);
    let work = move || {
        let outcome = stream(&mut following, ping, &events);
        events.end(outcome);
        drop(in_use);
    };
    match door.app.blocking.start(Work::Long, work).await {
        Ok(()) => response,
        Err(error) => connect::streamed(Err(error.into())),
    }
}

/// `CreateWatcher`
pub async fn create(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    headers: HeaderMap,
    Message(wanted): Message<Wanted>,
) -> Answer {
    let (mut following, in_use) = begin(&door, &id, &headers, wanted).await?;
    // A watcher that nobody asks does not keep its sandbox awake.
    drop(in_use);
    let watcher = ids::new_id().map_err(crate::error::ApiError::from)?;
    door.watchers.add(&watcher, &id)?;
    let (watchers, name) = (Arc::clone(&door.watchers), watcher.clone());
    let work = move || {
        while let Ok(events) = following.next() {
            if !watchers.push(&name, events) {
                break;
            }
        }
        watchers.remove(&name);
    };
    if let Err(error) = door.app.blocking.start(Work::Long, work).await {
        door.watchers.remove(&watcher);
        return Err(error.into());
    }
    Ok(axum::Json(json!({ "watcherId": watcher })))
}

fn missing() -> CallError {
    CallError::new("not_found", "the watcher was removed, or its directory or sandbox is gone")
}

/// `GetWatcherEvents`
pub async fn events(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    Message(about): Message<About>,
) -> Answer {
    let events = door.watchers.take(&about.watcher_id, &id).ok_or_else(missing)?;
    Ok(axum::Json(json!({ "events": events })))
}

/// `RemoveWatcher`
pub async fn remove(
    State(door): State<Arc<Door>>,
    Target(id): Target,
    Message(about): Message<About>,
) -> Answer {
    door.watchers.take(&about.watcher_id, &id).ok_or_else(missing)?;
    door.watchers.remove(&about.watcher_id);
    Ok(axum::Json(json!({})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_is_moved_into_place_is_created_and_written() {
        let event = |change, path: &str| WatchEvent {
            change,
            path: path.as_bytes().to_vec().into(),
            directory: false,
            cookie: 0,
        };
        let moved = kinds(&event(Change::MovedTo, "a/b"));
        assert_eq!(moved, ["EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE"]);
        assert!(kinds(&event(Change::Created, "a/.pvmm-1-2-0.tmp")).is_empty());
        assert_eq!(kinds(&event(Change::Deleted, "x")), ["EVENT_TYPE_REMOVE"]);
    }
}
