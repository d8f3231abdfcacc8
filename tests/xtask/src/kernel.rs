//! `cargo xtask kernel`: builds the guest kernel from `kernel-config/` and Debian's source.
//!
//! The kernel is kept in the cache that all commands share, under a key made from its inputs. A
//! kernel that is in the cache is not built again.

mod debian;
mod options;
mod step;
mod sys;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant, UNIX_EPOCH};

use serde::Serialize;
use sha2::{Digest, Sha256};

use debian::{DebianError, SOURCE_PACKAGE, Source};
use options::{OptionsError, Wanted};
use step::{Progress, Step, StepError};

const USAGE: &str = "usage: cargo xtask kernel [--force | --print-path]
  builds the guest kernel unless the cache has it, and makes it the current one
  --force       build even if the cache has it
  --print-path  print where the kernel is and build nothing; fails if it has not been built";

/// The number of files that `make` reports for these options. It is only used for the percentage.
const EXPECTED_FILES: u64 = 2200;
/// Limits for a step that hangs: configuring takes seconds, and compiling takes minutes.
const CONFIGURE_LIMIT: Duration = Duration::from_secs(10 * 60);
const COMPILE_LIMIT: Duration = Duration::from_secs(3 * 60 * 60);
/// How long to wait for another build.
const LOCK_LIMIT: Duration = COMPILE_LIMIT;

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("{0}")]
    Usage(String),
    #[error("neither XDG_CACHE_HOME nor HOME is set: no place for the kernel")]
    NoCache,
    #[error("not built yet: run `make kernel`")]
    NotBuilt,
    #[error("another build holds {0} for too long")]
    Locked(PathBuf),
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Options(#[from] OptionsError),
    #[error(transparent)]
    Debian(#[from] DebianError),
    #[error("configure")]
    Configure(#[source] StepError),
    #[error("compile")]
    Compile(#[source] StepError),
    #[error("catch signals")]
    Signals(#[source] io::Error),
    #[error("{act} {path}")]
    File {
        act: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The description of a kernel in the cache, which is stored with it.
#[derive(Serialize)]
struct Meta<'a> {
    key: &'a str,
    source_package: &'a str,
    source_version: &'a str,
    release: String,
    vmlinux_bytes: u64,
    vmlinux_sha256: String,
    build_seconds: u64,
}

/// Runs the verb. Prints an error as one line.
pub fn run(args: &[String]) -> ExitCode {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        [] => ensure(false),
        ["--force"] => ensure(true),
        ["--print-path"] => find(),
        ["--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => Err(KernelError::Usage(USAGE.into())),
    };
    match result {
        Ok(vmlinux) => {
            println!("{}", vmlinux.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            let mut line = format!("kernel: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                line.push_str(&format!(": {error}"));
                cause = error.source();
            }
            eprintln!("{line}");
            ExitCode::from(match error {
                KernelError::Usage(_) => 2,
                _ if sys::interrupted() => 130,
                _ => 1,
            })
        }
    }
}

/// Returns the kernel of these options. Fails if it has not been built.
fn find() -> Result<PathBuf, KernelError> {
    let version = debian::candidate()?.ok_or(DebianError::NoSource)?;
    let key = wanted()?.key(SOURCE_PACKAGE, &version);
    let vmlinux = kernels()?.join(key).join("vmlinux");
    if vmlinux.is_file() { Ok(vmlinux) } else { Err(KernelError::NotBuilt) }
}

/// Returns the kernel of these options, builds it if necessary, and makes it the current one.
pub fn ensure(force: bool) -> Result<PathBuf, KernelError> {
    let mut progress = Progress::start();
    let kernels = kernels()?;
    let wanted = wanted()?;
    if let (false, Some(version)) = (force, debian::candidate()?) {
        let key = wanted.key(SOURCE_PACKAGE, &version);
        if kernels.join(&key).join("vmlinux").is_file() {
            return make_current(&kernels, &key);
        }
    }
    sys::catch_interrupts().map_err(KernelError::Signals)?;
    fs::create_dir_all(&kernels).map_err(file("create", &kernels))?;
    let _lock = lock(&kernels, &mut progress)?;
    remove_stale(&kernels);

    let tree = BuildTree::create(&kernels)?;
    let log = tree.0.join("log");
    let built = (|| {
        debian::update(&log, &mut progress)?;
        let version = debian::candidate()?.ok_or(DebianError::NoSource)?;
        let key = wanted.key(SOURCE_PACKAGE, &version);
        // Another process may have built it during the wait, or the new lists name another version.
        if force || !kernels.join(&key).join("vmlinux").is_file() {
            let out = build(&wanted, &key, &version, &tree.0, &log, &mut progress)?;
            replace(&out, &kernels.join(&key), &tree.0)?;
        }
        make_current(&kernels, &key)
    })();
    let failed = kernels.join("failed.log");
    match &built {
        Ok(_) => {
            // The file usually does not exist.
            let _ = fs::remove_file(failed);
        }
        Err(_) if sys::interrupted() => {
            progress.phase("interrupted; removing the build tree (once more leaves it behind)");
        }
        Err(_) => {
            if fs::rename(&log, &failed).is_ok() {
                progress.phase(&format!("failed; the log is {}", failed.display()));
            }
        }
    }
    built
}

/// Configures and compiles in `tree`. Returns the folder that contains the result.
fn build(
    wanted: &Wanted,
    key: &str,
    version: &str,
    tree: &Path,
    log: &Path,
    progress: &mut Progress,
) -> Result<PathBuf, KernelError> {
    debian::install_tools(log, progress)?;
    let source = debian::unpack_source(version, tree, log, progress)?;
    let objects = tree.join("objects");
    fs::create_dir(&objects).map_err(file("create", &objects))?;

    progress.phase("configuring");
    // allnoconfig with this list works as tinyconfig does with its own: an option that is not named
    // stays off, even if another option makes it visible with a default of yes.
    let merged = tree.join("merged.config");
    fs::write(&merged, wanted.merged()).map_err(file("write", &merged))?;
    let configure = Step { log, limit: CONFIGURE_LIMIT, expected: 0 };
    for target in ["allnoconfig", "olddefconfig"] {
        let mut make = make(&source, &objects)?;
        make.env("KCONFIG_ALLCONFIG", &merged).arg(target);
        configure.run(make, progress).map_err(KernelError::Configure)?;
    }
    let config = objects.join(".config");
    wanted.check(&config)?;

    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    progress.phase(&format!("compiling on {jobs} cores (5 to 7 minutes on two)"));
    let begun = Instant::now();
    let mut make = make(&source, &objects)?;
    make.arg(format!("--jobs={jobs}")).arg("vmlinux");
    let compile = Step { log, limit: COMPILE_LIMIT, expected: EXPECTED_FILES };
    compile.run(make, progress).map_err(KernelError::Compile)?;

    let out = tree.join("out");
    fs::create_dir(&out).map_err(file("create", &out))?;
    let vmlinux = objects.join("vmlinux");
    let image = fs::read(&vmlinux).map_err(file("read", &vmlinux))?;
    let release = objects.join("include/config/kernel.release");
    let meta = Meta {
        key,
        source_package: SOURCE_PACKAGE,
        source_version: version,
        release: fs::read_to_string(&release).map_err(file("read", &release))?.trim().into(),
        vmlinux_bytes: image.len() as u64,
        vmlinux_sha256: Sha256::digest(&image).iter().map(|b| format!("{b:02x}")).collect(),
        build_seconds: begun.elapsed().as_secs(),
    };
    let json = serde_json::to_string_pretty(&meta).map_err(io::Error::other);
    let path = out.join("meta.json");
    fs::write(&path, json.map_err(file("encode", &path))?).map_err(file("write", &path))?;
    fs::rename(&vmlinux, out.join("vmlinux")).map_err(file("move", &vmlinux))?;
    fs::rename(&config, out.join("config")).map_err(file("move", &config))?;
    let (release, bytes) = (meta.release, meta.vmlinux_bytes);
    progress.phase(&format!("built {release}, {:.1} MB", bytes as f64 / 1e6));
    Ok(out)
}

/// Returns a `make` in the source tree that does not depend on its caller: variables of an outer
/// make and the user's kernel settings are removed, and equal sources give equal bytes.
fn make(source: &Source, objects: &Path) -> Result<Command, KernelError> {
    let modified = fs::metadata(&source.tarball).and_then(|m| m.modified());
    let modified = modified.map_err(file("look at", &source.tarball))?;
    let seconds = modified.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let date = Command::new("date")
        .args(["--utc", "--date", &format!("@{seconds}"), "+%Y-%m-%d %H:%M:%S UTC"])
        .output()
        .map_err(file("format the date of", &source.tarball))?;
    let mut make = Command::new("make");
    for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CROSS_COMPILE", "KCFLAGS", "CC", "LD", "O"] {
        make.env_remove(name);
    }
    make.current_dir(&source.tree)
        .env("LC_ALL", "C")
        .env("KBUILD_BUILD_TIMESTAMP", String::from_utf8_lossy(&date.stdout).trim())
        .env("KBUILD_BUILD_USER", "pvmm")
        .env("KBUILD_BUILD_HOST", "pvmm")
        .env("KBUILD_BUILD_VERSION", "1")
        .arg("ARCH=x86_64")
        .arg(format!("O={}", objects.display()));
    Ok(make)
}

/// Moves `new` to `place`, and an older kernel there to `attic`, which is removed later.
fn replace(new: &Path, place: &Path, attic: &Path) -> Result<(), KernelError> {
    if place.exists() {
        fs::rename(place, attic.join("old")).map_err(file("move away", place))?;
    }
    fs::rename(new, place).map_err(file("move into place", place))
}

/// Points `current` at one kernel in a single step, so that a reader never finds it missing.
fn make_current(kernels: &Path, key: &str) -> Result<PathBuf, KernelError> {
    let vmlinux = kernels.join(key).join("vmlinux");
    let current = kernels.join("current");
    if fs::read_link(&current).is_ok_and(|target| target == Path::new(key)) {
        return Ok(vmlinux);
    }
    let fresh = kernels.join(format!("current.{}", std::process::id()));
    symlink(key, &fresh).map_err(file("create", &fresh))?;
    fs::rename(&fresh, &current).map_err(file("replace", &current))?;
    Ok(vmlinux)
}

/// The tree of one build: gigabytes that are removed however the build ends.
struct BuildTree(PathBuf);

const TREE_PREFIX: &str = "building.";

impl BuildTree {
    fn create(kernels: &Path) -> Result<Self, KernelError> {
        let path = kernels.join(format!("{TREE_PREFIX}{}", std::process::id()));
        fs::create_dir(&path).map_err(file("create", &path))?;
        Ok(Self(path))
    }
}

impl Drop for BuildTree {
    fn drop(&mut self) {
        // The next build removes what cannot be removed now.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes what a killed build has left. The caller must hold the lock, so that no other build
/// runs.
fn remove_stale(kernels: &Path) {
    for entry in fs::read_dir(kernels).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(TREE_PREFIX) {
            let _ = fs::remove_dir_all(entry.path());
        } else if name.starts_with("current.") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn lock(kernels: &Path, progress: &mut Progress) -> Result<File, KernelError> {
    let path = kernels.join("lock");
    let lock = File::options().create(true).truncate(false).write(true).open(&path);
    let lock = lock.map_err(file("open", &path))?;
    let until = Instant::now() + LOCK_LIMIT;
    let mut told = false;
    while !sys::try_lock(&lock).map_err(file("lock", &path))? {
        if sys::interrupted() {
            return Err(KernelError::Interrupted);
        }
        if Instant::now() >= until {
            return Err(KernelError::Locked(path));
        }
        if !told {
            progress.phase("waiting for another build");
            told = true;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(lock)
}

fn wanted() -> Result<Wanted, KernelError> {
    Ok(Wanted::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel-config"))?)
}

fn kernels() -> Result<PathBuf, KernelError> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let cache = cache.or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(cache.ok_or(KernelError::NoCache)?.join("pvmm/kernels"))
}

fn file(act: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KernelError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull => KernelError::Compile(StepError::DiskFull),
        _ => KernelError::File { act, path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Cache(PathBuf);

    impl Cache {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("pvmm-kernel-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Cache {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn make_current_second_kernel_replaces_the_link() {
        let cache = Cache::new("current");
        assert_eq!(make_current(&cache.0, "one").unwrap(), cache.0.join("one/vmlinux"));
        make_current(&cache.0, "two").unwrap();
        assert_eq!(fs::read_link(cache.0.join("current")).unwrap(), Path::new("two"));
        assert_eq!(fs::read_dir(&cache.0).unwrap().count(), 1);
    }

    #[test]
    fn build_tree_dropped_or_stale_leaves_nothing() {
        let cache = Cache::new("tree");
        let tree = BuildTree::create(&cache.0).unwrap();
        fs::write(tree.0.join("object"), "").unwrap();
        drop(tree);
        fs::create_dir_all(cache.0.join(format!("{TREE_PREFIX}1/objects"))).unwrap();
        fs::create_dir(cache.0.join("key")).unwrap();
        remove_stale(&cache.0);
        let left: Vec<_> =
            fs::read_dir(&cache.0).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["key"]);
    }

    #[test]
    fn replace_existing_kernel_swaps_it_whole() {
        let cache = Cache::new("replace");
        let (new, place, attic) = (cache.0.join("new"), cache.0.join("key"), cache.0.join("attic"));
        for (dir, text) in [(&new, "new"), (&place, "old"), (&attic, "")] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("vmlinux"), text).unwrap();
        }
        replace(&new, &place, &attic).unwrap();
        assert_eq!(fs::read_to_string(place.join("vmlinux")).unwrap(), "new");
        assert!(!new.exists());
    }
}
