//! `/v1/templates/build` and `/v1/templates/builds`: templates from archives and Dockerfiles.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::Response;
use pvmm_images::template;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::files::pass_on;
use super::logs::{Lines, Wanted};
use crate::app::App;
use crate::audit::Act;
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Id, Owner, Queried, shown};
use crate::form::Encoding;
use crate::ids;
use crate::life::{build_folder, build_log, build_sources, egress_of, start_build};
use crate::sse::{self, Events};
use crate::store::BuildRow;
use crate::upload::{self, Upload};

/// The most bytes of a build context; an archive may be larger.
const MAX_CONTEXT: u64 = 512 << 20;
/// The size that a client names if it does not care.
const DEFAULT_SIZE_MB: u64 = 1024;
/// The chunks of a body that wait for the disk.
const QUEUE: usize = 16;
/// How often a followed log is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

fn shape(row: &BuildRow) -> Value {
    json!({
        "id": row.id,
        "name": row.name,
        "status": row.status,
        "error": row.error,
        "started_at": clock::rfc3339(row.started_ms),
        "ended_at": row.ended_ms.map(clock::rfc3339),
        "size_mb": row.size_mb,
        "bytes": row.bytes,
        "image_ref": "",
    })
}

/// Reads the form of a build into its folder.
async fn take(app: &Arc<App>, id: &str, request: Request) -> Result<Upload, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let encoding = kind.and_then(Encoding::of).ok_or_else(|| {
        ApiError::bad_request("send a form: multipart/form-data or x-www-form-urlencoded")
    })?;
    let folder = build_sources(app, id).join("context");
    let (sender, receiver) = mpsc::channel(QUEUE);
    let receive = app.blocking.run(Work::Long, move || {
        fs::create_dir_all(&folder)?;
        upload::receive(&encoding, &folder, receiver)
    });
    let body: Body = request.into_body();
    let ((), upload) = tokio::join!(pass_on(body, sender), receive);
    upload
}

fn number(upload: &Upload, name: &str) -> Result<Option<u64>, ApiError> {
    let wrong = |_| ApiError::bad_request(format!("{name}: a whole number is expected"));
    upload.field(name).map(|text| text.trim().parse().map_err(wrong)).transpose()
}

/// Returns the arguments of the build that a form asks for.
fn words(
    upload: &Upload,
    sources: &Path,
    default_egress: &[String],
) -> Result<Vec<String>, ApiError> {
    for name in ["cpu", "memory_mb"] {
        number(upload, name)?;
    }
    let path = |path: &Path| path.display().to_string();
    let (context, rootfs) = (sources.join("context"), sources.join("context/rootfs"));
    if upload.field("image_ref").is_some() {
        let message = "image_ref: images are not downloaded; send a rootfs or a dockerfile";
        return Err(ApiError::bad_request(message));
    }
    let Some(dockerfile) = upload.field("dockerfile") else {
        if !rootfs.is_file() {
            let message = "the form has no source: send a rootfs or a dockerfile";
            return Err(ApiError::bad_request(message));
        }
        return Ok(vec!["--tar".to_owned(), path(&rootfs)]);
    };
    if upload.bytes > MAX_CONTEXT {
        return Err(ApiError::too_large("the context is longer than 512 MiB"));
    }
    let file = sources.join("Dockerfile");
    fs::write(&file, dockerfile)?;
    let mut words = vec!["--dockerfile".to_owned(), path(&file)];
    words.extend(["--context".to_owned(), path(&context)]);
    let policy = egress_of(default_egress)?.policy;
    words.extend(policy.allow.into_iter().flat_map(|rule| ["--allow".to_owned(), rule]));
    words.extend(policy.allow_host.into_iter().flat_map(|rule| ["--allow-host".to_owned(), rule]));
    Ok(words)
}

/// Takes a build in. Its place and its folder are given up by the caller if this fails.
async fn begin(app: &Arc<App>, id: &str, request: Request) -> Result<BuildRow, ApiError> {
    let upload = take(app, id, request).await?;
    let name = upload.field("name").unwrap_or_default().to_owned();
    template::check_name(&name).map_err(|_| {
        ApiError::bad_request(format!("name: '{}' is not a template name", shown(&name)))
    })?;
    if name == template::BASE {
        return Err(ApiError::conflict("template 'base' is built in"));
    }
    let size_mb = number(&upload, "size_mb")?.unwrap_or(DEFAULT_SIZE_MB);
    let (sources, rules) = (build_sources(app, id), app.options.default_egress.clone());
    let made = move || words(&upload, &sources, &rules);
    let mut words = app.blocking.run(Work::Short, made).await?;
    words.insert(0, name.clone());
    let row = BuildRow {
        id: id.to_owned(),
        name,
        status: "queued".to_owned(),
        started_ms: clock::now_ms(),
        size_mb,
        ..BuildRow::default()
    };
    app.store.put_build(&row)?;
    start_build(app, row.clone(), words);
    Ok(row)
}

