//! Downloads Debian packages with apt, into private directories.
//!
//! apt handles mirrors, signatures and dependencies, and the host's own package state is not
//! touched.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::cache::{Cache, CacheError, Lock};
use crate::progress::Progress;
use crate::tool::{self, Said, ToolError};

/// The age up to which package lists are not fetched again.
const LISTS_FRESH: Duration = Duration::from_secs(60 * 60);
/// Disk space for the lists and apt's index of them, with room for a few packages.
const LISTS_MIB: u64 = 256;
const UPDATE_DEADLINE: Duration = Duration::from_secs(5 * 60);
const RESOLVE_DEADLINE: Duration = Duration::from_secs(60);
const DOWNLOAD_DEADLINE: Duration = Duration::from_secs(20 * 60);

/// Packages that only serve maintainer scripts, which never run here. apt sees them as installed;
/// otherwise they would pull perl and dpkg into every image.
const STAND_INS: [(&str, &str); 4] = [
    ("debconf", "Provides: debconf-2.0\n"),
    ("dpkg", ""),
    ("init-system-helpers", ""),
    ("usr-is-merged", ""),
];

#[derive(Debug, thiserror::Error)]
pub enum PackagesError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(
        "apt-get is missing: kernels and templates come from Debian packages, so prepare them on a Debian host, or pass --kernel and --rootfs"
    )]
    NoApt,
    #[error("cannot prepare apt's directory {}", path.display())]
    Prepare { path: PathBuf, source: io::Error },
    #[error("cannot reach the package mirrors of /etc/apt ({said}): check the network and retry")]
    Unreachable { said: String },
    #[error(
        "--packages: no Debian package is called {package:?}: look it up with `apt-cache search`"
    )]
    Unknown { package: String },
    #[error(
        "the package sources in /etc/apt have no {package}: add those of bookworm-security, or pass --kernel"
    )]
    NoKernel { package: String },
    #[error(
        "--packages: {package:?} is not a package name (lower-case letters, digits, and + - .)"
    )]
    Name { package: String },
    #[error("apt cannot install these packages together: {said}")]
    Resolve { said: String },
    #[error(transparent)]
    Tool(ToolError),
    #[error("apt downloaded no {}", path.display())]
    NotDownloaded { path: PathBuf },
}

/// One package at one version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Package {
    pub name: String,
    pub version: String,
    pub architecture: String,
}

impl Package {
    /// Returns the file name that apt gives the package, with colons in the version escaped.
    fn file_name(&self) -> String {
        let version = self.version.replace(':', "%3a");
        format!("{}_{version}_{}.deb", self.name, self.architecture)
    }
}

/// apt on private directories, locked for one process at a time.
pub struct Apt {
    dir: PathBuf,
    _lock: Lock,
}

impl Apt {
    /// Opens the private directories and fetches the package lists again if they are old.
    pub fn open(cache: &Cache, progress: &mut dyn Progress) -> Result<Apt, PackagesError> {
        let lock = cache.lock("apt", "state", progress)?;
        let apt = Apt { dir: cache.root().join("apt"), _lock: lock };
        apt.prepare()?;
        if !apt.lists_fresh() {
            cache.need_mib(LISTS_MIB)?;
            apt.update(progress)?;
        }
        Ok(apt)
    }

    fn prepare(&self) -> Result<(), PackagesError> {
        let prepared = |path: &Path, result: io::Result<()>| {
            result.map_err(|source| PackagesError::Prepare { path: path.to_owned(), source })
        };
        for sub in ["state/lists/partial", "cache/archives/partial"] {
            let path = self.dir.join(sub);
            prepared(&path, fs::create_dir_all(&path))?;
        }
        for (name, content) in [("status", status()), ("apt.conf", configuration(&self.dir))] {
            let path = self.dir.join(name);
            prepared(&path, fs::write(&path, content))?;
        }
        Ok(())
    }

    fn stamp(&self) -> PathBuf {
        self.dir.join("updated")
    }

