//! `/v1/sandboxes`: create, list, get, delete.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::blocking::{Work, to_the_end};
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner, shown};
use crate::ids;
use crate::life::{self, MAX_TTL_S, Source, StartRequest};
use crate::store::{SandboxRow, VolumeUse};

const DEFAULT_TEMPLATE: &str = "code-interpreter";
/// Names of templates that clients use by default, and what they are here.
const ALIASES: [(&str, &str); 1] = [("ubuntu-24.04", "base")];
const MAX_CPUS: u32 = 32;
const MIN_MEMORY_MIB: u64 = 128;
const MAX_MEMORY_MIB: u64 = 1 << 20;
const MIN_DISK_MIB: u64 = 64;
const MAX_DISK_MIB: u64 = 16 << 20;
const MAX_VOLUMES: usize = 4;
const MAX_RULES: usize = 256;
const MAX_METADATA: usize = 64;
const MAX_METADATA_BYTES: usize = 16 << 10;
/// The address of every guest that has a network card, in a network of its own.
const GUEST_IP: &str = "10.0.2.15";

/// The body of a create.
#[derive(Debug, Default, Deserialize)]
pub struct Create {
    pub(crate) template: Option<String>,
    pub(crate) cpu: Option<u32>,
    pub(crate) memory_mb: Option<u64>,
    pub(crate) disk_mb: Option<u64>,
    pub(crate) metadata: Option<BTreeMap<String, String>>,
    pub(crate) ttl_seconds: Option<u64>,
    pub(crate) persistent: Option<bool>,
    pub(crate) from_snapshot: Option<String>,
    pub(crate) volumes: Option<Vec<VolumeWish>>,
    pub(crate) egress_allowlist: Option<Vec<String>>,
    pub(crate) env: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct VolumeWish {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) read_only: bool,
    pub(crate) mount_path: Option<String>,
}

/// Writes a sandbox as clients read it.
pub fn shape(row: &SandboxRow) -> Value {
    json!({
        "id": row.id,
        "template": row.template,
        "cpu": row.cpus,
        "memory_mb": row.memory_mib,
        "status": row.state.word(),
        "guest_ip": row.egress.as_ref().map(|_| GUEST_IP),
        "created_at": clock::rfc3339(row.created_ms),
        "metadata": row.metadata,
        "from_snapshot": row.from_snapshot,
        "boot_ms": row.boot_ms,
        "boot_mode": row.boot_mode,
        "persistent": row.persistent,
        "ttl_seconds": row.ttl_s,
        "volumes": row.volumes,
        "egress_allowlist": row.egress,
    })
}

/// Checks the metadata of a client.
pub fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let bytes: usize = metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
    if metadata.len() > MAX_METADATA || bytes > MAX_METADATA_BYTES {
        return Err(ApiError::bad_request("metadata: at most 64 names, and 16 KiB in all"));
    }
    Ok(())
}

/// Checks the number of rules for the network.
pub fn check_rules(rules: &[String]) -> Result<(), ApiError> {
    if rules.len() > MAX_RULES {
        return Err(ApiError::bad_request(format!("egress_allowlist: at most {MAX_RULES}")));
    }
    Ok(())
}

/// Checks a time to live.
pub fn check_ttl(seconds: u64) -> Result<u64, ApiError> {
    match seconds {
        0 => Err(ApiError::bad_request("ttl_seconds: use a number from 1 on")),
        seconds if seconds > MAX_TTL_S => {
            let message = format!("ttl_seconds exceeds tier maximum: at most {MAX_TTL_S}");
            Err(ApiError::bad_request(message))
        }
        seconds => Ok(seconds),
    }
}

fn within<T: PartialOrd + std::fmt::Display>(
    field: &str,
    value: Option<T>,
    least: T,
    most: T,
) -> Result<Option<T>, ApiError> {
    match value {
        Some(value) if value < least || value > most => {
            Err(ApiError::bad_request(format!("{field}: use a number from {least} to {most}")))
        }
        value => Ok(value),
    }
}

