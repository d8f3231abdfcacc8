//! Passes HTTP requests on to a port in a guest, with upgrades such as websockets.
//!
//! The agent in the guest makes the connection, so the guest needs no network. Each request has a
//! connection of its own.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use pvmm::agent::{GuestTcp, GuestTcpReader, GuestTcpWriter};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;

use crate::app::App;
use crate::blocking::Work;
use crate::credentials;
use crate::error::ApiError;
use crate::life::{InUse, enter};

/// How long a program in the guest may take to begin its answer.
const ANSWER_TIME: Duration = Duration::from_secs(300);
const BUFFER: usize = 64 << 10;
const QUEUE: usize = 16;

/// Headers that are for one connection only.
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Passes a request on to a port of a sandbox, which is woken if it hibernates.
pub async fn forward(
    app: &Arc<App>,
    id: &str,
    port: u16,
    path: &str,
    mut request: Request,
) -> Result<Response, ApiError> {
    credentials::strip(app, request.headers_mut());
    let in_use = enter(app, id).await?;
    let connect = move || {
        let agent = in_use.agent()?;
        let refused = |error: pvmm::agent::AgentError| match error.errno() {
            Some(libc::ECONNREFUSED) => {
                ApiError::unavailable(format!("nothing listens on port {port} in the guest"), 1)
            }
            _ => error.into(),
        };
        Ok((agent.connect_tcp(port).map_err(refused)?, in_use))
    };
    let (guest, in_use) = app.blocking.run(Work::Short, connect).await?;
    let stream = bridge(app, guest, in_use).await?;
    exchange(stream, path, request).await
}

/// Sends a request over a connection and returns the answer.
async fn exchange(
    stream: DuplexStream,
    path: &str,
    mut request: Request,
) -> Result<Response, ApiError> {
    let failed = |_| ApiError::unavailable("the program in the guest speaks no HTTP", 1);
    let (mut sender, connection) =
        http1::handshake::<_, Body>(TokioIo::new(stream)).await.map_err(failed)?;
    tokio::spawn(async move {
        // The answer's body says if the connection fails.
        let _ = connection.with_upgrades().await;
    });
    let upgrade = request.headers().get(header::UPGRADE).cloned();
    let client = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let (mut parts, body) = request.into_parts();
    parts.uri = path.parse::<Uri>().map_err(|_| ApiError::bad_request("the path is invalid"))?;
    strip(&mut parts.headers);
    if let Some(upgrade) = upgrade {
        parts.headers.insert(header::CONNECTION, header::HeaderValue::from_static("upgrade"));
        parts.headers.insert(header::UPGRADE, upgrade);
    }
    let sent = sender.send_request(Request::from_parts(parts, body));
    let answer = tokio::time::timeout(ANSWER_TIME, sent).await;
    let answer = answer.map_err(|_| ApiError::overdue("the program in the guest is silent"))?;
    let mut answer = answer.map_err(failed)?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(client) = client
    {
        let guest = hyper::upgrade::on(&mut answer);
        tokio::spawn(async move {
            if let (Ok(client), Ok(guest)) = tokio::join!(client, guest) {
                let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
                let _ = tokio::io::copy_bidirectional(&mut client, &mut guest).await;
            }
        });
        return Ok(answer.map(Body::new).into_response());
    }
    strip(answer.headers_mut());
    Ok(answer.map(Body::new).into_response())
}

fn strip(headers: &mut HeaderMap) {
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// Connects a guest's connection, which blocks, to a stream for tasks.
async fn bridge(app: &Arc<App>, guest: GuestTcp, in_use: InUse) -> Result<DuplexStream, ApiError> {
    let (near, far) = tokio::io::duplex(BUFFER);
    let (mut far_read, mut far_write) = tokio::io::split(far);
    let (reader, writer) = guest.split();
    let writer = Arc::new(writer);
    let (from_guest, mut arrived) = mpsc::channel::<Bytes>(QUEUE);
    let (to_guest, leaving) = mpsc::channel::<Bytes>(QUEUE);
    app.blocking.start(Work::Long, move || receive(reader, &from_guest, in_use)).await?;
    let sending = Arc::clone(&writer);
    app.blocking.start(Work::Long, move || send(&sending, leaving)).await?;
    tokio::spawn(async move {
        while let Some(bytes) = arrived.recv().await {
            if far_write.write_all(&bytes).await.is_err() {
                break;
            }
        }
        let _ = far_write.shutdown().await;
        writer.close();
    });
    tokio::spawn(async move {
        let mut buffer = vec![0; BUFFER];
        loop {
            match far_read.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => {
                    if to_guest.send(Bytes::copy_from_slice(&buffer[..count])).await.is_err() {
                        return;
                    }
                }
            }
        }
    });
    Ok(near)
}

/// Passes on what the guest sends, until either side ends.
fn receive(mut reader: GuestTcpReader, arrived: &mpsc::Sender<Bytes>, in_use: InUse) {
    while let Ok(bytes) = reader.next_chunk() {
        if bytes.is_empty() || arrived.blocking_send(bytes.into()).is_err() {
            break;
        }
    }
    drop(in_use);
}

/// Passes on what the client sends, until either side ends.
fn send(writer: &GuestTcpWriter, mut leaving: mpsc::Receiver<Bytes>) {
    while let Some(bytes) = leaving.blocking_recv() {
        if { writer }.write_all(&bytes).is_err() {
            return;
        }
    }
    let _ = writer.shutdown();
}
