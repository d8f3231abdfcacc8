//! `/v1/sandboxes/{id}/ports`: ports that the guest listens on, their addresses, requests to them.

use std::sync::Arc;

use axum::extract::{RawPathParams, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::blocking::Work;
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner};
use crate::life::enter;
use crate::preview;
use crate::proxy;
use crate::store::SandboxRow;

/// The most that is read of a table of sockets.
const MAX_TABLE: u64 = 1 << 20;
/// The most public ports of one sandbox.
const MAX_PUBLIC: usize = 64;
/// The state of a socket that listens, as the kernel's tables have it.
const LISTENS: &str = "0A";

/// Returns the ports of a table like `/proc/net/tcp` that listen where the agent can reach them:
/// on every address or on loopback.
fn listening(table: &str) -> Vec<u16> {
    let reachable = |address: &str| {
        let any = address.bytes().all(|byte| byte == b'0');
        any || address == "0100007F" || address == "00000000000000000000000001000000"
    };
    let port = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (address, port) = words.next()?.rsplit_once(':')?;
        let listens = words.nth(1)? == LISTENS;
        (listens && reachable(address)).then(|| u16::from_str_radix(port, 16).ok())?
    };
    table.lines().filter_map(port).collect()
}

/// `GET /v1/sandboxes/{id}/ports`
pub async fn list(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
) -> Result<axum::Json<Value>, ApiError> {
    let in_use = enter(&app, &id).await?;
    let work = move || {
        let agent = in_use.agent()?;
        let mut ports = Vec::new();
        for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
            // A guest without IPv6 has no second table.
            if let Ok(table) = agent.read_file(path, MAX_TABLE) {
                ports.extend(listening(&String::from_utf8_lossy(&table)));
            }
        }
        ports.sort_unstable();
        ports.dedup();
        Ok(ports)
    };
    let ports = app.blocking.run(Work::Short, work).await?;
    let ports: Vec<_> = ports.iter().map(|port| json!({ "port": port })).collect();
    Ok(axum::Json(json!({ "ports": ports })))
}

fn port_of(params: &RawPathParams) -> Result<u16, ApiError> {
    let text = params.iter().find(|(key, _)| *key == "port").map(|(_, value)| value);
    let port = text.and_then(|text| text.parse().ok()).filter(|port| *port > 0);
    port.ok_or_else(|| ApiError::bad_request("port: use a number from 1 to 65535"))
}

/// Writes the address of a port, with the token that opens it.
fn shape(app: &App, headers: &HeaderMap, row: &SandboxRow, port: u16) -> Value {
    let scheme = if app.options.tls.is_some() { "https" } else { "http" };
    let domain = preview::domain(headers);
    let url = domain.map(|domain| format!("{scheme}://{port}-{}.{domain}/", row.id));
    let token = app.key.preview_token(&row.id, port);
    json!({
        "port": port,
        "public": row.is_public(port),
        "url": url,
        "open_url": url.map(|url| format!("{url}?{}={token}", preview::PARAMETER)),
        "token": token,
        "path": format!("/v1/sandboxes/{}/ports/{port}/proxy/", row.id),
    })
}

/// `GET /v1/sandboxes/{id}/ports/{port}`
pub async fn get(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
    params: RawPathParams,
    headers: HeaderMap,
) -> Result<axum::Json<Value>, ApiError> {
    let port = port_of(&params)?;
    Ok(axum::Json(shape(&app, &headers, &app.find(&id)?.row(), port)))
}

/// The body of a change.
#[derive(Debug, Deserialize)]
pub struct Change {
    public: bool,
}

/// `PUT /v1/sandboxes/{id}/ports/{port}`
pub async fn put(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    params: RawPathParams,
    headers: HeaderMap,
    Json(body): Json<Change>,
) -> Result<axum::Json<Value>, ApiError> {
    let (port, entry) = (port_of(&params)?, app.find(&id)?);
    let shared = Arc::clone(&app);
    let change = move || {
        let mut fields = entry.lock();
        let mut row = fields.row.clone();
        if body.public {
            row.public_ports.insert(port);
        } else {
            row.public_ports.remove(&port);
        }
        if row.public_ports.len() > MAX_PUBLIC {
            return Err(ApiError::conflict("there are 64 public ports: close one first"));
        }
        if row.all_public && !body.public {
            return Err(ApiError::conflict("the sandbox was made with all ports public"));
        }
        shared.store.put_sandboxes(&[&row])?;
        fields.row = row.clone();
        Ok(row)
    };
    let outcome = app.blocking.run(Work::Short, change).await;
    let what = if body.public { "public" } else { "private" };
    let act = Act::new("port", &owner, &id).what(&format!("{port} {what}"));
    app.audit.write(&act.outcome(&outcome));
    Ok(axum::Json(shape(&app, &headers, &outcome?, port)))
}

/// Any method of `/v1/sandboxes/{id}/ports/{port}/proxy/{path}`. The answer has the origin of the
/// API, so a browser must not run it there.
pub async fn forward(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
    params: RawPathParams,
    request: Request,
) -> Result<Response, ApiError> {
    let port = port_of(&params)?;
    // The path is taken from the address and not from its decoded parts: it must arrive unchanged.
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let rest = path.splitn(8, '/').nth(7).unwrap_or_default();
    let path = format!("/{rest}");
    let mut answer = proxy::forward(&app, &id, port, &path, request).await?;
    let apart = HeaderValue::from_static("sandbox");
    answer.headers_mut().append(header::CONTENT_SECURITY_POLICY, apart);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_ports_are_those_in_reach() {
        let table = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0
   1: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0
   2: 0F02000A:0051 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0
   3: 0100007F:0052 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0
   4: 00000000000000000000000000000000:0BB8 0:0000 0A
  broken";
        assert_eq!(listening(table), [8080, 80, 3000]);
    }
}
