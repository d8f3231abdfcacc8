//! A container in the guest of a pod: its files there, its processes, and what crun does for it.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use containerd_shim_protos::cgroups_v2::metrics::Metrics;
use pvmm::agent::trees::pack;
use pvmm::agent::{Agent, FileWriteOptions};
use pvmm::exec::ExecRequest;
use serde_json::Value;

use crate::bundle::{self, Bundle};
use crate::error::ShimError;
use crate::process::{Exit, Process, lock};
use crate::rootfs::Mounted;
use crate::spec::{self, Copy, GuestSpec, PodFacts};
use crate::stats;
use crate::stdio::Paths;

/// The folder of the guest in which containers have theirs.
const PLACE: &str = "/var/lib/containers";
/// The folder of the guest in which crun notes the state of containers.
const STATUS: &str = "/run/crun";
/// The first interval between two looks whether crun has started a process, and the longest; each
/// is twice the one before.
const FIRST_STEP: Duration = Duration::from_millis(4);
const LAST_STEP: Duration = Duration::from_millis(256);
/// The longest note of crun that is read.
const MAX_STATUS: u64 = 64 << 10;
/// How long crun may take to start a process, and for what is not a process of a container.
const CRUN_TIME: Duration = Duration::from_secs(60);

pub struct Container {
    pub id: String,
    pub bundle: Bundle,
    pub init: Arc<Process>,
    added: Mutex<HashMap<String, Arc<Process>>>,
    paused: Mutex<bool>,
    agent: Agent,
}

impl Container {
    /// Copies the container's files into the guest; nothing runs yet.
    pub fn create(
        agent: Agent,
        id: &str,
        bundle: Bundle,
        rootfs: &Mounted,
        paths: Paths,
        pod: PodFacts,
    ) -> Result<Self, ShimError> {
        let container = Self {
            id: id.to_owned(),
            bundle,
            init: Process::new(paths),
            added: Mutex::default(),
            paused: Mutex::new(false),
            agent,
        };
        container.fill(rootfs, pod).inspect_err(|_| container.remove_files())?;
        Ok(container)
    }

    fn fill(&self, rootfs: &Mounted, pod: PodFacts) -> Result<(), ShimError> {
        let place = self.place();
        let GuestSpec { config, copies } =
            GuestSpec::new(self.bundle.config()?, &self.id, &place, pod)?;
        self.copy_tree(rootfs.path(), &format!("{place}/rootfs"))?;
        for Copy { from, to, shared } in copies {
            if shared && self.agent.stat(&to, false).is_ok() {
                continue;
            }
            let meta = fs::metadata(&from)
                .map_err(ShimError::io(format!("mount of {}", from.display())))?;
            if meta.is_dir() {
                // An archive has what is in the folder, not the folder.
                self.agent.mkdir(&to, Some(meta.permissions().mode() & 0o7777), true)?;
                self.copy_tree(&from, &to)?;
            } else if meta.is_file() {
                let failed = || ShimError::io(format!("mount of {}", from.display()));
                let options = FileWriteOptions { parents: true, ..FileWriteOptions::default() };
                let mut writer = self.agent.open_write(&to, &options)?;
                fs::File::open(&from)
                    .and_then(|mut file| io::copy(&mut file, &mut writer))
                    .map_err(failed())?;
                writer.finish()?;
            } else {
                let what = format!("{} is neither a file nor a folder", from.display());
                return Err(ShimError::Invalid(what));
            }
        }
        self.write(&format!("{place}/config.json"), config.to_string().as_bytes())
    }

    /// Returns the first process of a container that runs, as the guest numbers it.
    pub fn first_process(&self) -> Option<u32> {
        let status = self.agent.read_file(self.status_file(), MAX_STATUS).ok()?;
        let status: Value = serde_json::from_slice(&status).ok()?;
        u32::try_from(status["pid"].as_u64()?).ok()
    }

