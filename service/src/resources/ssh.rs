//! `/v1/sandboxes/{id}/ssh`: a login shell on a terminal, over a websocket.
//!
//! Binary messages are the terminal's bytes, in both directions. A text message of the client
//! changes the size of the terminal. The socket closes when the shell ends.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use bytes::Bytes;
use pvmm::exec::{ExecRequest, Process, ProcessEvent, Signaller, Stdin, WindowSize};
use serde::Deserialize;
use tokio::sync::mpsc;

use crate::app::App;
use crate::audit::Act;
use crate::blocking::Work;
use crate::error::ApiError;
use crate::extract::{Id, Owner, Queried};
use crate::life::{InUse, enter};

/// The largest message of a client.
const MAX_MESSAGE: usize = 1 << 20;
/// The messages that wait in each direction.
const QUEUE: usize = 64;
/// How often a silent shell is looked at, for a client that is gone.
const TICK: Duration = Duration::from_secs(1);
/// Starts the login shell that there is.
const LOGIN: &str = "cd /root 2>/dev/null; [ -x /bin/bash ] && exec /bin/bash -l; exec /bin/sh -l";

/// The query of a request: the size of the client's terminal.
#[derive(Debug, Default, Deserialize)]
pub struct Size {
    rows: Option<u16>,
    cols: Option<u16>,
}

/// A text message of a client.
#[derive(Debug, Deserialize)]
struct Control {
    resize: Size,
}

impl Size {
    fn window(&self) -> WindowSize {
        let (rows, columns) = (self.rows.unwrap_or(24).max(1), self.cols.unwrap_or(80).max(1));
        WindowSize { rows, columns }
    }
}

/// Sends what the shell prints, until it ends or the client goes away. Dropping the process ends
/// the shell.
fn print(mut process: Process, output: &mpsc::Sender<Bytes>) {
    loop {
        let event = process.next_event(Some(Instant::now() + TICK));
        let open = match event {
            Ok(Some(ProcessEvent::Stdout(bytes) | ProcessEvent::Stderr(bytes))) => {
                output.blocking_send(bytes.into()).is_ok()
            }
            Ok(None) => !output.is_closed(),
            Ok(Some(ProcessEvent::Exited(_))) | Err(_) => false,
        };
        if !open {
            return;
        }
    }
}

/// Types what the client sends.
fn type_in(mut stdin: Stdin, mut input: mpsc::Receiver<Bytes>) {
    while let Some(bytes) = input.blocking_recv() {
        if stdin.write_all(&bytes).is_err() {
            return;
        }
    }
}

/// Passes messages on in both directions until one side ends.
async fn converse(
    mut socket: WebSocket,
    signaller: Signaller,
    input: mpsc::Sender<Bytes>,
    mut output: mpsc::Receiver<Bytes>,
) {
    loop {
        tokio::select! {
            printed = output.recv() => {
                let message = match printed {
                    Some(bytes) => Message::Binary(bytes),
                    None => Message::Close(None),
                };
                let last = matches!(message, Message::Close(_));
                if socket.send(message).await.is_err() || last {
                    return;
                }
            }
            message = socket.recv() => match message {
                Some(Ok(Message::Binary(bytes))) => {
                    if input.send(bytes).await.is_err() {
                        return;
                    }
                }
                Some(Ok(Message::Text(text))) => {
                    if let Ok(control) = serde_json::from_str::<Control>(&text) {
                        let _ = signaller.resize(control.resize.window());
                    }
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(Message::Close(_)) | Err(_)) | None => return,
            }
        }
    }
}

fn start(in_use: &InUse, size: &Size) -> Result<Process, ApiError> {
    let request = ExecRequest::argv(["/bin/sh", "-c", LOGIN])
        .env("HOME", "/root")
        .env("LANG", "C.UTF-8")
        .env("TERM", "xterm-256color")
        .terminal(size.window());
    Ok(in_use.agent()?.start(&request)?)
}

/// `GET /v1/sandboxes/{id}/ssh`
pub async fn ssh(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Queried(size): Queried<Size>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    app.find(&id)?;
    let upgrade = upgrade.map_err(|error| ApiError::bad_request(error.body_text()))?;
    let in_use = enter(&app, &id).await?;
    let work = move || start(&in_use, &size).map(|process| (process, in_use));
    let outcome = app.blocking.run(Work::Short, work).await;
    app.audit.write(&Act::new("ssh", &owner, &id).outcome(&outcome));
    let (mut process, in_use) = outcome?;
    let no_input = || ApiError::internal("the shell has no input");
    let (stdin, signaller) = (process.take_stdin().ok_or_else(no_input)?, process.signaller());
    let (printed, output) = mpsc::channel(QUEUE);
    let (input, typed) = mpsc::channel(QUEUE);
    app.blocking.start(Work::Long, move || print(process, &printed)).await?;
    app.blocking.start(Work::Long, move || type_in(stdin, typed)).await?;
    Ok(upgrade.max_message_size(MAX_MESSAGE).on_upgrade(move |socket| async move {
        converse(socket, signaller, input, output).await;
        drop(in_use);
    }))
}
