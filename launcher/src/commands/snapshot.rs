//! `pvmm snapshot` and `pvmm snapshots`: write a running VM to disk, and manage the snapshots
//! there.
//!
//! The VM is frozen only while it passes on its memory; this process writes the snapshot, with
//! progress, while the VM continues.

use std::path::Path;

use pvmm::snapshot::{Durability, Key, Manifest, SnapshotKind, WriteOptions};
use serde::Serialize;

use crate::cli::{Snapshot, Snapshots, SnapshotsVerb, SyncMode};
use crate::commands::fork::refuse;
use crate::commands::travel;
use crate::exit::{Failure, Outcome, io_text};
use crate::leftovers::Leftovers;
use crate::output::{self, Table};
use crate::progress::Counter;
use pvmm_sandbox::control;
use pvmm_sandbox::snapshots;
use pvmm_sandbox::vm_dir::{Base, now};

pub fn snapshot(args: Snapshot, quiet: bool) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    let dir = snapshots::new_place(&args.name)?;
    if !args.replace && dir.exists() {
        return Err(Failure::usage(format!("a snapshot '{}' exists already", args.name))
            .hint("choose another name, or use --replace"));
    }
    let key = args.key.as_deref().map(Key::read).transpose().map_err(|e| refuse(e.into()))?;
    let leftovers = Leftovers::watch()?;
    let template = if args.disk_only { control::freeze_disks(&vm)? } else { control::freeze(&vm)? };
    let mut counter = Counter::new(quiet, "writing the snapshot");
    let mut progress = |done, total| counter.tell(done, total);
    let mut begun = |folder: &Path| leftovers.note(folder);
    let options = WriteOptions {
        durability: if args.sync == SyncMode::None { Durability::None } else { Durability::Full },
        replace: args.replace,
        incremental: args.incremental,
        disk_only: args.disk_only,
        key: key.as_ref(),
        progress: Some(&mut progress),
        begun: Some(&mut begun),
    };
    let manifest = template.write(&dir, options).map_err(refuse)?;
    snapshots::remember(&dir);
    if args.json {
        output::json(&row(&args.name, &dir, &manifest))?
    } else {
        output::line(&args.name)?
    }
    Ok(0)
}

pub fn snapshots(args: Snapshots, quiet: bool) -> Outcome {
    match args.verb.unwrap_or(SnapshotsVerb::Ls { json: args.json }) {
        SnapshotsVerb::Ls { json } => list(json)?,
        SnapshotsVerb::Rm { names } => {
            for name in names {
                let dir = snapshots::place(&name)?;
                // A folder is removed only if it holds a snapshot, whatever the path.
                Manifest::read(&dir).map_err(refuse)?;
                std::fs::remove_dir_all(&dir).map_err(|error| {
                    Failure::fault(format!("cannot remove {}: {}", dir.display(), io_text(&error)))
                })?;
                output::line(&name)?;
            }
        }
        SnapshotsVerb::Push { name, flags, allow_files } => {
            travel::push_snapshot(&name, allow_files, &flags, quiet)?;
        }
        SnapshotsVerb::Pull { flags, replace, keep_policy } => {
            travel::pull_snapshot(&flags, replace, keep_policy, quiet)?;
        }
        SnapshotsVerb::Inspect { name } => {
            let manifest = Manifest::read(&snapshots::place(&name)?).map_err(refuse)?;
            output::json(&Inspected { kind: manifest.kind(), manifest: &manifest })?;
        }
    }
    Ok(0)
}

/// The manifest of a snapshot in the output of `inspect`, and its kind in a word.
#[derive(Serialize)]
struct Inspected<'a> {
    kind: SnapshotKind,
    #[serde(flatten)]
    manifest: &'a Manifest,
}

/// A snapshot in the `--json` output.
#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    id: &'a str,
    kind: SnapshotKind,
    created: u64,
    cpus: u32,
    memory_mib: u64,
    disk_bytes: u64,
    base: Option<&'a str>,
    path: String,
}

fn row<'a>(name: &'a str, dir: &std::path::Path, manifest: &'a Manifest) -> Row<'a> {
    Row {
        name,
        id: &manifest.id,
        kind: manifest.kind(),
        created: manifest.created,
        cpus: manifest.machine.vcpus,
        memory_mib: manifest.machine.memory_mib,
        disk_bytes: snapshots::disk_bytes(dir),
        base: manifest.memory.base.as_ref().map(|base| base.id.as_str()),
        path: dir.display().to_string(),
    }
}

fn list(json: bool) -> Result<(), Failure> {
    let found = snapshots::list()?;
    if json {
        let rows: Vec<_> = found.iter().map(|(name, dir, it)| row(name, dir, it)).collect();
        return Ok(output::json(&rows)?);
    }
    let mut table = Table::new(&["NAME", "KIND", "AGE", "CPUS", "MEMORY", "ON DISK", "BASE"]);
    for (name, dir, manifest) in &found {
        let row = row(name, dir, manifest);
        table.row(vec![
            name.clone(),
            row.kind.word().to_owned(),
            output::age(now().saturating_sub(row.created)),
            row.cpus.to_string(),
            output::bytes(row.memory_mib << 20),
            output::bytes(row.disk_bytes),
            row.base.map_or("-".to_owned(), |id| id.chars().take(12).collect()),
        ]);
    }
    Ok(table.print()?)
}