    /// Starts the first process.
    pub fn start(&self, ended: impl FnOnce(Exit) + Send + 'static) -> Result<(), ShimError> {
        let place = self.place();
        let request = ExecRequest::argv(["crun", "run", "--bundle", &place, &self.id]);
        self.init.start(&self.agent, request, ended)?;
        self.wait_for(&self.init, &self.status_file())
    }

    /// Adds a process, which is described as in an OCI configuration.
    pub fn add(&self, exec_id: &str, mut spec: Value, paths: Paths) -> Result<(), ShimError> {
        bundle::check_id(exec_id)?;
        if !self.init.is_running() {
            return Err(ShimError::Conflict(format!("container {} does not run", self.id)));
        }
        spec::confine(&mut spec);
        spec["terminal"] = paths.terminal.into();
        let mut added = lock(&self.added);
        if added.contains_key(exec_id) {
            return Err(ShimError::Exists(format!("process {exec_id}")));
        }
        self.write(&self.file_of(exec_id, "json"), spec.to_string().as_bytes())?;
        added.insert(exec_id.to_owned(), Process::new(paths));
        Ok(())
    }

    /// Starts a process that was added.
    pub fn start_added(
        &self,
        exec_id: &str,
        ended: impl FnOnce(Exit) + Send + 'static,
    ) -> Result<(), ShimError> {
        let process = self.process(exec_id)?;
        let (spec, pid) = (self.file_of(exec_id, "json"), self.file_of(exec_id, "pid"));
        let words = ["crun", "exec", "--process", &spec, "--pid-file", &pid, &self.id];
        process.start(&self.agent, ExecRequest::argv(words), ended)?;
        self.wait_for(&process, &pid)
    }

    /// Waits until crun has written a file of a process, after which it can be reached by its name.
    fn wait_for(&self, process: &Process, file: &str) -> Result<(), ShimError> {
        let late = Instant::now() + CRUN_TIME;
        let mut step = FIRST_STEP;
        while process.is_running() && self.agent.stat(file, false).is_err() {
            if Instant::now() > late {
                // What is not told as started must not start later.
                process.kill()?;
                return Err(ShimError::Conflict("crun did not start the process".to_owned()));
            }
            thread::sleep(step);
            step = (step * 2).min(LAST_STEP);
        }
        Ok(())
    }

