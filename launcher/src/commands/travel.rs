//! `pvmm template push` and `pull`, `pvmm snapshots push` and `pull`: to and from a store.
//!
//! The `travel` crate moves chunks; this file says which files go, and where files that came go.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pvmm_images::part::Part;
use pvmm_images::{Cache, Template};
use pvmm_travel::{Address, Kind, Moved, Pull, Seal, Store, TravelError, push};

use super::template_source;
use crate::cli::{PullFlags, PushFlags};
use crate::exit::Failure;
use crate::interrupt::interruptible;
use crate::output;
use crate::progress::Steps;
use pvmm_sandbox::warm::Shape;
use pvmm_sandbox::{FailureKind, hibernated, prepare, snapshots, travel};

/// The folder of unfinished pulls in the cache.
const PULLS: &str = "pulls";

pub fn push_template(
    cache: &Cache,
    name: &str,
    flags: &PushFlags,
    quiet: bool,
) -> Result<(), Failure> {
    let template = Template::find(cache, name).map_err(prepare::refuse)?;
    send(Kind::Template, name, template.parts().map_err(prepare::refuse)?, flags, quiet)
}

pub fn pull_template(cache: &Cache, flags: &PullFlags, quiet: bool) -> Result<(), Failure> {
    let moved = interruptible(|| {
        let mut steps = Steps::new(quiet);
        let pull = open(Kind::Template, flags, &mut steps)?;
        let name = pull.manifest.name.clone();
        let _lock = cache.lock(PULLS, &name, &mut steps).map_err(prepare::refuse)?;
        let here = Template::find(cache, &name).ok().and_then(|it| it.parts().ok());
        if let Some(parts) = &here
            && pull.is_there(parts, &mut steps).map_err(refuse)?
        {
            return Ok(pull.nothing_moved());
        }
        let pulls = cache.root().join(PULLS);
        let local = local(cache, here, false)?;
        let (folder, moved) = pull.fetch(&pulls, local, &mut steps).map_err(refuse)?;
        let adopted = Template::adopt(cache, &name, &folder, &mut steps);
        // Whole and refused, or in place: either way nothing of it is wanted any more.
        pull.clean(&pulls);
        adopted.map_err(prepare::refuse)?;
        Ok(moved)
    })?;
    if pvmm::kvm::host::probe().is_ok() {
        interruptible(|| template_source::bake(&Shape::of(&moved.name)))?;
    }
    show(&moved, "fetched", flags.json, quiet)
}

pub fn push_snapshot(
    name: &str,
    allowed: Vec<PathBuf>,
    flags: &PushFlags,
    quiet: bool,
) -> Result<(), Failure> {
    let place = snapshots::place(name)?;
    let asleep = if name.contains('/') { None } else { hibernated::find(name).ok() };
    let (kind, parts) = match (place.exists(), asleep) {
        (true, Some(_)) => {
            let message = format!("'{name}' is a snapshot and a hibernated VM");
            return Err(
                Failure::usage(message).hint("give the snapshot's path, or the id that the VM had")
            );
        }
        (false, Some(vm)) => (Kind::Hibernated, travel::hibernated_parts(&vm)?),
        (_, None) => {
            let roots = Some(snapshots::roots(allowed));
            (Kind::Snapshot, travel::snapshot_parts(&place, &roots)?)
        }
    };
    let name = place.file_name().and_then(|name| name.to_str()).unwrap_or(name);
    send(kind, name, parts, flags, quiet)
}

