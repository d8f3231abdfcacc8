//! The QEMU that emulates the nested host.
//!
//! QEMU 10 emulates the nested host two to four times as fast as QEMU 7.2, the one of Debian 12. On
//! Debian 12 it is therefore fetched from Debian's backports and only unpacked: the QEMU that is
//! installed, if there is one, stays what it is.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::packages::{self, PackageError, Release};

const PACKAGE: &str = "qemu-system-x86";
/// The package with the firmware that QEMU loads for `-kernel`, besides the BIOS.
const DATA: &str = "qemu-system-data";

/// The releases of Debian whose QEMU is too slow, each with the one that has a newer QEMU built for
/// it.
const BACKPORTS: [(&str, &str); 1] = [("bookworm", "bookworm-backports")];

/// A QEMU that is ready to run.
#[derive(Clone, Debug)]
pub enum Qemu {
    Installed,
    /// The folder that the packages were unpacked to.
    Unpacked(PathBuf),
}

impl Qemu {
    /// Installs QEMU if it is missing, or unpacks it below `dir` if it is not there.
    pub fn prepare(dir: &Path) -> Result<Self, PackageError> {
        let codename = packages::codename()?;
        let Some((_, newer)) = BACKPORTS.iter().find(|(release, _)| *release == codename) else {
            packages::install(&[PACKAGE])?;
            return Ok(Qemu::Installed);
        };
        let unpacked = dir.join("unpacked");
        if !unpacked.exists() {
            unpack(newer, dir)?;
        }
        Ok(Qemu::Unpacked(unpacked))
    }

    /// Returns the command that runs QEMU, without arguments of the machine.
    pub fn command(&self) -> Command {
        let Qemu::Unpacked(root) = self else { return Command::new("qemu-system-x86_64") };
        let mut command = Command::new(root.join("usr/bin/qemu-system-x86_64"));
        // These replace the places of data that were compiled in.
        command.arg("-L").arg(root.join("usr/share/qemu"));
        command.args(["-L", "/usr/share/seabios"]);
        command
    }
}

fn unpack(release: &str, dir: &Path) -> Result<(), PackageError> {
    let release = Release::open(release, dir)?;
    release.download(&[PACKAGE, DATA])?;
    release.close()?;
    let needed = packages::dependencies(PACKAGE, dir)?;
    let others = needed.iter().map(String::as_str).filter(|name| !name.starts_with("qemu-"));
    packages::install(&others.collect::<Vec<_>>())?;
    packages::unpack_download(DATA, dir)?;
    packages::unpack_download(PACKAGE, dir).map(drop)
}
