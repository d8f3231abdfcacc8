//! Debian's stock cloud kernel as a guest kernel: downloaded, unpacked, never installed.
//!
//! It makes a first sandbox possible without minutes of kernel build.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::bzimage::{self, BzImageError};
use super::modules::{ModulesError, Offer};
use super::{Format, Kernel, Module, Origin};
use crate::cache::{Cache, CacheError};
use crate::deb::{self, DebError, Part};
use crate::packages::{Apt, Package, PackagesError};
use crate::progress::Progress;

/// Package names, newest first; every Debian release has the last.
const PACKAGES: [&str; 2] = ["linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64"];

/// Modules that the guest needs for its disks, the host and the network; ext4 is built in.
const MODULES: [&str; 8] = [
    "virtio_mmio",
    "virtio_blk",
    "vsock",
    "vmw_vsock_virtio_transport",
    "virtio_net",
    "virtio_rng",
    "virtio_balloon",
    "overlay",
];

/// Increased when what is taken from the package changes, so that older entries are rebuilt.
const LAYOUT: u32 = 1;

const MANIFEST: &str = "kernel.json";
const VMLINUX: &str = "vmlinux";
/// The link to the entry in use, so that the next start needs no package lists.
const LINK: &str = "debian";

#[derive(Debug, thiserror::Error)]
pub enum DebianKernelError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Packages(#[from] PackagesError),
    #[error(transparent)]
    Deb(#[from] DebError),
    #[error("cannot read package {package}")]
    Read { package: String, source: io::Error },
    #[error("package {package} has no boot/vmlinuz")]
    NoImage { package: String },
    #[error("cannot unpack the kernel of package {package}")]
    Unpack { package: String, source: BzImageError },
    #[error("cannot take the modules from package {package}")]
    Modules { package: String, source: ModulesError },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot read back {}: delete its directory and retry", path.display())]
    ReadBack { path: PathBuf },
}

/// The contents of `kernel.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    layout: u32,
    package: Package,
    release: String,
    modules: Vec<String>,
}

pub(super) fn kernel(
    cache: &Cache,
    progress: &mut dyn Progress,
) -> Result<Kernel, DebianKernelError> {
    if let Some(kernel) = fs::canonicalize(cache.path("kernels", LINK)).ok().and_then(|p| load(&p))
    {
        return Ok(kernel);
    }
    let apt = Apt::open(cache, progress)?;
    let package = apt.kernel(&PACKAGES)?;
    let name = format!("debian-{}-{LAYOUT}", package.version);
    let entry = cache.publish(
        "kernels",
        &name,
        progress,
        |path| load(path).is_some(),
        |dir, progress| {
            let paths = apt.download(std::slice::from_ref(&package), progress)?;
            progress.step(&format!("Unpacking kernel {}", package.version));
            for path in paths {
                unpack(&path, &package, dir)?;
                // The package is needed again only when there is a new version.
                let _ = fs::remove_file(&path);
            }
            progress.done();
            Ok::<(), DebianKernelError>(())
        },
    )?;
    link(cache, &name)?;
    load(&entry).ok_or(DebianKernelError::ReadBack { path: entry.join(MANIFEST) })
}

/// Loads the kernel in `dir`, if it is complete and of the current layout.
pub(super) fn load(dir: &Path) -> Option<Kernel> {
    let manifest: Manifest = serde_json::from_slice(&fs::read(dir.join(MANIFEST)).ok()?).ok()?;
    if manifest.layout != LAYOUT || !dir.join(VMLINUX).exists() {
        return None;
    }
    let path = |name: &str| dir.join("modules").join(format!("{name}.ko"));
    let modules =
        manifest.modules.iter().map(|name| Module { name: name.clone(), path: path(name) });
    Some(Kernel {
        vmlinux: dir.join(VMLINUX),
        format: Format::Elf,
        modules: modules.collect(),
        label: format!("Debian kernel {}", manifest.release),
        release: manifest.release,
        origin: Origin::Debian,
    })
}

/// Writes vmlinux, modules and manifest of a downloaded package into `dir`.
fn unpack(deb: &Path, package: &Package, dir: &Path) -> Result<(), DebianKernelError> {
    let name = || package.name.clone();
    let (release, image, offer) = read(deb, package)?;
    let vmlinux = bzimage::unpack(&image)
        .map_err(|source| DebianKernelError::Unpack { package: name(), source })?;
    let modules = offer
        .in_order(&MODULES)
        .map_err(|source| DebianKernelError::Modules { package: name(), source })?;
    write(&dir.join(VMLINUX), &vmlinux)?;
    let modules_dir = dir.join("modules");
    fs::create_dir(&modules_dir)
        .map_err(|source| DebianKernelError::Write { path: modules_dir.clone(), source })?;
    for (module, bytes) in &modules {
        write(&modules_dir.join(format!("{module}.ko")), bytes)?;
    }
    let modules = modules.into_iter().map(|(name, _)| name).collect();
    let manifest = Manifest { layout: LAYOUT, package: package.clone(), release, modules };
    let json = serde_json::to_vec_pretty(&manifest).map_err(io::Error::from);
    let path = dir.join(MANIFEST);
    let json = json.map_err(|source| DebianKernelError::Write { path: path.clone(), source })?;
    write(&path, &json)
}

/// Reads (release, bzImage, modules) of a package in one pass.
fn read(deb: &Path, package: &Package) -> Result<(String, Vec<u8>, Offer), DebianKernelError> {
    let failed = |source| DebianKernelError::Read { package: package.name.clone(), source };
    let (mut image, mut offer) = (None, Offer::default());
    let mut files = deb::open(deb, Part::Data)?;
    for entry in files.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let path = entry.path().map_err(failed)?.into_owned();
        let Some(file_name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let release = file_name.strip_prefix("vmlinuz-");
        if release.is_none() && !Offer::is_module(file_name) && file_name != "modules.builtin" {
            continue;
        }
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).map_err(failed)?;
        match release {
            Some(release) => image = Some((release.to_owned(), bytes)),
            None if file_name == "modules.builtin" => {
                offer.add_built_in(&String::from_utf8_lossy(&bytes));
            }
            None => offer.add(file_name, bytes),
        }
    }
    let none = || DebianKernelError::NoImage { package: package.name.clone() };
    let (release, image) = image.ok_or_else(none)?;
    Ok((release, image, offer))
}

/// Points the link `kernels/debian` at `name`, atomically.
fn link(cache: &Cache, name: &str) -> Result<(), DebianKernelError> {
    let path = cache.path("kernels", LINK);
    let temp = cache.path("kernels", &format!(".{LINK}.{}", std::process::id()));
    let _ = fs::remove_file(&temp);
    std::os::unix::fs::symlink(name, &temp)
        .and_then(|()| fs::rename(&temp, &path))
        .map_err(|source| DebianKernelError::Write { path, source })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), DebianKernelError> {
    fs::write(path, bytes)
        .map_err(|source| DebianKernelError::Write { path: path.to_owned(), source })
}