fn volumes(wishes: Vec<VolumeWish>) -> Result<Vec<VolumeUse>, ApiError> {
    if wishes.len() > MAX_VOLUMES {
        return Err(ApiError::bad_request(format!("volumes: at most {MAX_VOLUMES}")));
    }
    let mut uses: Vec<VolumeUse> = Vec::new();
    for (number, wish) in wishes.into_iter().enumerate() {
        let VolumeWish { name, read_only, mount_path } = wish;
        if !ids::is_name(&name) {
            let message = format!("volumes: '{}' is not the name of a volume", shown(&name));
            return Err(ApiError::bad_request(message));
        }
        let at = mount_path.unwrap_or_else(|| match number {
            0 => "/workspace".to_owned(),
            _ => format!("/mnt/{name}"),
        });
        let is_path = at.starts_with('/') && at.len() <= 1024 && !at.contains('\0');
        if !is_path || at.split('/').any(|part| part == "..") {
            return Err(ApiError::bad_request("volumes: mount_path is not an absolute path"));
        }
        if uses.iter().any(|other| other.name == name || other.at == at) {
            return Err(ApiError::bad_request(format!("volumes: '{name}' or its path is twice")));
        }
        uses.push(VolumeUse { name, at, read_only });
    }
    Ok(uses)
}

impl Create {
    /// Checks the wishes and returns the request to the library.
    pub fn request(self, owner: String) -> Result<StartRequest, ApiError> {
        let template = self.template.unwrap_or_else(|| DEFAULT_TEMPLATE.to_owned());
        let alias = ALIASES.iter().find(|(name, _)| *name == template);
        let template = alias.map_or(template, |(_, name)| (*name).to_owned());
        if !ids::is_name(&template) {
            let message = format!("template: '{}' is not the name of one", shown(&template));
            return Err(ApiError::bad_request(message));
        }
        if self.env.is_some_and(|env| !env.is_empty()) {
            return Err(ApiError::bad_request("env: give it to each exec instead"));
        }
        let metadata = self.metadata.unwrap_or_default();
        check_metadata(&metadata)?;
        self.egress_allowlist.as_deref().map_or(Ok(()), check_rules)?;
        Ok(StartRequest {
            owner,
            source: match self.from_snapshot {
                Some(id) => Source::Snapshot(id),
                None => Source::Template(template),
            },
            cpus: within("cpu", self.cpu, 1, MAX_CPUS)?,
            memory_mib: within("memory_mb", self.memory_mb, MIN_MEMORY_MIB, MAX_MEMORY_MIB)?,
            disk_mib: within("disk_mb", self.disk_mb, MIN_DISK_MIB, MAX_DISK_MIB)?,
            metadata,
            ttl_s: self.ttl_seconds.map(check_ttl).transpose()?,
            persistent: self.persistent.unwrap_or(false),
            volumes: volumes(self.volumes.unwrap_or_default())?,
            egress: self.egress_allowlist,
        })
    }
}

/// `POST /v1/sandboxes`
pub async fn create(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Json(body): Json<Create>,
) -> Result<Response, ApiError> {
    let row = start(&app, body.request(owner)?).await?;
    Ok((StatusCode::CREATED, axum::Json(shape(&row))).into_response())
}

/// Starts a sandbox from a template or a snapshot that is there, and returns its row.
pub async fn start(app: &Arc<App>, request: StartRequest) -> Result<SandboxRow, ApiError> {
    let (begun, owner) = (Instant::now(), request.owner.clone());
    let shared = Arc::clone(app);
    let outcome = to_the_end(async move {
        let source = request.source.clone();
        shared.blocking.run(Work::Short, move || require_template(&source)).await?;
        life::start(&shared, request).await
    })
    .await;
    let id = outcome.as_ref().map_or("", |row| &row.id);
    app.audit.write(&Act::new("create", &owner, id).since(begun).outcome(&outcome));
    outcome
}

