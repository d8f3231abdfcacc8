//! Installs missing Debian packages, and downloads packages that are only unpacked.
//!
//! The project's commands start on a machine that has only Rust. Only this file and the kernel
//! build install packages, and they print what they install.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::progress;
use crate::sys;

/// The keys that sign Debian's releases, later ones too.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    #[error(
        "these Debian packages are missing and only root can install them; run: \
         apt-get install --no-install-recommends {}", .0.join(" ")
    )]
    NotRoot(Vec<String>),
    #[error("these packages are missing and this is not a Debian system: {}", .0.join(" "))]
    NotDebian(Vec<String>),
    #[error("cannot run {0}")]
    Run(&'static str, #[source] io::Error),
    #[error("{what} failed:\n{output}")]
    Failed { what: String, output: String },
    #[error("no package matches {0}")]
    NoMatch(String),
    #[error("cannot read {0}")]
    Read(PathBuf, #[source] io::Error),
}

/// Installs the packages of `names` that are missing. Fails if this process is not root.
pub fn install(names: &[&str]) -> Result<(), PackageError> {
    let missing: Vec<String> =
        names.iter().filter(|name| !is_installed(name)).map(|name| name.to_string()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !Path::new("/usr/bin/apt-get").exists() {
        return Err(PackageError::NotDebian(missing));
    }
    if !sys::is_root() {
        return Err(PackageError::NotRoot(missing));
    }
    progress::step(format!("installing {}", missing.join(" ")));
    let what = format!("installing {}", missing.join(" "));
    let install = || {
        let mut apt = apt_get();
        apt.args(["install", "-y", "--no-install-recommends"]).args(&missing);
        run("apt-get", apt)
    };
    if expect(&what, install()?).is_ok() {
        return Ok(());
    }
    // The lists may be missing, or name versions that the mirror no longer has.
    update()?;
    expect(&what, install()?).map(drop)
}

/// Downloads the package `name` into `dir` and unpacks it to `dir/unpacked`, without installing it.
/// Returns that path.
pub fn unpack(name: &str, dir: &Path) -> Result<PathBuf, PackageError> {
    let download = || {
        let mut apt = apt_get();
        apt.args(["download", name]).current_dir(dir);
        run("apt-get", apt)
    };
    if !download()?.status.success() {
        update()?;
        expect(&format!("downloading {name}"), download()?)?;
    }
    unpack_download(name, dir)
}

/// Downloads and unpacks a package of another release of Debian than this machine's.
pub fn unpack_of(release: &str, name: &str, dir: &Path) -> Result<PathBuf, PackageError> {
    let release = Release::open(release, dir)?;
    release.download(&[name])?;
    let unpacked = unpack_download(name, dir)?;
    release.close()?;
    Ok(unpacked)
}

/// A release of Debian that may be another than this machine's. What apt knows of this machine is
/// not touched: lists and sources of that release are kept in a folder.
pub struct Release<'a> {
    name: &'a str,
    dir: &'a Path,
}

impl<'a> Release<'a> {
    /// Fetches the lists of a release into `dir`.
    pub fn open(name: &'a str, dir: &'a Path) -> Result<Self, PackageError> {
        const LISTS: [&str; 2] = ["state/lists/partial", "cache/archives/partial"];
        let failed = |e| PackageError::Read(dir.to_path_buf(), e);
        LISTS.iter().try_for_each(|list| fs::create_dir_all(dir.join(list))).map_err(failed)?;
        let archive = archive().or_else(|_| update().and_then(|()| archive()))?;
        let source = |kind| format!("{kind} [signed-by={KEYS}] {archive} {name} main\n");
        let sources = source("deb") + &source("deb-src");
        fs::write(dir.join("sources.list"), sources).map_err(failed)?;
        fs::write(dir.join("status"), "").map_err(failed)?;
        let release = Self { name, dir };
        release.apt(&format!("the package lists of {name}"), &["update"])?;
        Ok(release)
    }

    /// Downloads packages into the folder.
    pub fn download(&self, names: &[&str]) -> Result<(), PackageError> {
        let what = format!("downloading {} of {}", names.join(" "), self.name);
        progress::step(&what);
        self.apt(&what, &[&["download"], names].concat())
    }

    /// Downloads the files of a source package into the folder.
    pub fn download_source(&self, name: &str) -> Result<(), PackageError> {
        let what = format!("downloading the source of {name} of {}", self.name);
        progress::step(&what);
        self.apt(&what, &["source", "--download-only", name])
    }

    /// Removes what is apt's: the lists are large and not needed again.
    pub fn close(self) -> Result<(), PackageError> {
        let folders = ["state", "cache"].map(|name| fs::remove_dir_all(self.dir.join(name)));
        let files = ["sources.list", "status"].map(|name| fs::remove_file(self.dir.join(name)));
        let failed = |e| PackageError::Read(self.dir.to_path_buf(), e);
        folders.into_iter().chain(files).try_for_each(|removed| removed.map_err(failed))
    }

    fn apt(&self, what: &str, words: &[&str]) -> Result<(), PackageError> {
        let mut apt = apt_get();
        let places = [
            ("State", "state"),
            ("State::status", "status"),
            ("Cache", "cache"),
            ("Etc::sourcelist", "sources.list"),
        ];
        for (key, place) in places {
            apt.arg("-o").arg(format!("Dir::{key}={}", self.dir.join(place).display()));
        }
        apt.args(["-o", "Dir::Etc::sourceparts=/dev/null", "-o", "APT::Sandbox::User=root"]);
        apt.args(words).current_dir(self.dir);
        expect(what, run("apt-get", apt)?).map(drop)
    }
}

/// Returns the codename of this machine's Debian.
pub fn codename() -> Result<String, PackageError> {
    let path = Path::new("/etc/os-release");
    let text = fs::read_to_string(path).map_err(|e| PackageError::Read(path.into(), e))?;
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let name = name.ok_or_else(|| PackageError::NoMatch("the release of this system".into()))?;
    Ok(name.trim_matches('"').to_owned())
}

/// Returns the address of the archive that this machine's packages are from.
fn archive() -> Result<String, PackageError> {
    let mut apt = apt_get();
    let format = "$(REPO_URI) $(RELEASE) $(COMPONENT)";
    apt.args(["indextargets", "--format", format, "Created-By: Packages"]);
    let said = expect("the list of package sources", run("apt-get", apt)?)?.stdout;
    let said = String::from_utf8_lossy(&said).into_owned();
    let of_release = said.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        // Updates and security fixes have archives of their own, and hyphens in their names.
        matches!(words[..], [_, release, "main"] if !release.contains('-'))
            .then(|| words[0].to_owned())
    });
    of_release.ok_or_else(|| PackageError::NoMatch("Debian's archive in /etc/apt".to_owned()))
}

