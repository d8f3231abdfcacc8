//! `cargo xtask test-shim`: containers in VMs by the clients of three releases of containerd.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::compat::on_kvm;
use crate::{artifacts, cache, cargo, checkout, packages, progress, report};

/// Releases of Debian, each with another containerd: 1.6, 1.7 and 2.
const RELEASES: [&str; 3] = ["bookworm", "trixie", "sid"];

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only flows with this in their names
    names: Vec<OsString>,
}

pub fn run(options: &Options) -> ExitCode {
    match test(options) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("test-shim: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn test(options: &Options) -> Result<u8, Box<dyn Error>> {
    packages::install(&["busybox-static", "iproute2", "procps", "python3"])?;
    let built = ["build", "--release", "--package", "pvmm-launcher", "--package", "pvmm-shim"];
    cargo::run(&built)?;
    artifacts::prepare()?;
    artifacts::prepare_template("container")?;
    for release in RELEASES {
        let containerd = containerd(release)?;
        let programs = cargo::target_dir().join("release");
        let mut argv: Vec<OsString> =
            vec!["env".into(), "PVMM_RUNTIME_DIR=/tmp/pvmm-shim".into(), "python3".into()];
        argv.push(checkout::root().join("tests/shim/containerd.py").into());
        argv.extend([programs.join("pvmm").into(), programs.into(), containerd.into()]);
        argv.extend(options.names.iter().cloned());
        progress::step(format!("containers by containerd of Debian {release}"));
        match on_kvm(&argv)? {
            0 => {}
            code => return Ok(code),
        }
    }
    Ok(0)
}

/// Returns the files of a release's containerd, fetched unless they are there.
fn containerd(release: &str) -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join("tools").join(format!("containerd-{release}"));
    let there = place.join("unpacked");
    if !there.is_dir() {
        let part = place.with_extension("part");
        let _ = fs::remove_dir_all(&part);
        fs::create_dir_all(&part)?;
        packages::unpack_of(release, "containerd", &part)?;
        let _ = fs::remove_dir_all(&place);
        fs::rename(&part, &place)?;
    }
    Ok(there)
}