    fn lists_fresh(&self) -> bool {
        let written = fs::metadata(self.stamp()).and_then(|meta| meta.modified());
        let age = written.ok().and_then(|at| SystemTime::now().duration_since(at).ok());
        age.is_some_and(|age| age < LISTS_FRESH) && self.has_lists()
    }

    fn has_lists(&self) -> bool {
        let lists = fs::read_dir(self.dir.join("state/lists")).into_iter().flatten().flatten();
        lists.into_iter().any(|entry| entry.file_name().to_string_lossy().contains("_Packages"))
    }

    /// Fetches the package lists. A source that fails does not matter if the others have what is
    /// needed.
    fn update(&self, progress: &mut dyn Progress) -> Result<(), PackagesError> {
        progress.step("Fetching Debian package lists");
        let mut command = self.command("apt-get");
        command.args(["--quiet", "update"]);
        let updated = tool::run(command, "apt", UPDATE_DEADLINE, progress, fetched);
        let (said, whole) = match updated {
            Ok(said) => (said.err, true),
            Err(ToolError::Failed { lines, .. }) => (lines, false),
            Err(err) => return Err(tool_error(err)),
        };
        let failed = said.iter().find(|line| line.contains("Failed to fetch"));
        match failed.or(said.first()) {
            Some(line) if !self.has_lists() => {
                return Err(PackagesError::Unreachable { said: trimmed(line) });
            }
            None if !self.has_lists() => {
                let said = "it names no source".to_owned();
                return Err(PackagesError::Unreachable { said });
            }
            // Stale lists are better than none; the next run tries again.
            Some(line) if failed.is_some() || !whole => log::warn!("apt-get update: {line}"),
            _ => {
                let path = self.stamp();
                fs::write(&path, "").map_err(|source| PackagesError::Prepare { path, source })?;
                // Removes packages that the mirrors have replaced; failure does not matter.
                let mut command = self.command("apt-get");
                command.args(["--quiet", "autoclean"]);
                let _ = self.run(command, RESOLVE_DEADLINE);
            }
        }
        progress.done();
        Ok(())
    }

    /// Returns the first of `names` that exists, as the real kernel package behind the
    /// meta-package.
    pub fn kernel(&self, names: &[&str]) -> Result<Package, PackagesError> {
        for name in names {
            // A meta-package depends on the real kernel package of its flavour.
            let depends = self.ask(&["depends", "--important", name])?;
            let real = depends.iter().find_map(|line| line.trim().strip_prefix("Depends: "));
            let real = real.filter(|real| real.starts_with("linux-image-")).unwrap_or(name);
            let shown = self.ask(&["show", "--no-all-versions", real])?;
            let field = |name: &str| shown.iter().find_map(|line| line.strip_prefix(name));
            if let (Some(version), Some(architecture)) =
                (field("Version: "), field("Architecture: "))
            {
                let (version, architecture) = (version.to_owned(), architecture.to_owned());
                return Ok(Package { name: real.to_owned(), version, architecture });
            }
        }
        Err(PackagesError::NoKernel { package: names.join(" or ") })
    }

    /// Returns the output of apt-cache; empty if the package is unknown.
    fn ask(&self, arguments: &[&str]) -> Result<Vec<String>, PackagesError> {
        let mut command = self.command("apt-cache");
        command.args(arguments);
        match self.run(command, RESOLVE_DEADLINE) {
            Ok(said) => Ok(said.out),
            Err(ToolError::Failed { .. }) => Ok(Vec::new()),
            Err(err) => Err(tool_error(err)),
        }
    }

    /// Returns `names` with all dependencies, as apt would install them on an empty system.
    pub fn resolve(&self, names: &[String]) -> Result<Vec<Package>, PackagesError> {
        for name in names {
            check_name(name)?;
        }
        let mut command = self.command("apt-get");
        command.args(["--quiet", "--yes", "--simulate", "install"]).args(names);
        let said = self.run(command, RESOLVE_DEADLINE).map_err(resolve_error)?;
        Ok(said.out.iter().filter_map(|line| parse_inst(line)).collect())
    }

