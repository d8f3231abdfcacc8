//! The parts of the build that come from Debian: tools, which are installed, and the kernel source,
//! which is only unpacked.
//!
//! With this module `make kernel` works on a new machine and leaves no package of 150 MB installed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, io};

use super::step::{Progress, Step, StepError};
use super::sys;

/// The source package of the long-term series that Debian maintains.
pub const SOURCE_PACKAGE: &str = "linux-source-6.12";

/// The packages that compiling needs in addition to an essential system; libelf is for objtool, bc
/// for time constants.
const TOOLS: [&str; 8] =
    ["bc", "binutils", "bison", "flex", "gcc", "libelf-dev", "make", "xz-utils"];

/// Patterns of files that no x86 guest compiles, three of five in the tarball. They are not
/// unpacked, which saves writing and removing them. Kconfig files and Makefiles are unpacked, since
/// all of them are read.
const UNUSED: [&str; 15] = [
    "Documentation/*/*",
    "arch/[a-w]*/*.[chS]",
    "arch/[a-w]*/*.dts*",
    "drivers/gpu/*.[ch]",
    "drivers/iio/*.[ch]",
    "drivers/infiniband/*.[ch]",
    "drivers/media/*.[ch]",
    "drivers/net/ethernet/*.[ch]",
    "drivers/net/wireless/*.[ch]",
    "drivers/scsi/*.[ch]",
    "drivers/staging/*.[ch]",
    "drivers/usb/*.[ch]",
    "sound/*.[ch]",
    "tools/perf/*",
    "tools/testing/*",
];

const APT_LIMIT: Duration = Duration::from_secs(20 * 60);
const UNPACK_LIMIT: Duration = Duration::from_secs(10 * 60);

#[derive(Debug, thiserror::Error)]
pub enum DebianError {
    #[error("run {program}: is this a Debian system?")]
    Query {
        program: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("missing packages; as root: apt-get install --no-install-recommends {0}")]
    NotRoot(String),
    #[error("apt offers no {SOURCE_PACKAGE}: is bookworm-security among its sources?")]
    NoSource,
    #[error("install {0}")]
    Install(String, #[source] StepError),
    #[error("refresh the package lists")]
    Update(#[source] StepError),
    #[error("download {SOURCE_PACKAGE} {version}")]
    Download {
        version: String,
        #[source]
        source: StepError,
    },
    #[error("unpack {SOURCE_PACKAGE}")]
    Unpack(#[source] StepError),
    #[error("look into {dir}")]
    Look {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{SOURCE_PACKAGE} no longer holds {0}")]
    Contents(&'static str),
}

/// Returns the version of the source that apt would install now, or `None` if its lists do not
/// contain it.
pub fn candidate() -> Result<Option<String>, DebianError> {
    let output = Command::new("apt-cache")
        .args(["policy", SOURCE_PACKAGE])
        .env("LC_ALL", "C")
        .output()
        .map_err(|source| DebianError::Query { program: "apt-cache", source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    Ok(version.filter(|v| *v != "(none)").map(str::to_owned))
}

/// Refreshes apt's lists if this process is root, and uses the existing lists otherwise.
pub fn update(log: &Path, progress: &mut Progress) -> Result<(), DebianError> {
    if !sys::is_root() {
        return Ok(());
    }
    progress.phase("refreshing the package lists");
    let mut apt = apt_get();
    apt.arg("update");
    apt_step(log).run(apt, progress).map_err(DebianError::Update)
}

/// Installs the tools that are missing. Fails if this process is not root.
pub fn install_tools(log: &Path, progress: &mut Progress) -> Result<(), DebianError> {
    let mut missing = Vec::new();
    for tool in TOOLS {
        if !installed(tool)? {
            missing.push(tool);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    if !sys::is_root() {
        return Err(DebianError::NotRoot(names));
    }
    progress.phase(&format!("installing {names}"));
    let mut apt = apt_get();
    apt.args(["install", "--yes", "--no-install-recommends"]).args(missing);
    apt_step(log).run(apt, progress).map_err(|e| DebianError::Install(names, e))
}

/// The unpacked source, and the tarball whose date makes builds reproducible.
pub struct Source {
    pub tree: PathBuf,
    pub tarball: PathBuf,
}

/// Downloads and unpacks the source into `dir`.
pub fn unpack_source(
    version: &str,
    dir: &Path,
    log: &Path,
    progress: &mut Progress,
) -> Result<Source, DebianError> {
    progress.phase(&format!("downloading {SOURCE_PACKAGE} {version} (150 MB)"));
    let mut apt = apt_get();
    apt.current_dir(dir).arg("download").arg(format!("{SOURCE_PACKAGE}={version}"));
    apt_step(log)
        .run(apt, progress)
        .map_err(|source| DebianError::Download { version: version.into(), source })?;

    progress.phase("unpacking the source");
    let package = entry(dir, |name| name.ends_with(".deb"), "a package")?;
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.arg("--extract").arg(&package).arg(dir.join("package"));
    let unpack = Step { log, limit: UNPACK_LIMIT, expected: 0 };
    unpack.run(dpkg, progress).map_err(DebianError::Unpack)?;
    let is_tarball = |name: &str| name.starts_with("linux-source-") && name.contains(".tar.");
    let tarball = entry(&dir.join("package/usr/src"), is_tarball, "a source tarball")?;
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(&tarball).arg("--directory").arg(dir).arg("--anchored");
    tar.args(UNUSED.map(|pattern| format!("--exclude={SOURCE_PACKAGE}/{pattern}")));
    unpack.run(tar, progress).map_err(DebianError::Unpack)?;
    let tree = entry(dir, |name| name == SOURCE_PACKAGE, "its source folder")?;
    Ok(Source { tree, tarball })
}

fn entry(
    dir: &Path,
    wanted: impl Fn(&str) -> bool,
    what: &'static str,
) -> Result<PathBuf, DebianError> {
    let error = |source| DebianError::Look { dir: dir.into(), source };
    for entry in fs::read_dir(dir).map_err(error)? {
        let entry = entry.map_err(error)?;
        if entry.file_name().to_str().is_some_and(&wanted) {
            return Ok(entry.path());
        }
    }
    Err(DebianError::Contents(what))
}

fn installed(package: &str) -> Result<bool, DebianError> {
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat=${db:Status-Status}", package])
        .output()
        .map_err(|source| DebianError::Query { program: "dpkg-query", source })?;
    Ok(output.status.success() && output.stdout == b"installed")
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command
        .args(["-o", "DPkg::Lock::Timeout=300", "-o", "APT::Sandbox::User=root"])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("LC_ALL", "C");
    command
}

fn apt_step(log: &Path) -> Step<'_> {
    Step { log, limit: APT_LIMIT, expected: 0 }
}
