//! `cargo xtask bare`: runs a command in a minimal Debian that has Rust and nothing else.
//!
//! This shows whether the project installs everything that it uses. The system is made once and
//! kept under a hash of its recipe. Each run has a temporary layer over it, its own namespaces, and
//! a copy of this checkout without build results. From this machine it gets only Rust's files, the
//! settings for package mirrors and registries, and /dev.

use std::error::Error;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use crate::nested_host::image::short_hash;
use crate::nested_host::session;
use crate::sys::{self, READABLE, Waiting};
use crate::{cache, checkout, packages, progress, report};

/// The packages of a machine with Rust: rustc links with a C compiler, `make` starts everything,
/// and registries need certificates.
const INCLUDED: &str = "ca-certificates,gcc,libc6-dev,make";

/// The version of the recipe, raised when this file makes another system from unchanged sources.
const RECIPE: u32 = 1;

/// How long to wait for another process that makes the system.
const LOCK_DEADLINE: Duration = Duration::from_secs(900);

/// The time between a signal to a command and the end of its namespace.
const GRACE: Duration = Duration::from_secs(2);

/// The home directory of the command, with Rust's files.
const HOME: &str = "/root";

/// The settings for mirrors and registries: files that are copied if they exist.
const SETTINGS: [&str; 7] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/pip.conf",
    "/etc/ssl/certs/ca-certificates.crt",
    "/usr/local/share/ca-certificates",
    "/etc/apt/auth.conf.d",
    "/etc/apt/trusted.gpg.d",
];

/// The script that the first process of the namespaces runs. Its arguments are the folder of the
/// layer, the system, the folders of Rust, the checkout, and the command. Mounts and processes end
/// with the namespaces.
const INSIDE: &str = r#"
set -eu
run=$1 lower=$2 rustup=$3 cargo=$4 checkout=$5; shift 5
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$run/upper,workdir=$run/work" "$run/root"
cd "$run/root"
mkdir -p proc sys dev root/.rustup root/.cargo/bin
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -o bind,ro "$rustup" root/.rustup
mount -o bind,ro "$cargo/bin" root/.cargo/bin
exec chroot . /bin/sh -c 'cd "$0"; "$@"; exit $?' "$checkout" "$@"
"#;

/// Runs `argv` in the minimal Debian and returns its exit code.
pub fn run(argv: &[OsString]) -> ExitCode {
    match bare(argv) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("bare: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn bare(argv: &[OsString]) -> Result<u8, Box<dyn Error>> {
    if !sys::is_root() {
        return Err("only root can make a root of its own; run it with sudo".into());
    }
    let system = system(INCLUDED)?;
    let layer = Layer::create(&cache::dir().join("bare"))?;
    carry_in(&layer.upper())?;
    progress::step(format!("in a bare Debian: {}", shown(argv)));
    let signals = sys::signals_as_bytes(&session::ENDING)?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--pid", "--ipc", "--fork", "--kill-child", "--propagation", "private"])
        .args(["/bin/sh", "-c", INSIDE, "bare"])
        .arg(&layer.0)
        .arg(system)
        .arg(home("RUSTUP_HOME", ".rustup"))
        .arg(home("CARGO_HOME", ".cargo"))
        .arg(checkout::root())
        .args(argv)
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| is_passed(&name.to_string_lossy())))
        .env("HOME", HOME)
        .env("PATH", format!("{HOME}/.cargo/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"));
    sys::die_with_parent(&mut command, Vec::new());
    let mut child = command.spawn()?;
    let status = wait(&mut child, &signals)?;
    Ok(status.code().unwrap_or(128 + status.signal().unwrap_or(0)) as u8)
}