/// Returns the names of the packages that a downloaded package needs, without alternatives.
pub fn dependencies(name: &str, dir: &Path) -> Result<Vec<String>, PackageError> {
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.arg("-f").arg(downloaded(name, dir)?).arg("Depends");
    let output = expect(&format!("reading what {name} needs"), run("dpkg-deb", dpkg)?)?;
    Ok(names_of(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns the names in a field of dependencies, the first one of each alternative.
fn names_of(field: &str) -> Vec<String> {
    let name = |entry: &str| entry.split([' ', '(', '|', ':']).next().unwrap_or("").to_owned();
    field.split(',').map(|entry| name(entry.trim())).filter(|name| !name.is_empty()).collect()
}

/// Returns the file of a package that was downloaded into `dir`.
fn downloaded(name: &str, dir: &Path) -> Result<PathBuf, PackageError> {
    let begin = format!("{name}_");
    let entries = fs::read_dir(dir).map_err(|e| PackageError::Read(dir.to_path_buf(), e))?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "deb"))
        .find(|path| {
            path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&begin))
        })
        .ok_or_else(|| PackageError::NoMatch(name.to_string()))
}

/// Unpacks the package that was downloaded into `dir` to `dir/unpacked`, and removes its archive.
pub fn unpack_download(name: &str, dir: &Path) -> Result<PathBuf, PackageError> {
    let archive = downloaded(name, dir)?;
    progress::step(format!("unpacking {name}"));
    let unpacked = dir.join("unpacked");
    let mut dpkg = Command::new("dpkg");
    dpkg.arg("-x").arg(&archive).arg(&unpacked);
    expect(&format!("unpacking {name}"), run("dpkg", dpkg)?)?;
    fs::remove_file(&archive).map_err(|e| PackageError::Read(archive, e))?;
    Ok(unpacked)
}

