//! The arguments of tool calls, checked. A bad one is refused with a line that names it.

use std::time::Duration;

use rmcp::model::JsonObject;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::ApiError;
use crate::extract::shown;
use crate::ids;
use crate::life::MAX_CHILDREN;

/// The time limit of a command or of code whose call has none.
pub const DEFAULT_TIME_S: u64 = 120;
/// The longest time limit.
pub const MAX_TIME_S: u64 = 1800;
/// The longest command or code.
pub const MAX_CODE: usize = 900 << 10;
/// The longest content that one call writes to a file.
pub const MAX_CONTENT: usize = 8 << 20;
/// The number of bytes that a call reads of a file, unless it says otherwise.
pub const DEFAULT_READ: u64 = 30_000;
/// The most bytes of a text that a call reads of a file.
pub const MAX_READ: u64 = 200_000;
/// The directory of commands, code and relative paths.
pub const HOME: &str = "/root";
const MAX_PATH: usize = 4096;

/// The arguments of `sandbox_create`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Create {
    pub template: Option<String>,
    pub cpus: Option<u32>,
    pub memory_mb: Option<u64>,
    pub ttl_seconds: Option<u64>,
}

/// The arguments of `sandbox_run_code`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunCode {
    pub code: String,
    pub language: Option<String>,
    pub timeout_seconds: Option<u64>,
    pub sandbox: Option<String>,
}

/// The arguments of `sandbox_exec`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    pub command: String,
    pub cwd: Option<String>,
    pub timeout_seconds: Option<u64>,
    pub sandbox: Option<String>,
}

/// The form in which the content of a file is sent.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// UTF-8 text.
    #[default]
    Text,
    /// Any bytes, in base64.
    Base64,
}

/// The arguments of `sandbox_read_file`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadFile {
    pub path: String,
    #[serde(default)]
    pub offset: u64,
    pub limit: Option<u64>,
    pub encoding: Option<Encoding>,
    pub sandbox: Option<String>,
}

/// The arguments of `sandbox_write_file`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriteFile {
    pub path: String,
    pub content: String,
    #[serde(default)]
    pub encoding: Encoding,
    pub sandbox: Option<String>,
}

/// The arguments of `sandbox_list_files`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListFiles {
    pub path: Option<String>,
    pub sandbox: Option<String>,
}

/// The arguments of `sandbox_fork`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    pub count: Option<u64>,
    pub sandbox: Option<String>,
}

/// The arguments of `sandbox_checkpoint`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    pub name: Option<String>,
    pub sandbox: Option<String>,
}

/// The arguments of `sandbox_checkout`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkout {
    pub name: String,
    pub sandbox: Option<String>,
}

/// The arguments of `sandbox_diff`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diff {
    pub from: String,
    pub to: Option<String>,
    pub path: Option<String>,
    #[serde(default)]
    pub patch: bool,
    pub sandbox: Option<String>,
}

/// The arguments of tools that only take a sandbox.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OneSandbox {
    pub sandbox: Option<String>,
}

/// The arguments of tools that take none.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// Takes the arguments of a call apart.
pub fn parse<T: DeserializeOwned>(arguments: Option<JsonObject>) -> Result<T, ApiError> {
    let arguments = Value::Object(arguments.unwrap_or_default());
    serde_json::from_value(arguments)
        .map_err(|error| ApiError::bad_request(format!("arguments: {error}")))
}

/// Checks the id of a sandbox.
pub fn sandbox_id(id: String) -> Result<String, ApiError> {
    if ids::is_id(&id) {
        return Ok(id);
    }
    let message = format!("sandbox: '{}' is no id; sandbox_list shows the ids", shown(&id));
    Err(ApiError::bad_request(message))
}

/// Returns a time limit.
pub fn timeout(seconds: Option<u64>) -> Result<Duration, ApiError> {
    match seconds.unwrap_or(DEFAULT_TIME_S) {
        seconds if (1..=MAX_TIME_S).contains(&seconds) => Ok(Duration::from_secs(seconds)),
        _ => {
            let message = format!("timeout_seconds: use a number from 1 to {MAX_TIME_S}");
            Err(ApiError::bad_request(message))
        }
    }
}

/// Refuses a command or code that is too long, and names the way out.
pub fn check_code(field: &str, code: &str) -> Result<(), ApiError> {
    if code.len() > MAX_CODE {
        let message = format!("{field}: longer than 900 KiB; write it to a file and run that");
        return Err(ApiError::too_large(message));
    }
    Ok(())
}

/// Returns the absolute form of a path in the guest.
pub fn guest_path(path: &str) -> Result<String, ApiError> {
    if path.is_empty() || path.len() > MAX_PATH || path.contains('\0') {
        return Err(ApiError::bad_request("path: use 1 to 4096 characters, none of them NUL"));
    }
    if path.starts_with('/') {
        return Ok(path.to_owned());
    }
    let path = path.strip_prefix("~/").unwrap_or(path);
    Ok(format!("{HOME}/{path}"))
}

/// Returns the number of forks.
pub fn fork_count(count: Option<u64>) -> Result<usize, ApiError> {
    match usize::try_from(count.unwrap_or(1)) {
        Ok(count) if (1..=MAX_CHILDREN).contains(&count) => Ok(count),
        _ => Err(ApiError::bad_request(format!("count: use a number from 1 to {MAX_CHILDREN}"))),
    }
}

/// Returns the number of bytes to read of a file.
pub fn read_limit(limit: Option<u64>) -> Result<u64, ApiError> {
    match limit.unwrap_or(DEFAULT_READ) {
        limit if (1..=MAX_READ).contains(&limit) => Ok(limit),
        _ => Err(ApiError::bad_request(format!("limit: use a number from 1 to {MAX_READ}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parsed<T: DeserializeOwned>(value: Value) -> Result<T, ApiError> {
        parse(value.as_object().cloned())
    }

    #[test]
    fn missing_unknown_and_mistyped_arguments_are_refused_by_name() {
        for (value, name) in [
            (json!({}), "command"),
            (json!({ "command": "true", "comand": 1 }), "comand"),
            (json!({ "command": "true", "timeout_seconds": "1" }), "string \"1\""),
        ] {
            let error = parsed::<Exec>(value).unwrap_err();
            assert!(error.message.contains(name), "{}", error.message);
            assert!(!error.message.contains('\n'));
        }
        assert!(parse::<OneSandbox>(None).unwrap().sandbox.is_none());
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert_eq!(timeout(None).unwrap(), Duration::from_secs(DEFAULT_TIME_S));
        for seconds in [0, MAX_TIME_S + 1, u64::MAX] {
            assert!(timeout(Some(seconds)).is_err());
        }
        assert_eq!(fork_count(None).unwrap(), 1);
        for count in [0, 17, u64::MAX] {
            assert!(fork_count(Some(count)).is_err());
        }
        for limit in [0, MAX_READ + 1] {
            assert!(read_limit(Some(limit)).is_err());
        }
    }

    #[test]
    fn relative_path_is_in_the_home() {
        assert_eq!(guest_path("/etc/passwd").unwrap(), "/etc/passwd");
        assert_eq!(guest_path("a/b").unwrap(), "/root/a/b");
        assert_eq!(guest_path("~/a").unwrap(), "/root/a");
        for bad in ["", "a\0b", &"x".repeat(5000)] {
            assert!(guest_path(bad).is_err());
        }
    }

    #[test]
    fn sandbox_that_is_no_id_is_refused_with_the_way_to_ids() {
        let error = sandbox_id("../x".to_owned()).unwrap_err();
        assert!(error.message.contains("sandbox_list"), "{}", error.message);
    }
}