    /// Downloads exactly these packages, without dependencies, and returns the paths of their
    /// files.
    pub fn download(
        &self,
        packages: &[Package],
        progress: &mut dyn Progress,
    ) -> Result<Vec<PathBuf>, PackagesError> {
        let archives = self.dir.join("cache/archives");
        let paths: Vec<_> = packages.iter().map(|p| archives.join(p.file_name())).collect();
        let absent: Vec<_> = packages
            .iter()
            .zip(&paths)
            .filter(|(_, path)| !path.exists())
            .map(|(p, _)| p)
            .collect();
        if absent.is_empty() {
            return Ok(paths);
        }
        progress.step(&match absent.as_slice() {
            [one] => format!("Downloading Debian package {} {}", one.name, one.version),
            more => format!("Downloading {} Debian packages", more.len()),
        });
        let mut command = self.command("apt-get");
        // `download` writes into the current directory, after checking the digest.
        command.current_dir(&archives).args(["--quiet", "download"]);
        command.args(absent.iter().map(|p| format!("{}={}", p.name, p.version)));
        tool::run(command, "apt", DOWNLOAD_DEADLINE, progress, fetched).map_err(|err| {
            // The mirrors may be newer than the lists, so they are fetched again next time.
            let _ = fs::remove_file(self.stamp());
            download_error(err)
        })?;
        if let Some(path) = paths.iter().find(|path| !path.exists()) {
            return Err(PackagesError::NotDownloaded { path: path.clone() });
        }
        progress.done();
        Ok(paths)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("--config-file").arg(self.dir.join("apt.conf"));
        command
    }

    fn run(&self, command: Command, deadline: Duration) -> Result<Said, ToolError> {
        tool::run_quietly(command, "apt", deadline)
    }
}

/// Refuses a name that apt would read as an option, a file or a pattern.
pub fn check_name(package: &str) -> Result<(), PackagesError> {
    let fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = package.as_bytes();
    let valid = bytes.len() >= 2
        && fine(bytes[0])
        && bytes.iter().all(|&byte| fine(byte) || b"+-.".contains(&byte))
        // apt reads a trailing + or - as "install" or "remove"; of such names only g++ is needed.
        && (!package.ends_with(['-']));
    if valid { Ok(()) } else { Err(PackagesError::Name { package: package.to_owned() }) }
}

/// Returns the database of installed packages that apt sees: only the stand-ins.
fn status() -> String {
    let stanza = |(name, extra): &(&str, &str)| {
        format!(
            "Package: {name}\nStatus: install ok installed\nArchitecture: all\nMulti-Arch: foreign\n\
             Version: 999\nMaintainer: pvmm\n{extra}Description: stands in\n\n"
        )
    };
    STAND_INS.iter().map(stanza).collect()
}

/// Returns apt's configuration. A file and not options, because only a file can clear the host's
/// hooks; it is read after the host's own, so that the host's mirrors, keys and proxy still apply.
fn configuration(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        r#"Dir::State "{dir}/state";
Dir::State::status "{dir}/status";
Dir::Cache "{dir}/cache";
Dir::Cache::archives "archives";
Dir::Cache::pkgcache "pkgcache.bin";
Dir::Cache::srcpkgcache "srcpkgcache.bin";
Dir::Log "{dir}";
Debug::NoLocking "1";
APT::Architecture "amd64";
APT::Install-Recommends "0";
APT::Install-Suggests "0";
APT::Sandbox::User "root";
Acquire::Languages {{ "none"; }};
Acquire::GzipIndexes "false";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Retries "3";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
"#
    )
}

/// Parses a line of `apt-get --simulate install`: `Inst NAME (VERSION ORIGIN... [ARCH])`.
fn parse_inst(line: &str) -> Option<Package> {
    let (name, rest) = line.strip_prefix("Inst ")?.split_once(" (")?;
    // The rest after the parenthesis is not used.
    let inside = rest.split(')').next()?;
    let version = inside.split_whitespace().next()?;
    let architecture = inside.rsplit_once('[')?.1.split(']').next()?;
    // `[old version]` precedes the parenthesis if a package is already installed.
    let name = name.split_whitespace().next()?;
    let owned = |text: &str| text.to_owned();
    Some(Package { name: owned(name), version: owned(version), architecture: owned(architecture) })
}

