//! Sandboxes: create, list, connect, time to live, pause, fork, end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use pvmm_sandbox::CreateOptions;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::Entry;
use crate::audit::Act;
use crate::blocking::{Work, to_the_end};
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Id, Owner, Queried};
use crate::form;
use crate::ids;
use crate::life::{self, MAX_CHILDREN, MAX_TTL_S};
use crate::preview;
use crate::resources::{lifecycle, sandboxes};
use crate::store::{SandboxRow, State as SandboxState};

use super::error::{Checked, CheckedJson, Refused, gone};
use super::network::Network;
use super::state::{Door, Target};

/// The version of E2B's agent whose calls are answered here.
pub const ENVD_VERSION: &str = "0.6.4";
/// The time to live of a sandbox whose client gives none.
const DEFAULT_TTL_S: u64 = 300;
/// Names of E2B's templates, and what they are here.
const TEMPLATES: [(&str, &str); 2] =
    [("code-interpreter-v1", "code-interpreter"), ("code-interpreter-beta", "code-interpreter")];
/// The most entries of one page.
const MAX_PAGE: usize = 100;
/// The home directory in E2B's templates.
const HOME: &str = "/home/user";
const MAX_ENV_BYTES: usize = 64 << 10;

/// Returns the template of this server that a client names.
pub fn template_of(name: &str) -> &str {
    let name = name.split_once(':').map_or(name, |(name, _)| name);
    TEMPLATES.iter().find(|(theirs, _)| *theirs == name).map_or(name, |(_, ours)| ours)
}

/// The body of a create.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Create {
    #[serde(rename = "templateID")]
    template_id: String,
    timeout: Option<u64>,
    auto_pause: Option<bool>,
    auto_pause_memory: Option<bool>,
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    network: Option<Network>,
    metadata: Option<BTreeMap<String, String>>,
    env_vars: Option<BTreeMap<String, String>>,
    mcp: Option<Value>,
    iam: Option<Value>,
    volume_mounts: Option<Vec<Mount>>,
}

#[derive(Clone, Debug, Deserialize)]
struct Mount {
    name: String,
    path: String,
}

impl Create {
    fn request(&self, owner: String) -> Result<life::StartRequest, ApiError> {
        let refuse = |message: &str| Err(ApiError::not_implemented(message));
        if self.mcp.as_ref().is_some_and(|mcp| !mcp.is_null()) {
            return refuse("mcp: pvmm has no gateway; `pvmm mcp` is a server of its own");
        }
        if self.iam.as_ref().is_some_and(|iam| !iam.is_null()) {
            return refuse("iam: pvmm gives no tokens to workloads");
        }
        if self.auto_pause_memory == Some(false) {
            return refuse("autoPauseMemory: a paused sandbox always keeps its memory");
        }
        let env = self.env_vars.iter().flatten();
        if env.map(|(name, value)| name.len() + value.len()).sum::<usize>() > MAX_ENV_BYTES {
            return Err(ApiError::bad_request("envVars: at most 64 KiB in all"));
        }
        let network = self.network.clone().unwrap_or_default();
        let snapshot = ids::is_id(&self.template_id).then(|| self.template_id.clone());
        let template = snapshot.is_none().then(|| template_of(&self.template_id).to_owned());
        let mount = |mount: &Mount| sandboxes::VolumeWish {
            name: mount.name.clone(),
            read_only: false,
            mount_path: Some(mount.path.clone()),
        };
        let create = sandboxes::Create {
            template,
            from_snapshot: snapshot,
            metadata: self.metadata.clone(),
            ttl_seconds: Some(self.timeout.unwrap_or(DEFAULT_TTL_S).max(1)),
            persistent: self.auto_pause,
            volumes: Some(self.volume_mounts.iter().flatten().map(mount).collect()),
            egress_allowlist: network.rules(self.allow_internet_access)?,
            ..sandboxes::Create::default()
        };
        create.request(owner)
    }
}

/// Writes a sandbox with its credentials, as the clients read it.
fn opened(door: &Door, headers: &HeaderMap, row: &SandboxRow) -> Value {
    json!({
        "sandboxID": row.id,
        "templateID": row.template,
        "clientID": "",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": door.app.key.token(&row.id),
        "trafficAccessToken": door.app.key.traffic_token(&row.id),
        "domain": preview::domain(headers),
    })
}