    /// Returns a process: the first one for an empty name.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>, ShimError> {
        if exec_id.is_empty() {
            return Ok(self.init.clone());
        }
        let found = lock(&self.added).get(exec_id).cloned();
        found.ok_or_else(|| ShimError::NotFound(format!("process {exec_id}")))
    }

    /// Sends a signal to a process, or with `all` to all of the container. Returns the end of one
    /// that was never started: any signal ends it.
    pub fn kill(&self, exec_id: &str, signal: u32, all: bool) -> Result<Option<Exit>, ShimError> {
        let process = self.process(exec_id)?;
        if let Some(exit) = process.cancel() {
            return Ok(Some(exit));
        }
        if !process.is_running() {
            return Err(ShimError::NotFound("running process".to_owned()));
        }
        let signal = signal.to_string();
        if exec_id.is_empty() {
            let mut words = vec!["crun", "kill"];
            if all {
                words.push("--all");
            }
            words.extend([&*self.id, &*signal]);
            match self.crun(&words) {
                // A container that crun has not started yet consists of crun.
                Err(ShimError::NotFound(_)) if signal == "9" => process.kill()?,
                done => done?,
            }
        } else {
            let line = format!("kill -{signal} \"$(cat {})\"", self.file_of(exec_id, "pid"));
            self.run(ExecRequest::shell(line))?;
        }
        if signal == "9" {
            process.discard_output();
        }
        Ok(None)
    }

    /// Returns what the container uses of its VM.
    pub fn stats(&self) -> Metrics {
        stats::read(&self.agent, &self.id)
    }

    pub fn pause(&self) -> Result<(), ShimError> {
        self.crun(&["crun", "pause", &self.id])?;
        *lock(&self.paused) = true;
        Ok(())
    }

    pub fn resume(&self) -> Result<(), ShimError> {
        self.crun(&["crun", "resume", &self.id])?;
        *lock(&self.paused) = false;
        Ok(())
    }

    pub fn is_paused(&self) -> bool {
        *lock(&self.paused)
    }

    /// Forgets a process that has ended or was never started.
    pub fn forget(&self, exec_id: &str) -> Result<Exit, ShimError> {
        let process = self.process(exec_id)?;
        if process.is_running() {
            return Err(ShimError::Conflict(format!("process {exec_id} still runs")));
        }
        let exit = process.cancel().unwrap_or_else(|| process.wait());
        lock(&self.added).remove(exec_id);
        // Another process may get the name, and must not be taken for this one.
        for kind in ["json", "pid"] {
            let _ = self.agent.remove(self.file_of(exec_id, kind), false);
        }
        Ok(exit)
    }

    /// Removes the container from the guest.
    pub fn remove(&self) -> Result<Exit, ShimError> {
        if self.init.is_running() {
            return Err(ShimError::Conflict(format!("container {} still runs", self.id)));
        }
        let exit = self.init.cancel().unwrap_or_else(|| self.init.wait());
        let _ = self.crun(&["crun", "delete", "--force", &self.id]);
        self.remove_files();
        Ok(exit)
    }

    fn remove_files(&self) {
        if let Err(error) = self.agent.remove(self.place(), true)
            && error.errno() != Some(rustix::io::Errno::NOENT.raw_os_error())
        {
            log::warn!("files of container {} stay in the guest: {error}", self.id);
        }
    }

    fn copy_tree(&self, from: &std::path::Path, to: &str) -> Result<(), ShimError> {
        self.agent.mkdir(to, None, true)?;
        let mut writer = self.agent.open_write_tar(to, true)?;
        let packed = pack(from, &mut writer, &mut |path| {
            log::warn!("{} is left out: it is neither file nor folder nor link", path.display());
        });
        let failed = |error: &dyn std::fmt::Display| {
            ShimError::Conflict(format!("cannot copy {} into the guest: {error}", from.display()))
        };
        packed.map_err(|error| failed(&error))?;
        writer.finish().map(drop).map_err(|error| failed(&error))
    }

    fn write(&self, path: &str, content: &[u8]) -> Result<(), ShimError> {
        let options = FileWriteOptions { parents: true, ..FileWriteOptions::default() };
        Ok(self.agent.write_file(path, content, &options).map(drop)?)
    }

    fn crun(&self, words: &[&str]) -> Result<(), ShimError> {
        self.run(ExecRequest::argv(words))
    }

    fn run(&self, request: ExecRequest) -> Result<(), ShimError> {
        let output = self.agent.exec(&request.timeout(CRUN_TIME))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr.bytes);
        let said = said.lines().last().unwrap_or("crun failed").to_owned();
        if is_gone(&said) {
            return Err(ShimError::NotFound(format!("running container {}: {said}", self.id)));
        }
        Err(ShimError::Conflict(said))
    }

    fn status_file(&self) -> String {
        format!("{STATUS}/{}/status", self.id)
    }

    fn place(&self) -> String {
        format!("{PLACE}/{}", self.id)
    }

    fn file_of(&self, exec_id: &str, kind: &str) -> String {
        format!("{}/exec-{exec_id}.{kind}", self.place())
    }
}

/// Whether crun found no container: it ended before the call or during it.
fn is_gone(said: &str) -> bool {
    let status = said.contains(STATUS) && said.contains("No such file");
    status || said.contains("does not exist") || said.contains("No such process")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_that_ends_before_or_during_a_call_is_gone() {
        let gone = [
            "error opening file `/run/crun/one/status`: No such file or directory",
            "container `one` does not exist",
            "kill container: No such process",
        ];
        assert!(gone.into_iter().all(is_gone));
        assert!(!is_gone("open `/rootfs/bin/one`: No such file or directory"));
    }
}