/// `POST /v1/templates/build`
pub async fn build(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    request: Request,
) -> Result<(StatusCode, axum::Json<Value>), ApiError> {
    let id = ids::new_id()?;
    app.builds.admit(&id)?;
    let begun = begin(&app, &id, request).await;
    if begun.is_err() {
        app.builds.forget(&id);
        let _ = fs::remove_dir_all(build_folder(&app, &id));
    }
    let name = begun.as_ref().map_or("", |row| &row.name[..]).to_owned();
    app.audit.write(&Act::new("build_template", &owner, "").what(&name).outcome(&begun));
    Ok((StatusCode::ACCEPTED, axum::Json(shape(&begun?))))
}

/// `GET /v1/templates/builds`
pub async fn list(State(app): State<Arc<App>>, _: Owner) -> Result<axum::Json<Value>, ApiError> {
    let mut rows = app.store.builds()?;
    rows.sort_by_key(|row| std::cmp::Reverse(row.started_ms));
    Ok(axum::Json(rows.iter().map(shape).collect()))
}

fn find(app: &App, id: &str) -> Result<BuildRow, ApiError> {
    let row = app.store.build(id)?;
    row.ok_or_else(|| ApiError::not_found(format!("build '{id}' not found")))
}

/// `GET /v1/templates/builds/{id}`
pub async fn get(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
) -> Result<axum::Json<Value>, ApiError> {
    Ok(axum::Json(shape(&find(&app, &id)?)))
}

/// Sends the lines of a log, to its end if it is followed.
fn send(app: &App, id: &str, follow: bool, events: &Events) -> Result<(), ApiError> {
    let mut lines = Lines::default();
    let mut file = None;
    loop {
        // Looked at before reading, so that all that was printed before the end is sent.
        let ended = find(app, id)?.ended_ms.is_some();
        // There is no log before the build begins.
        file = file.or_else(|| fs::File::open(build_log(app, id)).ok());
        if let Some(file) = &mut file {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            let mut found = lines.push(&bytes);
            if ended || !follow {
                found.extend(lines.rest());
            }
            for line in found {
                if !events.line(&line) {
                    return Ok(());
                }
            }
        }
        if ended || !follow || events.is_closed() {
            return Ok(());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// `GET /v1/templates/builds/{id}/logs`
pub async fn logs(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
    Queried(wanted): Queried<Wanted>,
) -> Result<Response, ApiError> {
    let follow = wanted.follow()?;
    find(&app, &id)?;
    let (events, response) = sse::events();
    let shared = Arc::clone(&app);
    let work = move || {
        if let Err(error) = send(&shared, &id, follow, &events) {
            events.line(&error.message);
        }
        events.end();
    };
    app.blocking.start(Work::Long, work).await?;
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(fields: &[(&str, &str)]) -> Upload {
        let pair = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
        Upload { fields: fields.iter().map(pair).collect(), ..Upload::default() }
    }

    #[test]
    fn words_of_a_form_name_its_one_source() {
        let dir = tempfile::tempdir().unwrap();
        let build = |upload: &Upload, rules: &[String]| {
            words(upload, dir.path(), rules)
                .map(|words| words.join(" ").replace(dir.path().to_str().unwrap(), "D"))
        };
        let none = build(&of(&[("name", "a")]), &[]).unwrap_err();
        assert!(none.message.contains("no source"), "{}", none.message);
        let image = build(&of(&[("image_ref", "x:1")]), &[]).unwrap_err();
        assert!(image.message.contains("not downloaded"));
        assert_eq!(build(&of(&[("cpu", "x")]), &[]).unwrap_err().status, 400);
        let rules = ["pypi.org".to_owned()];
        let line = build(&of(&[("dockerfile", "FROM base")]), &rules).unwrap();
        let expected = "--dockerfile D/Dockerfile --context D/context --allow-host pypi.org";
        assert_eq!(line, expected);
        fs::create_dir(dir.path().join("context")).unwrap();
        fs::write(dir.path().join("context/rootfs"), "tar").unwrap();
        assert_eq!(build(&of(&[]), &[]).unwrap(), "--tar D/context/rootfs");
    }
}