/// Writes a sandbox without its credentials.
fn shape(row: &SandboxRow) -> Value {
    let end = row.expires_ms.unwrap_or_else(|| clock::now_ms().saturating_add(MAX_TTL_S * 1000));
    let running = row.state == SandboxState::Running;
    json!({
        "sandboxID": row.id,
        "templateID": row.template,
        "alias": row.template,
        "clientID": "",
        "startedAt": clock::rfc3339(row.created_ms),
        "endAt": clock::rfc3339(end),
        "cpuCount": row.cpus,
        "memoryMB": row.memory_mib,
        "diskSizeMB": CreateOptions::of(&row.template).disk_mib,
        "metadata": row.metadata,
        "state": if running { "running" } else { "paused" },
        "envdVersion": ENVD_VERSION,
    })
}

/// `POST /sandboxes`
pub async fn create(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    headers: HeaderMap,
    CheckedJson(body): CheckedJson<Create>,
) -> Result<Response, Refused> {
    let row = sandboxes::start(&door.app, body.request(owner)?).await?;
    let env = body.env_vars.unwrap_or_default();
    let all_public = body.network.and_then(|network| network.allow_public_traffic) == Some(true);
    if !env.is_empty() || all_public {
        let entry = door.app.find(&row.id)?;
        let mut fields = entry.lock();
        (fields.row.env, fields.row.all_public) = (env, all_public);
        door.app.store.put_sandboxes(&[&fields.row]).map_err(ApiError::from)?;
    }
    if let Err(error) = make_home(&door, &row.id).await {
        log::warn!("sandbox {}: no {HOME}: {}", row.id, error.message);
    }
    Ok((StatusCode::CREATED, axum::Json(opened(&door, &headers, &row))).into_response())
}

/// Makes the directory that programs take for granted in E2B's sandboxes.
async fn make_home(door: &Door, id: &str) -> Result<(), ApiError> {
    let in_use = life::enter(&door.app, id).await?;
    let make = move || Ok(in_use.agent()?.mkdir(HOME, None, true)?);
    door.app.blocking.run(Work::Short, make).await
}

/// The query of a listing.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Wanted {
    metadata: Option<String>,
    state: Option<String>,
    template: Option<String>,
    order: Option<String>,
    limit: Option<usize>,
    next_token: Option<usize>,
}

impl Wanted {
    fn fits(&self, row: &SandboxRow, metadata: &[(String, String)]) -> bool {
        let state = if row.state == SandboxState::Running { "running" } else { "paused" };
        let states = self.state.as_deref().unwrap_or("running,paused");
        let template = self.template.as_deref().map(template_of);
        row.state != SandboxState::Failed
            && states.split(',').any(|wanted| wanted == state)
            && template.is_none_or(|wanted| wanted == row.template)
            && metadata.iter().all(|(name, value)| row.metadata.get(name) == Some(value))
    }
}

/// Answers with a page of entries, and where the next one begins.
pub fn page(entries: Vec<Value>, from: Option<usize>, limit: Option<usize>) -> Response {
    let from = from.unwrap_or(0).min(entries.len());
    let limit = limit.unwrap_or(MAX_PAGE).clamp(1, MAX_PAGE);
    let more = entries.len() - from > limit;
    let entries: Vec<_> = entries.into_iter().skip(from).take(limit).collect();
    let mut response = axum::Json(entries).into_response();
    if more {
        let name = HeaderName::from_static("x-next-token");
        response.headers_mut().insert(name, HeaderValue::from(from + limit));
    }
    response
}

/// `GET /sandboxes`
pub async fn list(
    State(door): State<Arc<Door>>,
    Checked(Queried(wanted)): Checked<Queried<Wanted>>,
) -> Result<Response, Refused> {
    // The names and values are encoded once more within their pairs.
    let pairs = form::urlencoded(wanted.metadata.as_deref().unwrap_or_default().as_bytes())?;
    let plain = |text: String| {
        let decoded = form::urlencoded(text.replace('+', "%2B").as_bytes()).ok();
        let first = decoded.and_then(|pairs| pairs.into_iter().next());
        first.filter(|_| !text.contains(['&', '='])).map_or(text, |(name, _)| name)
    };
    let pairs: Vec<_> =
        pairs.into_iter().map(|(name, value)| (plain(name), plain(value))).collect();
    let mut rows: Vec<_> = door.app.list().iter().map(|entry| entry.row()).collect();
    rows.retain(|row| wanted.fits(row, &pairs));
    if wanted.order.as_deref() == Some("asc") {
        rows.reverse();
    }
    Ok(page(rows.iter().map(shape).collect(), wanted.next_token, wanted.limit))
}