fn shown(argv: &[OsString]) -> String {
    argv.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Waits for the command. A signal to this program reaches the command only through the terminal;
/// after [`GRACE`] its whole namespace is killed.
fn wait(child: &mut Child, signals: &io::PipeReader) -> io::Result<ExitStatus> {
    let ended = sys::pidfd(child.id())?;
    let both = |until| {
        let wait = |fd| Waiting { fd: Some(fd), events: READABLE };
        sys::poll([wait(ended.as_fd()), wait(signals.as_fd())], until)
    };
    while let [0, signalled] = both(None)? {
        if signalled != 0 && !session::pending(signals).is_empty() {
            let waiting = [Waiting { fd: Some(ended.as_fd()), events: READABLE }];
            if let [0] = sys::poll(waiting, Some(GRACE))? {
                child.kill()?;
            }
            break;
        }
    }
    child.wait()
}

/// Returns a minimal Debian with the packages of `included`, and makes it first if the cache does
/// not have it.
pub fn system(included: &str) -> Result<PathBuf, Box<dyn Error>> {
    let sources = debian_sources()?;
    let texts: Vec<Vec<u8>> = sources.iter().map(fs::read).collect::<io::Result<_>>()?;
    let recipe = RECIPE.to_le_bytes();
    let parts = [&recipe[..], included.as_bytes()];
    let key = short_hash(parts.into_iter().chain(texts.iter().map(Vec::as_slice)));
    let base = cache::dir().join("bare");
    let system = base.join(&key);
    fs::create_dir_all(&base)?;
    let lock = File::create(base.join("lock"))?;
    if !sys::lock(&lock, LOCK_DEADLINE)? {
        return Err("another process still makes the bare system".into());
    }
    if system.exists() {
        return Ok(system);
    }
    packages::install(&["mmdebstrap"])?;
    progress::step("making a minimal Debian (once)");
    // The holder of the lock is alone, so the rest of an interrupted run can be removed.
    let building = base.join("building");
    let _ = fs::remove_dir_all(&building);
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap
        .args(["--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--quiet"])
        .arg(format!("--include={included}"))
        .args(acquire_settings()?.iter().map(|line| format!("--aptopt={line}")))
        .arg(packages::codename()?)
        .arg(&building)
        .args(&sources)
        .stdin(Stdio::null());
    let status = mmdebstrap.status()?;
    if !status.success() {
        let _ = fs::remove_dir_all(&building);
        return Err(format!("mmdebstrap failed ({status})").into());
    }
    fs::rename(&building, &system)?;
    Ok(system)
}

/// Returns the files that name this machine's Debian mirrors, without sources of other projects.
fn debian_sources() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let codename = packages::codename()?;
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    for entry in fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten() {
        files.push(entry?.path());
    }
    files.retain(|file| {
        let is_read = file.extension().is_some_and(|ext| ext == "list" || ext == "sources");
        is_read && fs::read_to_string(file).is_ok_and(|text| names_release(&text, &codename))
    });
    files.sort();
    if files.is_empty() {
        return Err(format!("no file of /etc/apt names a mirror of {codename}").into());
    }
    Ok(files)
}

/// Returns whether a list of sources contains this release, in either of apt's formats.
fn names_release(text: &str, codename: &str) -> bool {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let mut words = lines
        .filter(|line| line.starts_with("deb ") || line.starts_with("Suites:"))
        .flat_map(str::split_whitespace);
    words.any(|word| word == codename)
}

/// Returns this machine's settings for apt's downloads, line by line, without the hooks of other
/// packages.
fn acquire_settings() -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/etc/apt/apt.conf.d")? {
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        found.extend(acquire_lines(&text));
    }
    found.sort();
    Ok(found)
}

fn acquire_lines(text: &str) -> impl Iterator<Item = String> {
    let lines = text.lines().map(str::trim);
    lines.filter(|line| line.starts_with("Acquire::") && line.ends_with(';')).map(str::to_owned)
}

/// Copies the settings and the checkout of this machine into a layer.
fn carry_in(upper: &Path) -> Result<(), Box<dyn Error>> {
    for path in SETTINGS.map(Path::new).into_iter().filter(|path| path.exists()) {
        copy(path, &inside(upper, path))?;
    }
    for name in ["config.toml", "config"] {
        let file = home("CARGO_HOME", ".cargo").join(name);
        if file.exists() {
            copy(&file, &inside(upper, &Path::new(HOME).join(".cargo").join(name)))?;
        }
    }
    let root = checkout::root();
    let place = inside(upper, &root);
    fs::create_dir_all(&place)?;
    expect("copying the checkout", &mut checkout::copy_to(&place))
}

