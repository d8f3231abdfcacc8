//! The content of the metadata service: set as a whole or patched by RFC 7396, within a size limit.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::http::Refusal;

pub struct Mmds {
    content: Value,
    max: usize,
    /// Content has been put; only then can it be patched.
    filled: bool,
    /// The metadata service is in use; it cannot be added to a VM that started without it.
    present: bool,
}

impl Mmds {
    pub fn new(max: usize) -> Self {
        Self { content: Value::Null, max, filled: false, present: false }
    }

    /// Marks the metadata service as in use, so that it stays available when the VM has started.
    pub fn make_present(&mut self) {
        self.present = true;
    }

    pub fn is_present(&self) -> bool {
        self.present
    }

    /// Returns the content for an API client; an empty store is an empty object.
    pub fn shown(&self) -> Value {
        if self.content.is_null() { Value::Object(Map::new()) } else { self.content.clone() }
    }

    /// Returns the content for the guest.
    pub fn content(&self) -> Arc<Value> {
        Arc::new(self.content.clone())
    }

    pub fn put(&mut self, content: Value) -> Result<(), Refusal> {
        self.check(&content)?;
        self.content = content;
        (self.filled, self.present) = (true, true);
        Ok(())
    }

    pub fn patch(&mut self, patch: &Value) -> Result<(), Refusal> {
        self.present = true;
        if !self.filled {
            return Err(Refusal::bad("MMDS: there is nothing to patch yet; PUT /mmds first."));
        }
        let mut patched = self.content.clone();
        merge(&mut patched, patch);
        self.check(&patched)?;
        self.content = patched;
        Ok(())
    }

    fn check(&self, content: &Value) -> Result<(), Refusal> {
        let (size, max) = (content.to_string().len(), self.max);
        if size <= max {
            return Ok(());
        }
        let message = format!("MMDS: {size} bytes of metadata are more than the limit of {max}.");
        Err(Refusal { status: 413, message })
    }
}

/// Applies a JSON merge patch (RFC 7396). The parser bounds the depth of both values.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else { return };
    for (key, value) in patch {
        match value {
            Value::Null => drop(target.remove(key)),
            value => merge(target.entry(key.as_str()).or_insert(Value::Null), value),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patch_changes_adds_and_removes() {
        let mut mmds = Mmds::new(1000);
        assert_eq!(mmds.shown(), json!({}));
        assert_eq!(mmds.patch(&json!({})).unwrap_err().status, 400);
        mmds.put(json!({"a": {"b": 1, "c": 2}, "d": [1]})).unwrap();
        mmds.patch(&json!({"a": {"b": null, "e": {"f": 3, "g": null}}, "d": {"h": 4}})).unwrap();
        assert_eq!(mmds.shown(), json!({"a": {"c": 2, "e": {"f": 3}}, "d": {"h": 4}}));
    }

    #[test]
    fn i2_content_beyond_the_limit_is_refused_and_nothing_is_changed() {
        let mut mmds = Mmds::new(20);
        mmds.put(json!({"a": "b"})).unwrap();
        assert_eq!(mmds.put(json!({"a": "x".repeat(20)})).unwrap_err().status, 413);
        assert_eq!(mmds.patch(&json!({"c": "x".repeat(20)})).unwrap_err().status, 413);
        assert_eq!(mmds.shown(), json!({"a": "b"}));
    }
}