/// `GET /sandboxes/{id}`
pub async fn get(
    State(door): State<Arc<Door>>,
    Checked(Id(id)): Checked<Id>,
) -> Result<axum::Json<Value>, Refused> {
    let row = door.app.find(&id)?.row();
    let mut value = shape(&row);
    value["envdAccessToken"] = json!(door.app.key.token(&row.id));
    value["allowInternetAccess"] = json!(row.egress.is_some());
    let on_timeout = if row.persistent { "pause" } else { "kill" };
    value["lifecycle"] = json!({ "autoResume": true, "onTimeout": on_timeout });
    Ok(axum::Json(value))
}

/// `DELETE /sandboxes/{id}`
pub async fn delete(
    State(door): State<Arc<Door>>,
    owner: Owner,
    Checked(Id(id)): Checked<Id>,
) -> Result<StatusCode, Refused> {
    if door.app.has_ended(&id) {
        return Err(ApiError::not_found(format!("sandbox '{id}' not found")).into());
    }
    Ok(sandboxes::delete(State(Arc::clone(&door.app)), owner, Id(id)).await?)
}

/// The body of a request about the time to live.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Time {
    timeout: Option<u64>,
    duration: Option<u64>,
    memory: Option<bool>,
    count: Option<usize>,
}

async fn set_time(door: &Door, owner: &str, id: &str, ttl: u64) -> Result<SandboxRow, ApiError> {
    let (app, of) = (Arc::clone(&door.app), id.to_owned());
    let change = async move { lifecycle::set(&app, &of, Some(ttl.max(1)), None).await };
    let outcome = to_the_end(change).await;
    door.app.audit.write(&Act::new("lifecycle", owner, id).outcome(&outcome));
    outcome
}

