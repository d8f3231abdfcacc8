//! Bakes warm templates in the background, each once, however many requests wait for it.
//!
//! The bake runs `pvmm template bake` as a process of its own: it boots a VM, which the server
//! never does in its own process.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pvmm_sandbox::warm::Shape;
use tokio::process::Command;
use tokio::sync::watch;

use crate::error::ApiError;

/// How long a request waits for a bake; clients wait 30 seconds.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a bake may take, with the download of a kernel and packages.
const BAKE_TIME: Duration = Duration::from_secs(1800);
/// The most of a failed bake's words that are told.
const MAX_WORDS: usize = 500;

/// The outcome of a bake, once it is known.
type Outcome = Option<Result<(), String>>;

/// The bakes under way, by the words of their commands.
#[derive(Clone, Default)]
pub struct Bakes {
    running: Arc<Mutex<HashMap<Vec<String>, watch::Receiver<Outcome>>>>,
}

impl Bakes {
    /// Bakes the warm template of a shape and waits for it. A bake that takes longer goes on, and
    /// the request is answered with when to try again.
    pub async fn bake(&self, shape: &Shape) -> Result<(), ApiError> {
        let mut receiver = self.receiver(shape.bake_words());
        let waited = tokio::time::timeout(PATIENCE, receiver.wait_for(Option::is_some)).await;
        let outcome = match waited {
            Ok(Ok(outcome)) => outcome.clone(),
            Ok(Err(_)) => Some(Err("the bake was lost".to_owned())),
            Err(_) => None,
        };
        let name = &shape.template;
        match outcome {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => Err(ApiError::internal(format!("template '{name}': {why}"))),
            None => {
                let message = format!("template '{name}' is being baked: try again");
                Err(ApiError::unavailable(message, 5))
            }
        }
    }

    /// Returns whether a bake is under way.
    pub fn is_busy(&self) -> bool {
        !self.running.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Joins the bake of this command, or starts it.
    fn receiver(&self, words: Vec<String>) -> watch::Receiver<Outcome> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(receiver) = running.get(&words) {
            return receiver.clone();
        }
        let (sender, receiver) = watch::channel(None);
        running.insert(words.clone(), receiver.clone());
        let bakes = self.clone();
        tokio::spawn(async move {
            let outcome = run(&words).await;
            bakes.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&words);
            sender.send_replace(Some(outcome));
        });
        receiver
    }
}

async fn run(words: &[String]) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    // The process ends when this one is gone and its standard input is closed.
    command.arg("--end-with-stdin").args(words);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().map_err(|error| error.to_string())?;
    let _held = child.stdin.take();
    let ended = tokio::time::timeout(BAKE_TIME, child.wait_with_output()).await;
    let output = ended.map_err(|_| "the bake took too long".to_owned())?;
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: String = said.split_whitespace().collect::<Vec<_>>().join(" ");
    Err(said.chars().take(MAX_WORDS).collect())
}