/// Parses `Get:12 MIRROR SUITE ARCH NAME ARCH VERSION [SIZE]` to show which file is being fetched.
fn fetched(line: &str) -> Option<String> {
    let mut words = line.strip_prefix("Get:")?.split_whitespace().skip(2);
    let suite = words.next()?;
    match (words.nth(1), words.nth(1)) {
        (Some(name), Some(version)) => Some(format!("{name} {version}")),
        _ => Some(suite.to_owned()),
    }
}

fn trimmed(line: &str) -> String {
    line.trim_start_matches(['E', 'W']).trim_start_matches(':').trim().to_owned()
}

fn tool_error(err: ToolError) -> PackagesError {
    match err {
        ToolError::Missing { .. } => PackagesError::NoApt,
        err => PackagesError::Tool(err),
    }
}

fn resolve_error(err: ToolError) -> PackagesError {
    let ToolError::Failed { lines, said, .. } = err else { return tool_error(err) };
    let unknown = lines.iter().find_map(|line| {
        let located = line.strip_prefix("E: Unable to locate package ");
        let candidate = line.strip_prefix("E: Package '");
        located.or_else(|| candidate?.strip_suffix("' has no installation candidate"))
    });
    match unknown {
        Some(package) => PackagesError::Unknown { package: package.to_owned() },
        None => PackagesError::Resolve { said },
    }
}

fn download_error(err: ToolError) -> PackagesError {
    match err {
        ToolError::Failed { said, .. } => PackagesError::Unreachable { said },
        err => tool_error(err),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inst_line_with_epoch_gives_the_file_apt_writes() {
        let line = "Inst tar (1:1.34+dfsg-1.2 Debian:12.15/oldstable, Debian-Security:12 [amd64])";
        let package = parse_inst(line).unwrap();
        assert_eq!(package.file_name(), "tar_1%3a1.34+dfsg-1.2_amd64.deb");
        assert_eq!(parse_inst("Conf tar (1.34 Debian [amd64])"), None);
    }

    #[test]
    fn inst_line_of_upgrade_gives_the_new_version() {
        let package = parse_inst("Inst bash [5.1] (5.2 Debian:12 [amd64]) []").unwrap();
        assert_eq!(package.file_name(), "bash_5.2_amd64.deb");
    }

    #[test]
    fn package_name_that_apt_would_misread_is_refused() {
        for bad in ["", "a", "-o", "Foo", "a b", "a/b", "foo-", "./x.deb", "x;y", "a*"] {
            assert!(matches!(check_name(bad), Err(PackagesError::Name { .. })), "{bad}");
        }
        for good in ["git", "g++", "libstdc++6", "python3.11", "7zip"] {
            check_name(good).unwrap();
        }
    }

    #[test]
    fn apt_failures_become_the_field_that_is_wrong() {
        let failed = |line: &str| ToolError::Failed {
            tool: "apt-get".into(),
            said: line.trim_start_matches("E: ").into(),
            lines: vec![line.into()],
        };
        let unknown = resolve_error(failed("E: Unable to locate package nonesuch"));
        assert!(unknown.to_string().contains("\"nonesuch\""), "{unknown}");
        let broken = resolve_error(failed("E: Unable to correct problems"));
        assert!(matches!(broken, PackagesError::Resolve { .. }), "{broken}");
        let missing = tool_error(ToolError::Missing { tool: "apt-get".into(), package: "apt" });
        assert!(matches!(missing, PackagesError::NoApt));
    }

    #[test]
    fn fetched_line_tells_name_and_version() {
        let package = "Get:2 http://m/debian bookworm/main amd64 bash amd64 5.2 [1 kB]";
        assert_eq!(fetched(package).as_deref(), Some("bash 5.2"));
        let list = "Get:1 http://m/debian bookworm InRelease [151 kB]";
        assert_eq!(fetched(list).as_deref(), Some("bookworm"));
        assert_eq!(fetched("Reading package lists..."), None);
    }
}
