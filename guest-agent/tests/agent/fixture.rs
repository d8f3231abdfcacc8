//! Starts an agent for a test and stops it afterwards. Each test has an agent, a socket and, where
//! this machine has cgroup v2, a control group of its own.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use pvmm::agent::Agent;

pub struct Fixture {
    child: Child,
    pub folder: tempfile::TempDir,
    cgroup: Option<PathBuf>,
}

impl Fixture {
    pub fn start() -> Self {
        Self::start_with(true)
    }

    /// An agent that must do without control groups.
    pub fn start_without_cgroups() -> Self {
        Self::start_with(false)
    }

    /// An agent with a host name, mounts, `/etc`, `/run` and network of its own, which it may
    /// change. `prepare` is a shell line that runs in there before it. Only root can make such a
    /// place.
    pub fn start_isolated(prepare: &str) -> Self {
        let unshare = ["--mount", "--uts", "--net", "--propagation", "private", "--"];
        let mut command = Command::new("unshare");
        command.args(unshare);
        let possible = Command::new("unshare").args(unshare).arg("true").status();
        let possible = possible.is_ok_and(|status| status.success());
        assert!(possible, "this test makes namespaces: run it as root, with util-linux installed");
        let line = format!(
            "set -e; mount -t tmpfs none /etc; mount -t tmpfs none /run; {prepare}; exec \"$@\""
        );
        command.args(["sh", "-c", &line, "sh"]);
        Self::start_command(command, true)
    }

    fn start_with(cgroups: bool) -> Self {
        Self::start_command(Command::new("env"), cgroups)
    }

    /// Lets `command`, which executes its arguments, become the agent.
    fn start_command(mut command: Command, cgroups: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cgroup = cgroups.then(cgroup_for_test).flatten();
        let place = cgroup.as_deref().unwrap_or(Path::new("none"));
        let socket = |name: &str| format!("unix:{}", folder.path().join(name).display());
        let child = command
            .arg(env!("CARGO_BIN_EXE_pvmm-agent"))
            .arg("serve")
            .args(["--listen", &socket("agent.sock"), "--control", &socket("control.sock")])
            .arg("--cgroup")
            .arg(place)
            .spawn()
            .unwrap();
        let this = Self { child, folder, cgroup };
        wait_for("the agent's socket", || this.try_socket().is_ok());
        this
    }

    pub fn agent(&self) -> Agent {
        Agent::over(self.socket()).unwrap()
    }

    /// A connection to the control port.
    pub fn control(&self) -> Agent {
        let socket = UnixStream::connect(self.folder.path().join("control.sock"));
        Agent::over(socket.unwrap()).unwrap()
    }

    pub fn socket(&self) -> UnixStream {
        self.try_socket().unwrap()
    }

    fn try_socket(&self) -> std::io::Result<UnixStream> {
        UnixStream::connect(self.folder.path().join("agent.sock"))
    }

    pub fn has_cgroups(&self) -> bool {
        self.cgroup.is_some()
    }

    /// Where the agent makes its control groups; a test that needs them fails where there is none.
    pub fn cgroup_place(&self) -> &Path {
        let lacking = "this test needs control groups: run it as root, with cgroup v2 mounted";
        self.cgroup.as_deref().expect(lacking)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the agent as nothing but a fault would.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The agent's own memory in KiB: its heap and stacks, not the program.
    pub fn private_kib(&self) -> u64 {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid())).unwrap();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(cgroup) = &self.cgroup {
            let left = cgroup.exists();
            let _ = fs::write(cgroup.join("cgroup.kill"), "1");
            for entry in fs::read_dir(cgroup).into_iter().flatten().flatten() {
                let _ = fs::remove_dir(entry.path());
            }
            let _ = fs::remove_dir(cgroup);
            let killed = self.child.try_wait().is_ok_and(|s| s.is_none_or(|s| !s.success()));
            assert!(!left || killed || std::thread::panicking(), "a control group was left behind");
        }
    }
}

/// A place for control groups, if this machine gives us one.
fn cgroup_for_test() -> Option<PathBuf> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("pvmm-test-{}-{number}", std::process::id());
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].iter().find_map(|root| {
        let path = Path::new(root).join(&name);
        fs::create_dir(&path).ok()?;
        let usable = path.join("cgroup.kill").exists();
        if !usable {
            let _ = fs::remove_dir(&path);
        }
        usable.then_some(path)
    })
}

/// Fails where `test` would wait for ever.
pub fn in_time(test: impl FnOnce() + Send + 'static) {
    let test = std::thread::spawn(test);
    wait_until(Instant::now() + Duration::from_secs(120), "the test's end", || test.is_finished());
    if let Err(why) = test.join() {
        std::panic::resume_unwind(why);
    }
}

/// Waits for something that must happen soon.
pub fn wait_for(what: &str, happened: impl FnMut() -> bool) {
    wait_until(Instant::now() + Duration::from_secs(20), what, happened);
}

fn wait_until(deadline: Instant, what: &str, mut happened: impl FnMut() -> bool) {
    while !happened() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}
