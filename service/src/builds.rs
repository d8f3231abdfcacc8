//! Builds of templates: a few at a time, each a process of its own.
//!
//! A build runs `pvmm template build`, because the server never boots a VM in its own process. What
//! the process prints is the log of the build, in a file beside the sources.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pvmm_sandbox::sys::process::Other;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::Semaphore;

use crate::error::ApiError;

/// The builds that run at a time.
const RUNNING: usize = 2;
/// The most builds that run or wait.
const MAX_OPEN: usize = 16;
/// How long a build may take.
const BUILD_TIME: Duration = Duration::from_secs(2 * 3600);
/// How long a build may take to end when it is told to.
const END_TIME: Duration = Duration::from_secs(10);
/// The longest log.
const MAX_LOG: u64 = 4 << 20;
const CUT: &str = "\n(the log is cut here)\n";
/// The last bytes of a log, in which the reason of a failure is looked for.
const TAIL: usize = 8 << 10;

/// The builds of a server.
pub struct Builds {
    slots: Semaphore,
    /// The builds that run or wait, and the processes of those that run.
    open: Mutex<HashMap<String, Option<u32>>>,
}

impl Default for Builds {
    fn default() -> Self {
        Self { slots: Semaphore::new(RUNNING), open: Mutex::default() }
    }
}

impl Builds {
    fn open(&self) -> MutexGuard<'_, HashMap<String, Option<u32>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a new build, until it ends or is given up.
    pub fn admit(&self, id: &str) -> Result<(), ApiError> {
        let mut open = self.open();
        if open.len() >= MAX_OPEN {
            let message = format!("{MAX_OPEN} builds are under way: try again");
            return Err(ApiError::too_many(message, 10));
        }
        open.insert(id.to_owned(), None);
        Ok(())
    }

    /// Gives up the place of a build.
    pub fn forget(&self, id: &str) {
        self.open().remove(id);
    }

    /// Runs `pvmm template build` with these words to its end, and writes what it prints to `log`.
    /// Waits for a free place first; `begun` is called then. Fails with the reason of the process.
    pub async fn run(
        &self,
        id: &str,
        words: &[String],
        log: PathBuf,
        begun: impl FnOnce(),
    ) -> Result<(), String> {
        let closed = |_| "the server ended before the build began".to_owned();
        let _slot = self.slots.acquire().await.map_err(closed)?;
        begun();
        let text = |error: std::io::Error| error.to_string();
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        // The process ends when this one is gone and its standard input is closed.
        command.args(["--end-with-stdin", "template", "build"]).args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().map_err(text)?;
        self.open().insert(id.to_owned(), child.id());
        let _held = child.stdin.take();
        let stderr = child.stderr.take().ok_or("the build has no log")?;
        let logged = tokio::time::timeout(BUILD_TIME, write_log(stderr, log)).await;
        let Ok(tail) = logged else {
            end(&mut child).await;
            return Err("the build took too long".to_owned());
        };
        let tail = tail.map_err(text)?;
        let status = child.wait().await.map_err(text)?;
        if status.success() { Ok(()) } else { Err(reason(&tail)) }
    }

    /// Ends all builds, which clean up after themselves.
    pub async fn end(&self) {
        self.slots.close();
        let pids: Vec<u32> = self.open().values().flatten().copied().collect();
        for pid in pids {
            terminate(pid);
        }
        let ended = async {
            while self.open().values().any(Option::is_some) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let _ = tokio::time::timeout(END_TIME, ended).await;
    }
}

async fn end(child: &mut Child) {
    if let Some(pid) = child.id() {
        terminate(pid);
    }
    let _ = tokio::time::timeout(END_TIME, child.wait()).await;
}

fn terminate(pid: u32) {
    let _ = Other::open(pid).and_then(|process| process.signal(libc::SIGTERM));
}

/// Writes all that a build prints to its log, up to a limit. Returns the last of it.
async fn write_log(mut from: ChildStderr, path: PathBuf) -> std::io::Result<String> {
    let mut file = File::create(path).await?;
    let (mut written, mut tail, mut buffer) = (0u64, Vec::new(), vec![0; 16 << 10]);
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            file.flush().await?;
            return Ok(String::from_utf8_lossy(&tail).into_owned());
        }
        let bytes = &buffer[..count];
        tail.extend_from_slice(bytes);
        let excess = tail.len().saturating_sub(TAIL);
        tail.drain(..excess);
        let room = MAX_LOG.saturating_sub(written).min(count as u64) as usize;
        if room > 0 {
            file.write_all(&bytes[..room]).await?;
            if room < count || written + room as u64 == MAX_LOG {
                file.write_all(CUT.as_bytes()).await?;
            }
            file.flush().await?;
            written += room as u64;
        }
    }
}

/// Finds the reason of a failure in the last words of a build.
fn reason(tail: &str) -> String {
    let line = tail.lines().rev().find_map(|line| line.strip_prefix("error: "));
    line.unwrap_or("the build ended without a reason").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_the_last_error_line() {
        let said = "Step 1/1: RUN x\nerror: of the command\nerror: line 2: it failed\nhint: x\n";
        assert_eq!(reason(said), "line 2: it failed");
        assert_eq!(reason("killed"), "the build ended without a reason");
    }

    #[test]
    fn builds_beyond_the_limit_are_refused_until_one_ends() {
        let builds = Builds::default();
        for number in 0..MAX_OPEN {
            builds.admit(&number.to_string()).unwrap();
        }
        let error = builds.admit("more").unwrap_err();
        assert_eq!((error.status.as_u16(), error.retry_after), (429, Some(10)));
        builds.forget("0");
        builds.admit("more").unwrap();
    }
}