/// Returns the place of a path of the system in the layer over it.
fn inside(upper: &Path, path: &Path) -> PathBuf {
    upper.join(path.strip_prefix("/").unwrap_or(path))
}

fn copy(from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    // Links are followed, because they may have no target in the layer.
    let mut cp = Command::new("cp");
    expect("copying a setting", cp.args(["-rL", "--no-target-directory"]).arg(from).arg(to))
}

fn expect(what: &str, command: &mut Command) -> Result<(), Box<dyn Error>> {
    let status = command.stdin(Stdio::null()).status()?;
    if status.success() { Ok(()) } else { Err(format!("{what} failed ({status})").into()) }
}

fn home(variable: &str, name: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| HOME.into())).join(name),
        PathBuf::from,
    )
}

/// Returns whether an environment variable is passed on: how registries are reached, and how output
/// is shown.
fn is_passed(name: &str) -> bool {
    const NAMES: [&str; 4] = ["TERM", "CI", "SSL_CERT_FILE", "SSL_CERT_DIR"];
    const PREFIXES: [&str; 5] =
        ["CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR", "CARGO_TERM_", "PIP_"];
    NAMES.contains(&name)
        || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || name.to_ascii_lowercase().ends_with("_proxy")
        || (name.starts_with("RUSTUP_") && name != "RUSTUP_HOME")
}

/// The folder of one run's layer, which is locked during the run and removed afterwards.
struct Layer(PathBuf);

impl Layer {
    fn create(base: &Path) -> io::Result<Self> {
        for entry in fs::read_dir(base)?.flatten() {
            let stale = entry.file_name().to_string_lossy().starts_with("run.");
            let lock = || File::open(entry.path().join("lock"));
            if stale && lock().is_ok_and(|lock| sys::lock(&lock, Duration::ZERO).unwrap_or(false)) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let path = base.join(format!("run.{}", std::process::id()));
        for name in ["upper", "work", "root"] {
            fs::create_dir_all(path.join(name))?;
        }
        let lock = File::create(path.join("lock"))?;
        sys::lock(&lock, Duration::ZERO)?;
        // The lock is held until this process ends.
        std::mem::forget(lock);
        Ok(Layer(path))
    }

    fn upper(&self) -> PathBuf {
        self.0.join("upper")
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        // The next run removes what cannot be removed now.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_of_another_project_are_not_debian() {
        assert!(names_release("Types: deb\nSuites: bookworm bookworm-updates\n", "bookworm"));
        assert!(names_release("deb [signed-by=/k] http://m/debian bookworm main\n", "bookworm"));
        assert!(!names_release("deb http://m/apt tool-bookworm main\n", "bookworm"));
        assert!(!names_release("# deb http://m/debian bookworm main\n", "bookworm"));
    }

    #[test]
    fn settings_of_apt_are_carried_without_hooks() {
        let text =
            "Acquire::Retries \"3\";\nDPkg::Post-Invoke {\"x\";};\nAcquire::IndexTargets {\n";
        assert_eq!(acquire_lines(text).collect::<Vec<_>>(), ["Acquire::Retries \"3\";"]);
    }

    #[test]
    fn variables_that_reach_registries_are_passed_and_secrets_are_not() {
        assert!(is_passed("https_proxy") && is_passed("PIP_CERT") && is_passed("RUSTUP_TOOLCHAIN"));
        assert!(!is_passed("SSH_AUTH_SOCK") && !is_passed("RUSTUP_HOME") && !is_passed("PATH"));
    }

    #[test]
    fn layer_of_a_run_that_was_killed_is_removed_by_the_next() {
        let base = tempfile::tempdir().unwrap();
        fs::create_dir_all(base.path().join("run.1/upper")).unwrap();
        File::create(base.path().join("run.1/lock")).unwrap();
        let layer = Layer::create(base.path()).unwrap();
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 1);
        drop(layer);
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
    }
}
