//! `cargo xtask deb`: the Debian package, made by cargo-deb. Its contents are in
//! `launcher/Cargo.toml`, its scripts and units in `launcher/debian`.

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::compat::check;
use crate::{cache, cargo, checkout, dist, progress};

/// The version of cargo-deb that makes the package.
const CARGO_DEB: &str = "3.8.0";

/// Makes the package from what [`dist::prepare`] has made, with another version if one is given,
/// and returns its path.
pub fn build(version: Option<&str>) -> Result<PathBuf, Box<dyn Error>> {
    let cargo_deb = install()?;
    let version = version.map_or_else(|| format!("{}-1", dist::VERSION), str::to_owned);
    let package = dist::packages().join(format!("pvmm_{version}_amd64.deb"));
    progress::step(format!("cargo deb: {}", package.display()));
    let mut command = Command::new(cargo_deb);
    command
        .args(["--no-build", "--no-strip", "--quiet", "--locked", "--profile", "shipped"])
        .args(["--package", "pvmm-launcher", "--deb-version", &version, "--output"])
        .arg(&package)
        .env("CARGO_TARGET_DIR", cargo::target_dir())
        .env("SOURCE_DATE_EPOCH", dist::TIME.to_string())
        .current_dir(checkout::root())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let _ = fs::remove_file(&package);
    check(&mut command, "cargo-deb")?;
    Ok(package)
}

/// Installs cargo-deb, unless it is there.
fn install() -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join(format!("tools/cargo-deb-{CARGO_DEB}"));
    let program = place.join("bin/cargo-deb");
    if !program.exists() {
        let root = place.to_str().ok_or("the cache has a name that is not UTF-8")?;
        let install = ["install", "cargo-deb", "--locked", "--version", CARGO_DEB, "--root", root];
        // The compressor in the program, so that no library of this machine is needed.
        let features = ["--no-default-features", "--features", "static-lzma"];
        cargo::run(&[&install[..], &features[..]].concat())?;
    }
    Ok(program)
}
