//! `cargo xtask test-packages`: installs, uses, upgrades, removes and purges the Debian package in
//! a clean Debian with systemd, where guests run.
//!
//! That place may have no network. A folder with the Debian packages that the installation and the
//! first use ask for takes the place of the mirrors.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::compat::{check, on_kvm};
use crate::{artifacts, bare, cargo, checkout, deb, dist, packages, progress, report, tarball};

/// The packages of the clean Debian beside the minimal ones.
const INCLUDED: &str = "curl,systemd-sysv,udev";

/// The packages that the installation and the first use of pvmm ask for, beside those of guests.
const ASKED_FOR: [&str; 3] = ["ca-certificates", "e2fsprogs", "linux-image-6.12-cloud-amd64"];

/// The version of the package to upgrade to.
const NEXT: &str = "99.0-1";

pub fn run() -> ExitCode {
    match test() {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("test-packages: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn test() -> Result<u8, Box<dyn Error>> {
    packages::install(&["dpkg-dev", "mmdebstrap"])?;
    dist::prepare()?;
    progress::step("formatting the manual pages");
    dist::check_pages()?;
    let first = fs::read(tarball::build()?)?;
    if first != fs::read(tarball::build()?)? {
        return Err("two archives of the same programs differ".into());
    }
    deb::build(None)?;
    let next = deb::build(Some(NEXT))?;
    let moved = cargo::target_dir().join("package-test");
    fs::create_dir_all(&moved)?;
    // Not among the packages that are given to anybody.
    fs::rename(&next, moved.join("next.deb"))?;
    dist::write_digests()?;
    let system = bare::system(INCLUDED)?;
    let mirror = mirror(&moved.join("mirror"))?;
    let out = checkout::scratch().join("packages");
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out)?;
    progress::step("the package in a clean Debian");
    let script = checkout::root().join("tests/packages/boot.sh");
    let mut argv: Vec<OsString> = vec!["sh".into(), script.into()];
    let package = dist::packages().join(format!("pvmm_{}-1_amd64.deb", dist::VERSION));
    argv.extend(
        [system, package, moved.join("next.deb"), mirror, out].map(PathBuf::into_os_string),
    );
    on_kvm(&argv)
}

/// Fills a folder with Debian packages and their index, as apt reads it.
fn mirror(dir: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let base = artifacts::prepare()?.template.manifest.packages;
    progress::step(format!("Debian packages go to {}", dir.display()));
    fs::create_dir_all(dir.join("partial"))?;
    // As on a system without any package, so that all dependencies are there.
    fs::write(dir.join("status"), "")?;
    let mut apt = Command::new("apt-get");
    apt.args(["-qq", "--yes", "--no-install-recommends", "--download-only"])
        .arg("-o")
        .arg(format!("Dir::State::status={}", dir.join("status").display()))
        .arg("-o")
        .arg(format!("Dir::Cache::archives={}", dir.display()))
        .args(["-o", "Debug::NoLocking=1", "install"])
        .args(ASKED_FOR)
        .args(base.iter().map(|package| package.name.as_str()))
        .stdin(Stdio::null());
    check(&mut apt, "apt-get")?;
    let index = fs::File::create(dir.join("Packages"))?;
    let mut scan = Command::new("dpkg-scanpackages");
    scan.arg(".").current_dir(dir).stdin(Stdio::null()).stdout(index).stderr(Stdio::null());
    check(&mut scan, "dpkg-scanpackages")?;
    Ok(dir.to_path_buf())
}