/// Returns the newest package in apt's lists whose name begins with `prefix` and ends with
/// `suffix`.
pub fn newest(prefix: &str, suffix: &str) -> Result<String, PackageError> {
    let find = || -> Result<Option<String>, PackageError> {
        let mut apt = Command::new("apt-cache");
        apt.args(["pkgnames", prefix]);
        let names = run("apt-cache", apt)?;
        Ok(newest_of(&String::from_utf8_lossy(&names.stdout), prefix, suffix))
    };
    if let Some(name) = find()? {
        return Ok(name);
    }
    update()?;
    find()?.ok_or_else(|| PackageError::NoMatch(format!("{prefix}*{suffix}")))
}

fn newest_of(names: &str, prefix: &str, suffix: &str) -> Option<String> {
    // Versions are compared by number: 6.12.9 is older than 6.12.30.
    let version = |name: &str| -> Vec<u64> {
        name.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
    };
    names
        .lines()
        .filter_map(|name| {
            let middle = name.strip_prefix(prefix)?.strip_suffix(suffix)?;
            // Other flavours have more words, as in 6.12.30-rt-amd64.
            (!middle.contains('-')).then(|| name.to_string())
        })
        .max_by_key(|name| version(name))
}

fn is_installed(name: &str) -> bool {
    Command::new("dpkg-query")
        .args(["-W", "-f", "${db:Status-Status}", name])
        .stderr(Stdio::null())
        .output()
        .is_ok_and(|output| output.stdout == b"installed")
}

fn update() -> Result<(), PackageError> {
    progress::step("updating the package lists");
    let mut apt = apt_get();
    apt.arg("update");
    expect("apt-get update", run("apt-get", apt)?).map(drop)
}

fn apt_get() -> Command {
    let mut apt = Command::new("apt-get");
    apt.env("DEBIAN_FRONTEND", "noninteractive");
    apt.args(["-q", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]);
    apt
}

fn run(name: &'static str, mut command: Command) -> Result<Output, PackageError> {
    command.stdin(Stdio::null()).output().map_err(|e| PackageError::Run(name, e))
}

fn expect(what: &str, output: Output) -> Result<Output, PackageError> {
    if output.status.success() {
        return Ok(output);
    }
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(15)..].join("\n");
    Err(PackageError::Failed { what: what.to_string(), output: last })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_of_several_versions_compares_numbers() {
        let names = "k-6.12.9+deb12-amd64-unsigned\nk-6.12.30+deb12-amd64-unsigned\n\
                     k-6.12.31+deb12-rt-amd64-unsigned\nk-6.12.99+deb12-amd64\n";
        let newest = newest_of(names, "k-6.12.", "-amd64-unsigned");
        assert_eq!(newest.as_deref(), Some("k-6.12.30+deb12-amd64-unsigned"));
    }

    #[test]
    fn dependencies_are_names_without_versions_and_alternatives() {
        let field = "libaio1 (>= 0.3.93), libc6 (>= 2.34) | libc7, python3:any, qemu-common\n";
        assert_eq!(names_of(field), ["libaio1", "libc6", "python3", "qemu-common"]);
        assert!(names_of("\n").is_empty());
    }

    #[test]
    fn newest_of_none_is_none() {
        assert_eq!(newest_of("other\n", "k-", "-amd64"), None);
    }
}
