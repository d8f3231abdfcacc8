//! The changes that watchers have collected until a client asks for them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::error::CallError;

/// The most watchers of one sandbox that collect; a guest has a few watches more.
const MAX_WATCHERS: usize = 24;
/// The most events that wait for a client; older ones are dropped.
const MAX_EVENTS: usize = 10_000;
/// The time after which a watcher that nobody asks ends.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// The events of one watcher.
struct Collected {
    sandbox: String,
    events: VecDeque<Value>,
    asked: Instant,
}

/// The watchers that collect, by their ids.
#[derive(Default)]
pub struct Watchers {
    collected: Mutex<HashMap<String, Collected>>,
}

impl Watchers {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Collected>> {
        self.collected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a watcher of a sandbox.
    pub fn add(&self, id: &str, sandbox: &str) -> Result<(), CallError> {
        let mut all = self.lock();
        if all.values().filter(|it| it.sandbox == sandbox).count() >= MAX_WATCHERS {
            let message = format!("a sandbox has at most {MAX_WATCHERS} watchers");
            return Err(CallError::new("resource_exhausted", message));
        }
        let (sandbox, events) = (sandbox.to_owned(), VecDeque::new());
        all.insert(id.to_owned(), Collected { sandbox, events, asked: Instant::now() });
        Ok(())
    }

    /// Adds events; returns false if the watcher is no longer wanted.
    pub fn push(&self, id: &str, events: Vec<Value>) -> bool {
        let mut all = self.lock();
        let Some(it) = all.get_mut(id) else { return false };
        it.events.extend(events);
        let excess = it.events.len().saturating_sub(MAX_EVENTS);
        it.events.drain(..excess);
        it.asked.elapsed() < FORGOTTEN
    }

    /// Takes the events of a sandbox's watcher; `None` if there is no such watcher.
    pub fn take(&self, id: &str, sandbox: &str) -> Option<Vec<Value>> {
        let mut all = self.lock();
        let it = all.get_mut(id).filter(|it| it.sandbox == sandbox)?;
        it.asked = Instant::now();
        Some(it.events.drain(..).collect())
    }

    /// Removes a watcher.
    pub fn remove(&self, id: &str) {
        self.lock().remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn watcher_keeps_the_newest_events_of_its_sandbox() {
        let watchers = Watchers::default();
        watchers.add("w", "a").unwrap();
        assert!(watchers.push("w", vec![json!(0); MAX_EVENTS + 5]));
        assert_eq!(watchers.take("w", "b"), None);
        assert_eq!(watchers.take("w", "a").unwrap().len(), MAX_EVENTS);
        assert_eq!(watchers.take("w", "a").unwrap().len(), 0);
        watchers.remove("w");
        assert!(!watchers.push("w", Vec::new()));
        for number in 0..MAX_WATCHERS {
            watchers.add(&number.to_string(), "a").unwrap();
        }
        assert!(watchers.add("more", "a").is_err());
        assert!(watchers.add("more", "b").is_ok());
    }
}
