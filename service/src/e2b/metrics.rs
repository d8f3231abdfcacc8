//! Metrics of sandboxes: one look at the guest, when a client asks.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use pvmm::agent::Metrics;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Id, Queried};
use crate::life;
use crate::store::State as SandboxState;

use super::error::{Checked, Refused};
use super::state::{Door, Target};

/// The time between the two looks at a processor.
const LOOK: Duration = Duration::from_millis(100);
/// The most sandboxes of one request.
const MAX_SANDBOXES: usize = 100;

/// Returns two looks at a guest, one after the other.
async fn looks(door: &Door, id: &str) -> Result<(Metrics, Metrics), ApiError> {
    let in_use = life::enter(&door.app, id).await?;
    let work = move || {
        let agent = in_use.agent()?;
        let before = agent.metrics()?;
        std::thread::sleep(LOOK);
        Ok((before, agent.metrics()?))
    };
    door.app.blocking.run(Work::Short, work).await
}

/// Returns the share of all processors that was busy between two looks, in percent of one.
fn busy_percent(before: &Metrics, now: &Metrics) -> f64 {
    let busy = now.cpu_busy_us.saturating_sub(before.cpu_busy_us) as f64;
    let idle = now.cpu_idle_us.saturating_sub(before.cpu_idle_us) as f64;
    if busy + idle <= 0.0 { 0.0 } else { busy / (busy + idle) * 100.0 }
}

fn used_memory(metrics: &Metrics) -> u64 {
    metrics.memory_total_kib.saturating_sub(metrics.memory_available_kib).saturating_mul(1024)
}

async fn sample(door: &Door, id: &str) -> Result<Value, ApiError> {
    let (before, now) = looks(door, id).await?;
    let time = clock::now_ms();
    Ok(json!({
        "timestamp": clock::rfc3339(time),
        "timestampUnix": time / 1000,
        "cpuCount": now.cpus,
        "cpuUsedPct": busy_percent(&before, &now),
        "memUsed": used_memory(&now),
        "memTotal": now.memory_total_kib.saturating_mul(1024),
        "memCache": now.memory_cached_kib.saturating_mul(1024),
        "diskUsed": now.disk_total_bytes.saturating_sub(now.disk_available_bytes),
        "diskTotal": now.disk_total_bytes,
    }))
}

/// `GET /sandboxes/{id}/metrics`
pub async fn one(
    State(door): State<Arc<Door>>,
    Checked(Id(id)): Checked<Id>,
) -> Result<axum::Json<Value>, Refused> {
    // A look at a paused sandbox does not wake it.
    if door.app.find(&id)?.row().state != SandboxState::Running {
        return Ok(axum::Json(json!([])));
    }
    Ok(axum::Json(json!([sample(&door, &id).await?])))
}

/// The query of metrics of several sandboxes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Several {
    sandbox_ids: String,
}

/// `GET /sandboxes/metrics`
pub async fn several(
    State(door): State<Arc<Door>>,
    Checked(Queried(wanted)): Checked<Queried<Several>>,
) -> Result<axum::Json<Value>, Refused> {
    let mut found = Map::new();
    for id in wanted.sandbox_ids.split(',').take(MAX_SANDBOXES) {
        let Ok(entry) = door.app.find(id) else { continue };
        let running = entry.lock().row.state == SandboxState::Running;
        if running && let Ok(sample) = sample(&door, id).await {
            found.insert(id.to_owned(), sample);
        }
    }
    Ok(axum::Json(json!({ "sandboxes": found })))
}

/// `GET /metrics` of a sandbox.
pub async fn of_guest(
    State(door): State<Arc<Door>>,
    Target(id): Target,
) -> Result<axum::Json<Value>, Refused> {
    let (before, now) = looks(&door, &id).await?;
    Ok(axum::Json(json!({
        "ts": clock::now_ms() / 1000,
        "cpu_count": now.cpus,
        "cpu_used_pct": busy_percent(&before, &now),
        "mem_used": used_memory(&now),
        "mem_total": now.memory_total_kib.saturating_mul(1024),
        "disk_used": now.disk_total_bytes.saturating_sub(now.disk_available_bytes),
        "disk_total": now.disk_total_bytes,
    })))
}