pub fn pull_snapshot(
    flags: &PullFlags,
    replace: bool,
    keep_policy: bool,
    quiet: bool,
) -> Result<(), Failure> {
    let cache = Cache::open().map_err(prepare::refuse)?;
    let moved = interruptible(|| {
        let mut steps = Steps::new(quiet);
        let pull = open(Kind::Snapshot, flags, &mut steps)?;
        let name = pull.manifest.name.clone();
        let lock = format!("snapshot-{name}");
        let _lock = cache.lock(PULLS, &lock, &mut steps).map_err(prepare::refuse)?;
        let here = here(pull.manifest.kind, &name)?;
        if let Some(parts) = &here
            && pull.is_there(parts, &mut steps).map_err(refuse)?
        {
            return Ok(pull.nothing_moved());
        }
        if pull.manifest.kind == Kind::Snapshot && !replace && snapshots::place(&name)?.exists() {
            return Err(travel::exists(&name));
        }
        let pulls = travel::pulls()?;
        let local = local(&cache, here, true)?;
        let (folder, moved) = pull.fetch(&pulls, local, &mut steps).map_err(refuse)?;
        let paths: Vec<_> = pull.manifest.files.iter().map(|file| file.path.clone()).collect();
        let adopted = match pull.manifest.kind {
            Kind::Hibernated => travel::adopt_hibernated(&folder, &paths, keep_policy).map(drop),
            _ => travel::adopt_snapshot(&folder, &paths, &name, replace).map(drop),
        };
        pull.clean(&pulls);
        adopted.map(|()| moved)
    })?;
    show(&moved, "fetched", flags.json, quiet)
}

/// Opens what has the name here already.
fn here(kind: Kind, name: &str) -> Result<Option<Vec<Part>>, Failure> {
    if kind == Kind::Hibernated {
        return Ok(hibernated::find(name).ok().and_then(|vm| travel::hibernated_parts(&vm).ok()));
    }
    Ok(snapshot_parts(&snapshots::place(name)?))
}

fn snapshot_parts(folder: &Path) -> Option<Vec<Part>> {
    travel::snapshot_parts(folder, &Some(snapshots::roots(Vec::new()))).ok()
}

/// Returns the files of this host that may have chunks of what is wanted, the likeliest first.
fn local(
    cache: &Cache,
    here: Option<Vec<Part>>,
    with_snapshots: bool,
) -> Result<Vec<Part>, Failure> {
    let mut parts = here.unwrap_or_default();
    let templates = Template::list(cache).map_err(prepare::refuse)?;
    parts.extend(templates.iter().filter_map(|template| template.parts().ok()).flatten());
    if with_snapshots {
        let others = snapshots::list()?;
        parts.extend(others.iter().filter_map(|(_, folder, _)| snapshot_parts(folder)).flatten());
    }
    Ok(parts)
}

fn send(
    kind: Kind,
    name: &str,
    parts: Vec<Part>,
    flags: &PushFlags,
    quiet: bool,
) -> Result<(), Failure> {
    let moved = interruptible(|| {
        let store = store(&flags.store, flags.key.as_deref())?;
        let mut steps = Steps::new(quiet);
        push(&store, kind, name, parts, flags.force, &mut steps).map_err(refuse)
    })?;
    show(&moved, "sent", flags.json, quiet)
}

fn open(kind: Kind, flags: &PullFlags, steps: &mut Steps) -> Result<Pull, Failure> {
    let address = Address::parse(&flags.from).map_err(refuse)?;
    let store = store(&address.store, flags.key.as_deref())?;
    Pull::open(&store, kind, &address, steps).map_err(refuse)
}

fn store(text: &str, key: Option<&Path>) -> Result<Arc<Store>, Failure> {
    let seal = key.map(Seal::read).transpose().map_err(refuse)?.unwrap_or_default();
    Ok(Arc::new(Store::open(text, seal).map_err(refuse)?))
}

fn show(moved: &Moved, verb: &str, json: bool, quiet: bool) -> Result<(), Failure> {
    if json {
        return Ok(output::json(moved)?);
    }
    let Moved { chunks, chunks_moved, bytes_moved, digest, .. } = moved;
    let bytes = output::bytes(*bytes_moved);
    let text = format!("{verb} {chunks_moved} of {chunks} chunks ({bytes}); sha256:{digest}");
    output::remark(quiet, &text);
    Ok(output::line(&moved.name)?)
}

fn refuse(error: TravelError) -> Failure {
    let message = prepare::chain(&error);
    let failure = if error.is_users() { Failure::usage(message) } else { Failure::fault(message) };
    match error {
        _ if error.is_full_disk() => failure.of_kind(FailureKind::DiskFull),
        TravelError::Missing { .. } => failure.of_kind(FailureKind::NotFound),
        TravelError::Denied { .. } => {
            failure.hint("set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION")
        }
        TravelError::Reach { .. } => failure.hint("AWS_ENDPOINT_URL says where the server is"),
        _ => failure,
    }
}