/// `POST /sandboxes/{id}/timeout`
pub async fn timeout(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Checked(Id(id)): Checked<Id>,
    CheckedJson(body): CheckedJson<Time>,
) -> Result<StatusCode, Refused> {
    let ttl = body.timeout.ok_or_else(|| ApiError::bad_request("timeout: give seconds"))?;
    set_time(&door, &owner, &id, ttl).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns whether a sandbox would end sooner than in that many seconds.
fn is_short(row: &SandboxRow, ttl: u64) -> bool {
    let at = clock::now_ms().saturating_add(ttl.saturating_mul(1000));
    row.expires_ms.is_some_and(|expires| expires < at)
}

/// `POST /sandboxes/{id}/refreshes`
pub async fn refresh(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Checked(Id(id)): Checked<Id>,
    CheckedJson(body): CheckedJson<Time>,
) -> Result<StatusCode, Refused> {
    let ttl = body.duration.unwrap_or(60);
    if is_short(&door.app.find(&id)?.row(), ttl) {
        set_time(&door, &owner, &id, ttl).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/pause`
pub async fn pause(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Checked(Id(id)): Checked<Id>,
    CheckedJson(body): CheckedJson<Time>,
) -> Result<StatusCode, Refused> {
    let entry = door.app.find(&id)?;
    if body.memory == Some(false) {
        let message = "memory: a paused sandbox always keeps its memory";
        return Err(ApiError::not_implemented(message).into());
    }
    if entry.row().state == SandboxState::Hibernated {
        return Err(ApiError::conflict("the sandbox is paused").into());
    }
    let begun = Instant::now();
    let shared = Arc::clone(&door.app);
    let outcome = to_the_end(async move { life::hibernate(&shared, &entry).await }).await;
    door.app.audit.write(&Act::new("hibernate", &owner, &id).since(begun).outcome(&outcome));
    outcome?;
    Ok(StatusCode::NO_CONTENT)
}

/// Wakes a sandbox that is paused in whichever way; returns whether it was.
async fn resumed(door: &Door, entry: &Arc<Entry>) -> Result<bool, ApiError> {
    let state = entry.lock().row.state;
    let (app, woken) = (Arc::clone(&door.app), Arc::clone(entry));
    match state {
        SandboxState::Running => Ok(false),
        SandboxState::Paused => {
            let id = Id(entry.row().id);
            let owner = Owner(entry.row().owner);
            crate::resources::pause::resume(State(app), owner, id).await.map(|_| true)
        }
        _ => to_the_end(async move { life::wake(&app, &woken).await }).await.map(|()| true),
    }
}

/// `POST /sandboxes/{id}/connect`
pub async fn connect(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Checked(Id(id)): Checked<Id>,
    headers: HeaderMap,
    CheckedJson(body): CheckedJson<Time>,
) -> Result<Response, Refused> {
    let entry = door.app.find(&id)?;
    let begun = Instant::now();
    let outcome = resumed(&door, &entry).await;
    door.app.audit.write(&Act::new("wake", &owner, &id).since(begun).outcome(&outcome));
    let woken = outcome?;
    // A sandbox that runs is never given less time by a client that joins.
    let ttl = body.timeout.unwrap_or(DEFAULT_TTL_S);
    let row = match entry.row() {
        row if woken && row.expires_ms.is_some() || is_short(&row, ttl) => {
            set_time(&door, &owner, &id, ttl).await?
        }
        row => row,
    };
    let status = if woken { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, axum::Json(opened(&door, &headers, &row))).into_response())
}

/// `POST /sandboxes/{id}/fork`
pub async fn fork(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Checked(Id(id)): Checked<Id>,
    headers: HeaderMap,
    CheckedJson(body): CheckedJson<Time>,
) -> Result<Response, Refused> {
    let count = body.count.unwrap_or(1);
    if !(1..=MAX_CHILDREN).contains(&count) {
        let message = format!("count: use a number from 1 to {MAX_CHILDREN}");
        return Err(ApiError::bad_request(message).into());
    }
    let metadata = door.app.find(&id)?.row().metadata;
    let begun = Instant::now();
    let (app, of, by) = (Arc::clone(&door.app), id.clone(), owner.clone());
    let work = async move { life::fork(&app, &of, &by, count, metadata, None).await };
    let outcome = to_the_end(work).await;
    door.app.audit.write(&Act::new("fork", &owner, &id).since(begun).outcome(&outcome));
    let mut forks = Vec::new();
    for row in outcome? {
        let ttl = body.timeout.unwrap_or(DEFAULT_TTL_S);
        forks.push(match set_time(&door, &owner, &row.id, ttl).await {
            Ok(row) => json!({ "sandbox": opened(&door, &headers, &row) }),
            Err(error) => {
                let error = json!({ "code": error.status.as_u16(), "message": error.message });
                json!({ "error": error })
            }
        });
    }
    Ok((StatusCode::CREATED, axum::Json(forks)).into_response())
}

/// `GET /health` of a sandbox, which does not wake one that is paused.
pub async fn health(State(door): State<Arc<Door>>, Target(id): Target) -> Response {
    match door.app.find(&id).map(|entry| entry.row().state) {
        Ok(SandboxState::Running) => StatusCode::NO_CONTENT.into_response(),
        _ => gone(),
    }
}

/// `GET /envs` of a sandbox.
pub async fn envs(
    State(door): State<Arc<Door>>,
    Target(id): Target,
) -> Result<axum::Json<Value>, Refused> {
    Ok(axum::Json(json!(door.app.find(&id)?.row().env)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_templates_are_mapped() {
        for (theirs, ours) in [
            ("base", "base"),
            ("code-interpreter-v1", "code-interpreter"),
            ("code-interpreter-v1:latest", "code-interpreter"),
            ("code-interpreter", "code-interpreter"),
            ("mine", "mine"),
        ] {
            assert_eq!(template_of(theirs), ours);
        }
    }

    #[test]
    fn create_without_a_time_has_five_minutes() {
        let body = json!({ "templateID": "base", "envVars": {}, "metadata": { "a": "b" } });
        let create: Create = serde_json::from_value(body).unwrap();
        let request = create.request("me".to_owned()).unwrap();
        assert_eq!((request.ttl_s, request.persistent), (Some(DEFAULT_TTL_S), false));
        assert_eq!(request.source, life::Source::Template("base".to_owned()));
        let id = ids::new_id().unwrap();
        let body = json!({ "templateID": id, "autoPause": true, "timeout": 60 });
        let create: Create = serde_json::from_value(body).unwrap();
        let request = create.request("me".to_owned()).unwrap();
        assert_eq!((request.ttl_s, request.persistent), (Some(60), true));
        assert_eq!(request.source, life::Source::Snapshot(id));
        let body = json!({ "templateID": "base", "mcp": { "x": {} } });
        let create: Create = serde_json::from_value(body).unwrap();
        assert_eq!(create.request("me".to_owned()).unwrap_err().status, 501);
    }

    #[test]
    fn listing_is_filtered_and_paged() {
        let row = SandboxRow { template: "base".to_owned(), ..SandboxRow::default() };
        let wanted = |state: &str| Wanted { state: Some(state.to_owned()), ..Wanted::default() };
        assert!(wanted("running").fits(&row, &[]) && !wanted("paused").fits(&row, &[]));
        assert!(!wanted("running").fits(&row, &[("k".to_owned(), "v".to_owned())]));
        let response = page(vec![json!(1), json!(2), json!(3)], Some(1), Some(1));
        assert_eq!(response.headers()["x-next-token"], "2");
        let response = page(vec![json!(1)], Some(9), None);
        assert!(!response.headers().contains_key("x-next-token"));
    }
}
