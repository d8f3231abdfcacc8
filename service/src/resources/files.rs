//! `/v1/sandboxes/{id}/fs`: files of the guest, read and written as streams.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body_util::BodyExt;
use pvmm::agent::{FileKind, FileReader, FileWriteOptions, Metadata};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::app::App;
use crate::audit::Act;
use crate::blocking::Work;
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner, Queried};
use crate::life::{InUse, enter};
use crate::sse::{self, Chunks};

/// The largest file that is written in one request.
const MAX_FILE: u64 = 4 << 30;
/// The most bytes of a directory's listing.
const MAX_LISTING: u64 = 16 << 20;
/// How long a client may pause within a file that it sends.
const STALL: Duration = Duration::from_secs(60);
/// The most of a refused body that is read and dropped.
const MAX_DROPPED: usize = 64 << 20;
/// The chunks that wait for the guest.
const QUEUE: usize = 16;
const CHUNK: usize = 256 << 10;

/// The query of a request about a path.
#[derive(Debug, Deserialize)]
pub struct At {
    path: String,
    #[serde(default)]
    recursive: Option<String>,
}

impl At {
    /// Builds the query about a path.
    pub fn of(path: String) -> Self {
        Self { path, recursive: None }
    }
}

/// The query of a listing.
#[derive(Debug, Deserialize)]
pub struct Listed {
    #[serde(default = "root")]
    path: String,
}

fn root() -> String {
    "/".to_owned()
}

/// The body of a move.
#[derive(Debug, Deserialize)]
pub struct Move {
    from: String,
    to: String,
}

/// Writes a file's metadata as clients read it.
fn entry(name: &str, path: &str, metadata: &Metadata) -> Value {
    json!({
        "name": name,
        "path": path,
        // A link to a directory is no directory, so that a walk does not loop.
        "is_dir": metadata.kind == FileKind::Directory,
        "size": metadata.size,
        "mode": format!("{:04o}", metadata.mode),
        "mtime": metadata.mtime_s,
    })
}

fn name_of(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or_default()
}

/// Sends a file in chunks. A failure cuts the answer short.
fn send(mut reader: FileReader, chunks: &Chunks) -> u64 {
    let mut total = 0;
    loop {
        let mut buffer = vec![0; CHUNK];
        let item = match reader.read(&mut buffer) {
            Ok(0) => return total,
            Ok(count) => {
                total += count as u64;
                buffer.truncate(count);
                Ok(Bytes::from(buffer))
            }
            Err(error) => Err(error),
        };
        let failed = item.is_err();
        if chunks.blocking_send(item).is_err() || failed {
            return total;
        }
    }
}

/// `GET /v1/sandboxes/{id}/fs`
pub async fn read(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Queried(at): Queried<At>,
) -> Result<Response, ApiError> {
    let begun = Instant::now();
    let in_use = enter(&app, &id).await?;
    let path = at.path.clone();
    let open = move || Ok((in_use.agent()?.open_read(&path, None)?, in_use));
    let opened = app.blocking.run(Work::Short, open).await;
    let (reader, in_use) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            let act = Act::new("read_file", &owner, &id).what(&at.path);
            app.audit.write(&act.outcome(&Err::<(), _>(error.clone())));
            return Err(error);
        }
    };
    let (chunks, body) = sse::chunks();
    let shared = Arc::clone(&app);
    let work = move || {
        let total = send(reader, &chunks);
        let act = Act::new("read_file", &owner, &id).what(&at.path).bytes(total);
        shared.audit.write(&act.since(begun));
        drop(in_use);
    };
    app.blocking.start(Work::Long, work).await?;
    let octets = HeaderValue::from_static("application/octet-stream");
    Ok(([(header::CONTENT_TYPE, octets)], body).into_response())
}

/// Writes the chunks to a file of the guest. The file appears whole at the end; a body that is cut
/// short leaves the old one.
fn receive(
    in_use: &InUse,
    path: &str,
    options: &FileWriteOptions,
    mut chunks: mpsc::Receiver<Result<Bytes, ApiError>>,
) -> Result<u64, ApiError> {
    let agent = in_use.agent()?;
    let mut writer = agent.open_write(path, options)?;
    let mut total = 0u64;
    while let Some(chunk) = chunks.blocking_recv() {
        let chunk = chunk?;
        total += chunk.len() as u64;
        if total > MAX_FILE {
            return Err(ApiError::too_large("the file is longer than 4 GiB"));
        }
        if writer.write_all(&chunk).is_err() {
            break;
        }
    }
    // A failed write has its reason in the outcome of the file.
    Ok(writer.finish()?)
}

