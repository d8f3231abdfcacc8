//! Starts a sandbox from a template or a snapshot.
//!
//! The VM gets the sandbox's id in its name before the row is written. A server that dies in
//! between finds a VM without a row, and ends it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_sandbox::vm_dir::Egress;
use pvmm_sandbox::volumes::Volumes;
use pvmm_sandbox::{CreateOptions, Sandbox, VolumeMount};

use crate::app::App;
use crate::blocking::Work;
use crate::clock;
use crate::error::{ApiError, chain};
use crate::ids;
use crate::limits::Use;
use crate::metrics::Operation;
use crate::store::{SandboxRow, SnapshotRow, State, VolumeUse};

use super::end::end_vm;

/// The longest time to live: 30 days.
pub const MAX_TTL_S: u64 = 30 * 86_400;

/// The origin of a new sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A template, by its name.
    Template(String),
    /// A snapshot, by its id.
    Snapshot(String),
}

/// The properties of a new sandbox. Sizes that are not given are the template's.
#[derive(Clone, Debug)]
pub struct StartRequest {
    /// The prefix of the token.
    pub owner: String,
    /// The origin of the sandbox.
    pub source: Source,
    /// The number of vCPUs.
    pub cpus: Option<u32>,
    /// The guest memory in MiB.
    pub memory_mib: Option<u64>,
    /// The size of the disk in MiB.
    pub disk_mib: Option<u64>,
    /// Names and values of the client.
    pub metadata: BTreeMap<String, String>,
    /// The time to live in seconds.
    pub ttl_s: Option<u64>,
    /// Whether it hibernates instead of ending.
    pub persistent: bool,
    /// The volumes to mount.
    pub volumes: Vec<VolumeUse>,
    /// Rules for the network; `None` leaves that to the snapshot or the server.
    pub egress: Option<Vec<String>>,
}

/// Starts a sandbox and returns its row once its guest answers.
pub async fn start(app: &Arc<App>, request: StartRequest) -> Result<SandboxRow, ApiError> {
    app.metrics.timed(Operation::Create, started(app, request)).await
}

async fn started(app: &Arc<App>, request: StartRequest) -> Result<SandboxRow, ApiError> {
    let begun = Instant::now();
    let id = ids::new_id()?;
    let snapshot = match &request.source {
        Source::Template(_) => None,
        Source::Snapshot(id) => Some(find_snapshot(app, id)?),
    };
    let (row, mut options) = plan(app, id, request, snapshot)?;
    let wanted = Use { sandboxes: 1, memory_mib: row.memory_mib };
    let reservation = app.admission.reserve(&row.owner, app.used_by(&row.owner), wanted)?;
    require_free(app, &row.volumes)?;
    let wishes = row.volumes.clone();
    options.volumes = app.blocking.run(Work::Short, move || mounts(&wishes, false)).await?;
    let vm = launch(app, &row, options).await?;
    let row = SandboxRow {
        vm: Some(vm.id().to_owned()),
        boot_ms: begun.elapsed().as_millis() as u64,
        cpus: vm.record().cpus,
        memory_mib: vm.record().memory_mib,
        ..row
    };
    if let Err(error) = write_rows(app, vec![row.clone()]).await {
        let (sandboxes, vm) = (app.sandboxes.clone(), vm.clone());
        let _ = app.blocking.run(Work::Short, move || end_vm(&sandboxes, &vm)).await;
        return Err(error);
    }
    app.add(row.clone(), Some(vm));
    drop(reservation);
    Ok(row)
}

/// Writes rows in a thread of their own: the disk may take its time.
pub(super) async fn write_rows(app: &Arc<App>, rows: Vec<SandboxRow>) -> Result<(), ApiError> {
    let shared = Arc::clone(app);
    let write = move || Ok(shared.store.put_sandboxes(&rows.iter().collect::<Vec<_>>())?);
    app.blocking.run(Work::Short, write).await
}

/// Refuses a volume that a sandbox may write while another has it, also one that hibernates: its
/// guest remembers what it has read. The monitor's lock on the image knows running ones only.
fn require_free(app: &App, volumes: &[VolumeUse]) -> Result<(), ApiError> {
    for entry in app.list() {
        let row = entry.row();
        let clash = |ours: &&VolumeUse| {
            let same = |theirs: &VolumeUse| {
                theirs.name == ours.name && !(theirs.read_only && ours.read_only)
            };
            row.volumes.iter().any(same)
        };
        if let Some(volume) = volumes.iter().find(clash) {
            let message = format!("volume '{}' is in sandbox {}", volume.name, row.id);
            return Err(ApiError::conflict(message));
        }
    }
    Ok(())
}

fn find_snapshot(app: &App, id: &str) -> Result<SnapshotRow, ApiError> {
    let row = if ids::is_id(id) { app.store.snapshot(id)? } else { None };
    row.ok_or_else(|| ApiError::not_found("from_snapshot: snapshot not found"))
}

