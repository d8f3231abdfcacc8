//! `/files`: contents of files, whole or as a form, in both directions.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::Response;
use bytes::Bytes;
use pvmm::agent::{Agent, FileWriteOptions, FileWriter};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::audit::Act;
use crate::blocking::Work;
use crate::error::ApiError;
use crate::extract::{Id, Owner, Queried};
use crate::form::{Encoding, FormEvent, Multipart};
use crate::life::enter;
use crate::resources::files::{self, At};

use super::accounts::{Account, user_of};
use super::error::{Checked, Refused};
use super::state::{Door, Target};

/// The chunks that wait for the guest.
const QUEUE: usize = 16;
/// The most files of one form.
const MAX_FILES: usize = 10_000;
/// The most bytes of one form.
const MAX_BYTES: u64 = 4 << 30;

/// The query of a request.
#[derive(Debug, Default, Deserialize)]
pub struct Wanted {
    path: Option<String>,
    username: Option<String>,
}

/// Returns the account of a request. Root needs no look into the guest.
async fn account(
    door: &Door,
    id: &str,
    wanted: &Wanted,
    headers: &HeaderMap,
) -> Result<Account, ApiError> {
    let user = wanted.username.clone().or_else(|| user_of(headers));
    let in_use = enter(&door.app, id).await?;
    let find = move || Account::find(&in_use.agent()?, user.as_deref());
    door.app.blocking.run(Work::Short, find).await
}

/// `GET /files`
pub async fn read(
    State(door): State<Arc<Door>>,
    owner: Owner,
    Target(id): Target,
    Checked(Queried(wanted)): Checked<Queried<Wanted>>,
    headers: HeaderMap,
) -> Result<Response, Refused> {
    let path = wanted.path.as_deref().unwrap_or_default();
    let path = account(&door, &id, &wanted, &headers).await?.absolute(path);
    let app = State(Arc::clone(&door.app));
    Ok(files::read(app, owner, Id(id), Queried(At::of(path))).await?)
}

fn options(account: &Account) -> FileWriteOptions {
    let owner = (!account.is_root()).then_some(account.owner);
    FileWriteOptions { parents: true, owner, ..FileWriteOptions::default() }
}

fn written(path: &str) -> Value {
    let name = path.rsplit('/').next().unwrap_or_default();
    json!({ "name": name, "type": "file", "path": path })
}

/// `POST /files`
pub async fn write(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Target(id): Target,
    Checked(Queried(wanted)): Checked<Queried<Wanted>>,
    headers: HeaderMap,
    body: Body,
) -> Result<axum::Json<Value>, Refused> {
    let has = |name: &str| headers.keys().any(|key| key.as_str().starts_with(name));
    if has("x-metadata-") {
        let message = "metadata of files is not kept here: write the file without it";
        return Err(ApiError::not_implemented(message).into());
    }
    if has(header::CONTENT_ENCODING.as_str()) {
        let message = "compressed files are not taken: send the file as it is";
        return Err(ApiError::not_implemented(message).into());
    }
    let account = account(&door, &id, &wanted, &headers).await?;
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let written = match kind.and_then(Encoding::of) {
        Some(Encoding::Multipart(boundary)) => {
            let form = Form { account, boundary, path: wanted.path };
            form.store(&door, &owner, &id, body).await?
        }
        _ => {
            let path = wanted.path.filter(|path| !path.is_empty());
            let path = path.ok_or_else(|| ApiError::bad_request("path: name a file"))?;
            let path = account.absolute(&path);
            let app = &door.app;
            files::store(app, &owner, &id, &path, options(&account), body).await?;
            vec![written(&path)]
        }
    };
    Ok(axum::Json(Value::Array(written)))
}

/// A form with files.
struct Form {
    account: Account,
    boundary: String,
    /// The path of the only file. Several files have theirs as their names.
    path: Option<String>,
}

impl Form {
    async fn store(
        self,
        door: &Door,
        owner: &str,
        id: &str,
        body: Body,
    ) -> Result<Vec<Value>, ApiError> {
        let begun = Instant::now();
        let in_use = enter(&door.app, id).await?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        let work = move || self.receive(&in_use.agent()?, receiver);
        let work = door.app.blocking.run(Work::Long, work);
        let (outcome, ()) = tokio::join!(work, files::pass_on(body, sender));
        let paths = outcome.as_ref().map(|(paths, _)| paths.join(" ")).unwrap_or_default();
        let bytes = outcome.as_ref().map_or(0, |(_, bytes)| *bytes);
        let act = Act::new("write_file", owner, id).what(&paths).bytes(bytes).since(begun);
        door.app.audit.write(&act.outcome(&outcome));
        outcome.map(|(paths, _)| paths.iter().map(|path| written(path)).collect())
    }

    /// Writes the files of a form; returns their paths and the number of bytes.
    fn receive(
        &self,
        agent: &Agent,
        mut chunks: mpsc::Receiver<Result<Bytes, ApiError>>,
    ) -> Result<(Vec<String>, u64), ApiError> {
        let (mut form, mut paths, mut bytes) = (Multipart::new(&self.boundary), Vec::new(), 0u64);
        let mut open: Option<FileWriter> = None;
        while let Some(chunk) = chunks.blocking_recv() {
            form.push(&chunk?)?;
            while let Some(event) = form.next_event() {
                match event {
                    FormEvent::Part { name, file } => {
                        let path = self.path_of(&name, file)?;
                        if paths.len() >= MAX_FILES {
                            return Err(ApiError::too_large("the form has too many files"));
                        }
                        open = Some(agent.open_write(&path, &options(&self.account))?);
                        paths.push(path);
                    }
                    FormEvent::Data(data) => {
                        bytes += data.len() as u64;
                        if bytes > MAX_BYTES {
                            return Err(ApiError::too_large("the files are longer than 4 GiB"));
                        }
                        // A failed write has its reason in the outcome of the file.
                        if let Some(writer) = &mut open
                            && writer.write_all(&data).is_err()
                        {
                            finish(&mut open)?;
                        }
                    }
                    FormEvent::End => finish(&mut open)?,
                }
            }
        }
        if !form.is_over() || paths.is_empty() {
            return Err(ApiError::bad_request("the body is not a form with files"));
        }
        Ok((paths, bytes))
    }

    fn path_of(&self, name: &str, file: Option<String>) -> Result<String, ApiError> {
        let path = self.path.clone().filter(|path| !path.is_empty()).or(file);
        let path = path.filter(|path| name == "file" && !path.is_empty());
        let path =
            path.ok_or_else(|| ApiError::bad_request("the form has a part without a file"))?;
        Ok(self.account.absolute(&path))
    }
}

fn finish(open: &mut Option<FileWriter>) -> Result<(), ApiError> {
    match open.take() {
        Some(writer) => Ok(writer.finish().map(drop)?),
        None => Ok(()),
    }
}
