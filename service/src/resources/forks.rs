//! `/v1/sandboxes/{id}/fork`, `/fork-tree` and `/promote`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::future::join_all;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::{App, Entry};
use crate::audit::Act;
use crate::blocking::{Work, to_the_end};
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner};
use crate::ids;
use crate::life::{self, EXPLORE_TTL_KEY, MAX_CHILDREN, PARENT_KEY, TREE_KEY};
use crate::sse;

use super::sandboxes::{check_metadata, shape};

/// The body of a fork.
#[derive(Debug, Default, Deserialize)]
pub struct Fork {
    metadata: Option<BTreeMap<String, String>>,
}

/// The body of a fork into several children.
#[derive(Debug, Deserialize)]
pub struct Tree {
    count: i64,
    metadata: Option<BTreeMap<String, String>>,
}

/// The body of a promotion.
#[derive(Debug, Default, Deserialize)]
pub struct Promote {
    #[serde(default)]
    cleanup_siblings: bool,
    tree_id: Option<String>,
}

/// `POST /v1/sandboxes/{id}/fork`
pub async fn fork(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Fork>,
) -> Result<Response, ApiError> {
    let metadata = body.metadata.unwrap_or_default();
    check_metadata(&metadata)?;
    app.find(&id)?;
    let work = async move {
        let begun = Instant::now();
        let outcome = life::fork(&app, &id, &owner, 1, metadata, None).await;
        app.audit.write(&Act::new("fork", &owner, &id).since(begun).outcome(&outcome));
        let rows = outcome?;
        rows.first().map(shape).ok_or_else(|| ApiError::internal("the fork has no child"))
    };
    Ok(sse::slow_json(StatusCode::CREATED, work, ApiError::json).await)
}

/// `POST /v1/sandboxes/{id}/fork-tree`
pub async fn fork_tree(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Tree>,
) -> Result<Response, ApiError> {
    let count = usize::try_from(body.count).unwrap_or(0);
    if !(1..=MAX_CHILDREN).contains(&count) {
        let message = format!("count: use a number from 1 to {MAX_CHILDREN}");
        return Err(ApiError::bad_request(message));
    }
    let metadata = body.metadata.unwrap_or_default();
    check_metadata(&metadata)?;
    app.find(&id)?;
    let work = async move {
        let begun = Instant::now();
        let tree = ids::new_id()?;
        let outcome = life::fork(&app, &id, &owner, count, metadata, Some(tree.clone())).await;
        let act = Act::new("fork_tree", &owner, &id).what(&format!("{count} children"));
        app.audit.write(&act.since(begun).outcome(&outcome));
        let children: Vec<_> = outcome?.iter().map(shape).collect();
        Ok(json!({ "tree_id": tree, "children": children }))
    };
    Ok(sse::slow_json(StatusCode::CREATED, work, ApiError::json).await)
}

/// Makes a child a sandbox of its own: without the marks of a fork, and without a time to live that
/// was only for the exploration.
async fn set_free(app: &Arc<App>, entry: &Arc<Entry>) -> Result<(), ApiError> {
    let (row, vm, explored) = {
        let mut fields = entry.lock();
        let row = &mut fields.row;
        (row.parent, row.tree) = (None, None);
        for key in [PARENT_KEY, TREE_KEY] {
            row.metadata.remove(key);
        }
        let explored = row.metadata.remove(EXPLORE_TTL_KEY).is_some();
        if explored {
            (row.ttl_s, row.expires_ms) = (None, None);
        }
        (row.clone(), fields.vm.clone(), explored)
    };
    app.store.put_sandboxes(&[&row])?;
    if let Some(vm) = vm.filter(|_| explored) {
        app.blocking.run(Work::Short, move || Ok(vm.set_ttl(None)?)).await?;
    }
    Ok(())
}

async fn promoted(app: Arc<App>, id: String, body: Promote) -> Result<Value, ApiError> {
    let winner = app.find(&id)?;
    let own_tree = winner.row().tree;
    let tree = body.tree_id.or(own_tree).unwrap_or_default();
    let is_sibling = |entry: &Arc<Entry>| {
        let row = entry.row();
        row.id != id && !tree.is_empty() && row.tree.as_deref() == Some(&tree[..])
    };
    let siblings: Vec<_> = if body.cleanup_siblings {
        app.list().into_iter().filter(is_sibling).collect()
    } else {
        Vec::new()
    };
    set_free(&app, &winner).await?;
    let ends = siblings.iter().map(|entry| async {
        let id = entry.row().id;
        (id, life::end(&app, entry).await)
    });
    let (mut deleted, mut failures) = (Vec::new(), Map::new());
    for (id, outcome) in join_all(ends).await {
        match outcome {
            Ok(()) => deleted.push(id),
            Err(error) => {
                failures.insert(id, json!(error.message));
            }
        }
    }
    Ok(json!({ "winner": id, "tree_id": tree, "deleted": deleted, "failures": failures }))
}

/// `POST /v1/sandboxes/{id}/promote`
pub async fn promote(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Promote>,
) -> Result<axum::Json<Value>, ApiError> {
    let begun = Instant::now();
    let outcome = to_the_end(promoted(Arc::clone(&app), id.clone(), body)).await;
    app.audit.write(&Act::new("promote", &owner, &id).since(begun).outcome(&outcome));
    outcome.map(axum::Json)
}
