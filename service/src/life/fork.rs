//! Forks a sandbox into children, all of one moment.
//!
//! Either all children exist afterwards, with rows, or none does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_sandbox::ForkOptions;

use crate::app::App;
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::ids;
use crate::limits::Use;
use crate::metrics::Operation;
use crate::store::{SandboxRow, State};

use super::end::end_vm;
use super::enter::enter;
use super::start::{MAX_TTL_S, write_rows};

/// The most children of one fork.
pub const MAX_CHILDREN: usize = 16;

/// The metadata in which clients find the parent of a child.
pub const PARENT_KEY: &str = "fork_parent_id";
/// The metadata in which clients find the tree of a child.
pub const TREE_KEY: &str = "fork_tree_id";
/// The metadata in which clients ask for a time to live until a child is promoted.
pub const EXPLORE_TTL_KEY: &str = "explore_ttl";

/// Forks a sandbox into `count` children, of one tree if `tree` is given, and returns their rows.
pub async fn fork(
    app: &Arc<App>,
    id: &str,
    owner: &str,
    count: usize,
    metadata: BTreeMap<String, String>,
    tree: Option<String>,
) -> Result<Vec<SandboxRow>, ApiError> {
    app.metrics.timed(Operation::Fork, forked(app, id, owner, count, metadata, tree)).await
}

async fn forked(
    app: &Arc<App>,
    id: &str,
    owner: &str,
    count: usize,
    metadata: BTreeMap<String, String>,
    tree: Option<String>,
) -> Result<Vec<SandboxRow>, ApiError> {
    let begun = Instant::now();
    let parent = enter(app, id).await?;
    parent.require_awake()?;
    let like = parent.row();
    let wanted =
        Use { sandboxes: count as u64, memory_mib: like.memory_mib.saturating_mul(count as u64) };
    let reservation = app.admission.reserve(owner, app.used_by(owner), wanted)?;
    let ids = (0..count).map(|_| ids::new_id()).collect::<Result<Vec<_>, _>>()?;
    let explore = metadata.get(EXPLORE_TTL_KEY).and_then(|text| text.parse().ok());
    let ttl_s: Option<u64> = explore.filter(|ttl| (1..=MAX_TTL_S).contains(ttl)).or(like.ttl_s);
    let options = ForkOptions {
        names: ids.iter().map(|id| Some(app.instance.vm_name(id))).collect(),
        ttl: ttl_s.map(Duration::from_secs),
        ..ForkOptions::default()
    };
    let vms = app.blocking.run(Work::Start, move || Ok(parent.vm().fork(&options)?)).await?;
    let (now, boot_ms) = (clock::now_ms(), begun.elapsed().as_millis() as u64);
    let row = |(id, vm): (String, &pvmm_sandbox::Sandbox)| {
        let mut metadata = metadata.clone();
        metadata.insert(PARENT_KEY.to_owned(), like.id.clone());
        if let Some(tree) = &tree {
            metadata.insert(TREE_KEY.to_owned(), tree.clone());
        }
        SandboxRow {
            id,
            vm: Some(vm.id().to_owned()),
            metadata,
            ttl_s,
            expires_ms: ttl_s.map(|ttl| now + ttl * 1000),
            persistent: false,
            parent: Some(like.id.clone()),
            tree: tree.clone(),
            state: State::Running,
            owner: owner.to_owned(),
            volumes: Vec::new(),
            created_ms: now,
            active_ms: now,
            boot_ms,
            boot_mode: "fork".to_owned(),
            from_snapshot: None,
            has_checkpoint: false,
            public_ports: BTreeSet::new(),
            all_public: false,
            ..like.clone()
        }
    };
    let rows: Vec<_> = ids.into_iter().zip(&vms).map(row).collect();
    if let Err(error) = write_rows(app, rows.clone()).await {
        let sandboxes = app.sandboxes.clone();
        let undo = move || vms.iter().try_for_each(|vm| end_vm(&sandboxes, vm));
        let _ = app.blocking.run(Work::Long, undo).await;
        return Err(error);
    }
    for (row, vm) in rows.iter().zip(vms) {
        app.add(row.clone(), Some(vm));
    }
    drop(reservation);
    Ok(rows)
}