/// Refuses a template that is not there, and names those that are.
fn require_template(source: &Source) -> Result<(), ApiError> {
    let Source::Template(name) = source else { return Ok(()) };
    let cache = pvmm_images::Cache::open().map_err(|e| ApiError::internal(e.to_string()))?;
    if name == pvmm_images::template::BASE || pvmm_images::Template::find(&cache, name).is_ok() {
        return Ok(());
    }
    let there = pvmm_images::Template::list(&cache).unwrap_or_default();
    let mut names: Vec<_> = there.iter().map(|template| template.name()).collect();
    names.push(pvmm_images::template::BASE);
    names.sort_unstable();
    names.dedup();
    let mut message = format!("template '{name}' not found; there are: {}", names.join(", "));
    if pvmm_images::Recipe::built_in(name).is_some() {
        message = format!("{message}; to build it: pvmm template build {name}");
    }
    Err(ApiError::not_found(message))
}

/// `GET /v1/sandboxes`
pub async fn list(State(app): State<Arc<App>>, _: Owner) -> axum::Json<Value> {
    let sandboxes = app.list().iter().map(|entry| shape(&entry.row())).collect();
    axum::Json(Value::Array(sandboxes))
}

/// `GET /v1/sandboxes/{id}`
pub async fn get(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
) -> Result<axum::Json<Value>, ApiError> {
    Ok(axum::Json(shape(&app.find(&id)?.row())))
}

/// `DELETE /v1/sandboxes/{id}`
pub async fn delete(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    end(&app, &owner, &id).await.map(|()| StatusCode::NO_CONTENT)
}

/// Ends a sandbox. Ending it twice is no error.
pub async fn end(app: &Arc<App>, owner: &str, id: &str) -> Result<(), ApiError> {
    let begun = Instant::now();
    if app.has_ended(id) {
        return Ok(());
    }
    let entry = app.find(id)?;
    let shared = Arc::clone(app);
    let outcome = to_the_end(async move { life::end(&shared, &entry).await }).await;
    app.audit.write(&Act::new("delete", owner, id).since(begun).outcome(&outcome));
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(body: Value) -> Result<StartRequest, ApiError> {
        serde_json::from_value::<Create>(body).unwrap().request("me".to_owned())
    }

    #[test]
    fn create_with_defaults_is_the_code_interpreter() {
        let request = request(json!({})).unwrap();
        assert_eq!(request.source, Source::Template(DEFAULT_TEMPLATE.to_owned()));
        assert_eq!((request.cpus, request.ttl_s, request.persistent), (None, None, false));
    }

    #[test]
    fn create_with_an_alias_is_the_template_behind_it() {
        let request = request(json!({ "template": "ubuntu-24.04" })).unwrap();
        assert_eq!(request.source, Source::Template("base".to_owned()));
    }

    #[test]
    fn volume_without_a_path_goes_to_the_workspace() {
        let body = json!({ "volumes": [{ "name": "a" }, { "name": "b", "read_only": true }] });
        let volumes = request(body).unwrap().volumes;
        assert_eq!((&volumes[0].at[..], &volumes[1].at[..]), ("/workspace", "/mnt/b"));
        assert!(volumes[1].read_only);
    }

    #[test]
    fn bad_field_is_refused_by_its_name() {
        for (body, field) in [
            (json!({ "cpu": 0 }), "cpu"),
            (json!({ "memory_mb": 1 }), "memory_mb"),
            (json!({ "disk_mb": 1 }), "disk_mb"),
            (json!({ "ttl_seconds": 0 }), "ttl_seconds"),
            (json!({ "ttl_seconds": u64::MAX }), "ttl_seconds exceeds tier maximum"),
            (json!({ "template": "../x" }), "template"),
            (json!({ "env": { "A": "b" } }), "env"),
            (json!({ "volumes": [{ "name": "a/b" }] }), "volumes"),
            (json!({ "volumes": [{ "name": "a", "mount_path": "x" }] }), "volumes"),
            (json!({ "metadata": { "a": "x".repeat(20_000) } }), "metadata"),
        ] {
            let error = request(body).unwrap_err();
            assert_eq!(error.status, StatusCode::BAD_REQUEST);
            assert!(error.message.starts_with(field), "{}", error.message);
        }
    }
}