/// Passes the body on, chunk by chunk, until it ends or fails. The rest of a body that the guest
/// refuses is read and dropped, up to a limit: clients read the answer only when all is sent.
pub async fn pass_on(body: Body, sender: mpsc::Sender<Result<Bytes, ApiError>>) {
    let (mut body, mut dropped) = (body, 0);
    while dropped < MAX_DROPPED {
        let item = match tokio::time::timeout(STALL, body.frame()).await {
            Ok(None) => return,
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(bytes) => Ok(bytes),
                Err(_) => continue,
            },
            Ok(Some(Err(_))) => Err(ApiError::bad_request("the body was cut short")),
            Err(_) => Err(ApiError::bad_request("the body took too long")),
        };
        let (failed, length) = (item.is_err(), item.as_ref().map_or(0, Bytes::len));
        if sender.send(item).await.is_err() {
            dropped += length;
        }
        if failed {
            return;
        }
    }
}

/// `PUT /v1/sandboxes/{id}/fs`
pub async fn write(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Queried(at): Queried<At>,
    body: Body,
) -> Result<axum::Json<Value>, ApiError> {
    let options = FileWriteOptions { parents: true, ..FileWriteOptions::default() };
    let bytes = store(&app, &owner, &id, &at.path, options, body).await?;
    Ok(axum::Json(json!({ "path": at.path, "bytes": bytes })))
}

/// Writes a body to a file of the guest, and returns the number of its bytes.
pub async fn store(
    app: &Arc<App>,
    owner: &str,
    id: &str,
    path: &str,
    options: FileWriteOptions,
    body: Body,
) -> Result<u64, ApiError> {
    let begun = Instant::now();
    let in_use = enter(app, id).await?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    let to = path.to_owned();
    let work = app.blocking.run(Work::Long, move || receive(&in_use, &to, &options, receiver));
    let (outcome, ()) = tokio::join!(work, pass_on(body, sender));
    let bytes = outcome.as_ref().copied().unwrap_or(0);
    let act = Act::new("write_file", owner, id).what(path).bytes(bytes);
    app.audit.write(&act.since(begun).outcome(&outcome));
    outcome
}

/// `GET /v1/sandboxes/{id}/fs/dir`
pub async fn list(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
    Queried(at): Queried<Listed>,
) -> Result<axum::Json<Value>, ApiError> {
    let in_use = enter(&app, &id).await?;
    let work = move || {
        let entries = in_use.agent()?.list_within(&at.path, MAX_LISTING)?;
        let parent = at.path.trim_end_matches('/');
        let shape = |found: &pvmm::agent::DirEntry| {
            let name = String::from_utf8_lossy(&found.name);
            entry(&name, &format!("{parent}/{name}"), &found.metadata)
        };
        Ok(entries.iter().map(shape).collect::<Vec<_>>())
    };
    let entries = app.blocking.run(Work::Long, work).await?;
    Ok(axum::Json(json!({ "entries": entries })))
}

/// `GET /v1/sandboxes/{id}/fs/stat`
pub async fn stat(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
    Queried(at): Queried<At>,
) -> Result<axum::Json<Value>, ApiError> {
    let in_use = enter(&app, &id).await?;
    let work = move || {
        let metadata = in_use.agent()?.stat(&at.path, true)?;
        Ok(entry(name_of(&at.path), &at.path, &metadata))
    };
    Ok(axum::Json(app.blocking.run(Work::Short, work).await?))
}

/// `DELETE /v1/sandboxes/{id}/fs`
pub async fn remove(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Queried(at): Queried<At>,
) -> Result<StatusCode, ApiError> {
    let in_use = enter(&app, &id).await?;
    let recursive = matches!(at.recursive.as_deref(), Some("true" | "1"));
    let path = at.path.clone();
    let work = move || Ok(in_use.agent()?.remove(&path, recursive)?);
    let outcome = app.blocking.run(Work::Long, work).await;
    app.audit.write(&Act::new("remove_file", &owner, &id).what(&at.path).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}

/// `POST /v1/sandboxes/{id}/fs/mkdir`
pub async fn mkdir(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Queried(at): Queried<At>,
) -> Result<StatusCode, ApiError> {
    let in_use = enter(&app, &id).await?;
    let path = at.path.clone();
    let work = move || Ok(in_use.agent()?.mkdir(&path, None, true)?);
    let outcome = app.blocking.run(Work::Short, work).await;
    app.audit.write(&Act::new("mkdir", &owner, &id).what(&at.path).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}

/// `POST /v1/sandboxes/{id}/fs/move`
pub async fn rename(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Move>,
) -> Result<StatusCode, ApiError> {
    let in_use = enter(&app, &id).await?;
    let what = format!("{} -> {}", body.from, body.to);
    let work = move || Ok(in_use.agent()?.rename(&body.from, &body.to)?);
    let outcome = app.blocking.run(Work::Short, work).await;
    app.audit.write(&Act::new("move_file", &owner, &id).what(&what).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}