/// Returns the row of the new sandbox and the options of its VM.
fn plan(
    app: &App,
    id: String,
    request: StartRequest,
    snapshot: Option<SnapshotRow>,
) -> Result<(SandboxRow, CreateOptions), ApiError> {
    let template = match (&request.source, &snapshot) {
        (Source::Template(name), _) => name.clone(),
        (_, Some(snapshot)) => snapshot.template.clone(),
        (_, None) => return Err(ApiError::not_found("from_snapshot: snapshot not found")),
    };
    let mut options = CreateOptions::of(&template);
    if let Some(snapshot) = &snapshot {
        (options.cpus, options.memory_mib) = (snapshot.cpus, snapshot.memory_mib);
    }
    // A sandbox that goes on with the memory of another has its size.
    if snapshot.as_ref().is_none_or(|snapshot| snapshot.disk_only) {
        options.cpus = request.cpus.unwrap_or(options.cpus);
        options.memory_mib = request.memory_mib.unwrap_or(options.memory_mib);
    }
    options.disk_mib = request.disk_mib.unwrap_or(options.disk_mib);
    options.cpu = app.options.cpu.clone();
    let egress = rules(app, request.egress, snapshot.as_ref())?;
    options.egress = egress.as_deref().map(egress_of).transpose()?;
    options.name = Some(app.instance.vm_name(&id));
    // A persistent sandbox hibernates at that time, which only the server can do.
    options.ttl = request.ttl_s.filter(|_| !request.persistent).map(Duration::from_secs);
    let now = clock::now_ms();
    let row = SandboxRow {
        id,
        template,
        cpus: options.cpus,
        memory_mib: options.memory_mib,
        metadata: request.metadata,
        ttl_s: request.ttl_s,
        expires_ms: request.ttl_s.map(|ttl| now + ttl * 1000),
        persistent: request.persistent,
        state: State::Running,
        owner: request.owner,
        volumes: request.volumes,
        egress,
        created_ms: now,
        active_ms: now,
        boot_mode: match &snapshot {
            None => "fork",
            Some(snapshot) if snapshot.disk_only => "boot",
            Some(_) => "restore",
        }
        .to_owned(),
        from_snapshot: snapshot.map(|snapshot| snapshot.id),
        ..SandboxRow::default()
    };
    Ok((row, options))
}

/// Returns the rules of a new sandbox. A snapshot with memory either has a network card or not,
/// whatever is asked for.
fn rules(
    app: &App,
    asked: Option<Vec<String>>,
    snapshot: Option<&SnapshotRow>,
) -> Result<Option<Vec<String>>, ApiError> {
    let Some(snapshot) = snapshot else {
        let default = Some(app.options.default_egress.clone());
        return Ok(asked.or(default).filter(|rules| !rules.is_empty()));
    };
    match (&snapshot.egress, asked) {
        (None, Some(rules)) if snapshot.disk_only => Ok(Some(rules).filter(|it| !it.is_empty())),
        (None, Some(rules)) if !rules.is_empty() => {
            Err(ApiError::bad_request("egress_allowlist: the snapshot has no network card"))
        }
        (None, _) => Ok(None),
        (Some(_), Some(rules)) => Ok(Some(rules)),
        (Some(rules), None) => Ok(Some(rules.clone())),
    }
}

/// Starts the VM of a row. A template that is not warm is baked first.
async fn launch(
    app: &Arc<App>,
    row: &SandboxRow,
    options: CreateOptions,
) -> Result<Sandbox, ApiError> {
    let sandboxes = app.sandboxes.clone();
    if let Some(snapshot) = &row.from_snapshot {
        let folder = app.snapshot_dir(snapshot);
        return app
            .blocking
            .run(Work::Start, move || Ok(sandboxes.restore(&folder, &options)?))
            .await;
    }
    let shape = options.shape();
    let (warm, checked) = (app.sandboxes.clone(), shape.clone());
    let is_warm = app.blocking.run(Work::Short, move || Ok(warm.is_warm(&checked))).await?;
    if !is_warm {
        app.bakes.bake(&shape).await?;
    }
    let created = app.blocking.run(Work::Start, move || Ok(sandboxes.create(&options)?)).await;
    prepare(app);
    created
}

/// Starts processes for the next sandboxes in the background.
pub fn prepare(app: &Arc<App>) {
    let (app, sandboxes) = (Arc::clone(app), app.sandboxes.clone());
    tokio::spawn(async move {
        if let Err(error) = app.blocking.run(Work::Short, move || Ok(sandboxes.prepare()?)).await {
            log::warn!("no process waits for the next sandbox: {}", error.message);
        }
    });
}

/// Returns the network of a sandbox with these rules. A rule begins with an address or a name; `*`
/// allows every public address.
pub fn egress_of(rules: &[String]) -> Result<Egress, ApiError> {
    Egress::allowing(rules)
        .map_err(|error| ApiError::bad_request(format!("egress_allowlist: {}", chain(&error))))
}

/// Returns the mounts of a sandbox's volumes; `mounted` says that its guest has them already.
/// Waits.
pub fn mounts(volumes: &[VolumeUse], mounted: bool) -> Result<Vec<VolumeMount>, ApiError> {
    if volumes.is_empty() {
        return Ok(Vec::new());
    }
    let known = Volumes::open()?;
    let mount = |used: &VolumeUse| {
        let (image, at) = (known.get(&used.name)?.image, used.at.clone());
        Ok(VolumeMount { image, at, read_only: used.read_only, mounted })
    };
    volumes.iter().map(mount).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_rule_is_refused_by_the_name_of_the_field() {
        let error = egress_of(&["no spaces".to_owned()]).unwrap_err();
        assert_eq!(error.status.as_u16(), 400);
        assert!(error.message.starts_with("egress_allowlist: "), "{}", error.message);
    }
}
