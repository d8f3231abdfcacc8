//! Prepares what the nested host boots from: a stock Debian kernel and an initramfs.
//!
//! They are built once and kept in the cache under a hash of the recipe, so that later runs only
//! start QEMU. Only tools are installed; the kernel package is only unpacked.

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::cpio::Archive;
use super::qemu::Qemu;
use super::vmlinux;
use crate::packages::{self, PackageError};
use crate::{cache, progress, sys};

/// The packages that are needed to prepare the host.
const PACKAGES: [&str; 3] = ["busybox-static", "kmod", "xz-utils"];

/// The modules that are loaded at boot, in this order, each after its dependencies: modules without
/// which the host does not boot, and modules that only the use of a device node would load. The
/// kernel loads all others on demand.
const MODULES: [&str; 9] = [
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "kvm_amd",
    "tun",
    "vhost_vsock",
    "loop",
];

/// The folders of modules that are kept for loading on demand, without sound and graphics.
const KEPT: [&str; 13] = [
    "arch",
    "crypto",
    "drivers/block",
    // kvm_amd needs it.
    "drivers/crypto/ccp",
    "drivers/md",
    "drivers/net",
    "drivers/vhost",
    "drivers/virtio",
    "drivers/char",
    "fs",
    "lib",
    "net",
    "virt",
];

const INIT: &str = include_str!("../../../nested-host/init");

/// The version of the recipe, raised when this file builds another image from unchanged inputs.
const RECIPE: u32 = 5;

/// How long to wait for another process that prepares the image; it needs a download and a minute.
const LOCK_DEADLINE: Duration = Duration::from_secs(900);

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error(transparent)]
    Package(#[from] PackageError),
    #[error("cannot write {0}")]
    Write(PathBuf, #[source] io::Error),
    #[error("cannot read {0}")]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot run {0}")]
    Run(&'static str, #[source] io::Error),
    #[error("{0} failed")]
    Failed(String),
    #[error("another process still prepares the nested host after {} s", LOCK_DEADLINE.as_secs())]
    Locked,
}

/// A kernel and an initramfs that are ready to boot, and the QEMU that boots them.
#[derive(Clone, Debug)]
pub struct Image {
    pub qemu: Qemu,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// The folder that contains `lib/modules/VERSION`.
    pub modules: PathBuf,
    /// The key of the image's recipe. A running host with another key is not used.
    pub key: String,
}

/// Returns the image, and prepares it first if the cache does not have it.
pub fn prepare() -> Result<Image, ImageError> {
    packages::install(&PACKAGES)?;
    let key = key();
    let base = cache::dir().join("nested-host");
    let dir = base.join(&key);
    let image = || -> Result<Image, ImageError> {
        Ok(Image {
            qemu: Qemu::prepare(&dir.join("qemu"))?,
            kernel: dir.join("kernel"),
            initramfs: dir.join("initramfs"),
            modules: dir.join("modules"),
            key: key.clone(),
        })
    };
    if dir.exists() {
        return image();
    }

    let write = |path: &Path| {
        let path = path.to_path_buf();
        move |e| ImageError::Write(path, e)
    };
    fs::create_dir_all(&base).map_err(write(&base))?;
    let lock_path = base.join("lock");
    let lock = File::create(&lock_path).map_err(write(&lock_path))?;
    if !sys::lock(&lock, LOCK_DEADLINE).map_err(write(&lock_path))? {
        return Err(ImageError::Locked);
    }
    if dir.exists() {
        return image();
    }
    progress::step("preparing the nested host (once)");
    // The holder of the lock is alone, so the rest of an interrupted run can be removed.
    let temporary = base.join("building");
    let _ = fs::remove_dir_all(&temporary);
    fs::create_dir(&temporary).map_err(write(&temporary))?;
    build(&temporary).inspect_err(|_| drop(fs::remove_dir_all(&temporary)))?;
    fs::rename(&temporary, &dir).map_err(write(&dir))?;
    progress::step("the nested host is ready to boot");
    image()
}

/// Returns a hash of the recipe. The kernel's patch level does not affect it.
fn key() -> String {
    let recipe = RECIPE.to_le_bytes();
    let parts: [&[u8]; 2] = [&recipe, INIT.as_bytes()];
    short_hash(parts.into_iter().chain(MODULES.map(str::as_bytes)))
}

/// Returns a name for a list of parts, which is different for different lists.
pub fn short_hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn build(dir: &Path) -> Result<(), ImageError> {
    Qemu::prepare(&dir.join("qemu"))?;
    let kernel_package = packages::newest("linux-image-6.12.", "-amd64-unsigned")?;
    progress::step(format!("downloading {kernel_package}"));
    let unpacked = packages::unpack(&kernel_package, dir)?;
    let version = only_entry(&unpacked.join("lib/modules"))?;

    progress::step("unpacking the kernel image");
    let packed = unpacked.join(format!("boot/vmlinuz-{version}"));
    let packed = fs::read(&packed).map_err(|e| ImageError::Read(packed, e))?;
    let kernel = dir.join("kernel");
    // A kernel that is compressed in another way boots unmodified, only slower.
    fs::write(&kernel, vmlinux::extract(&packed).unwrap_or(packed))
        .map_err(|e| ImageError::Write(kernel, e))?;

    progress::step("packing the initramfs");
    let modules = dir.join("modules");
    keep_modules(&unpacked, &modules, &version)?;
    run("depmod", Command::new("depmod").arg("-b").arg(&modules).arg(&version))?;
    pack(&dir.join("initramfs"), &modules, &version)?;
    fs::write(dir.join("kernel-package"), kernel_package)
        .map_err(|e| ImageError::Write(dir.to_path_buf(), e))?;
    fs::remove_dir_all(&unpacked).map_err(|e| ImageError::Write(unpacked, e))
}

/// Moves the modules to keep from the unpacked package to `to`.
fn keep_modules(unpacked: &Path, to: &Path, version: &str) -> Result<(), ImageError> {
    let tree = Path::new("lib/modules").join(version);
    let (from, to) = (unpacked.join(&tree), to.join(&tree));
    let mut kept: Vec<PathBuf> = KEPT.iter().map(|dir| Path::new("kernel").join(dir)).collect();
    kept.extend(["modules.builtin", "modules.builtin.modinfo", "modules.order"].map(PathBuf::from));
    for name in kept {
        let (from, to) = (from.join(&name), to.join(&name));
        let parent = to.parent().unwrap_or(&to);
        fs::create_dir_all(parent).map_err(|e| ImageError::Write(parent.to_path_buf(), e))?;
        match fs::rename(&from, &to) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(ImageError::Write(to, e)),
            _ => {}
        }
    }
    // The subfolders contain drivers for network cards, which are larger than everything else
    // together.
    let nics = to.join("kernel/drivers/net");
    let entries = fs::read_dir(&nics).map_err(|e| ImageError::Read(nics.clone(), e))?;
    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())) {
        fs::remove_dir_all(entry.path()).map_err(|e| ImageError::Write(entry.path(), e))?;
    }
    Ok(())
}

fn pack(path: &Path, modules: &Path, version: &str) -> Result<(), ImageError> {
    let failed = |e| ImageError::Write(path.to_path_buf(), e);
    let file = BufWriter::new(File::create(path).map_err(failed)?);
    let mut archive = Archive::new(file);
    for dir in ["bin", "dev", "proc", "sys", "host", "rw", "newroot", "modules"] {
        archive.directory(dir).map_err(failed)?;
    }
    let busybox = Path::new("/bin/busybox");
    let content = fs::read(busybox).map_err(|e| ImageError::Read(busybox.to_path_buf(), e))?;
    archive.file("bin/busybox", &content).map_err(failed)?;
    archive.file("init", INIT.as_bytes()).map_err(failed)?;
    let mut order = String::new();
    for file in module_files(modules, version)? {
        let name = module_name(&file);
        archive.file(&format!("modules/{name}"), &read_module(&file)?).map_err(failed)?;
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("modules/order", order.as_bytes()).map_err(failed)?;
    archive.finish().map_err(failed)?;
    Ok(())
}

/// Returns the files of `MODULES` and of their dependencies, in the order of loading.
fn module_files(modules: &Path, version: &str) -> Result<Vec<PathBuf>, ImageError> {
    let mut files: Vec<PathBuf> = Vec::new();
    for module in MODULES {
        let mut modprobe = Command::new("modprobe");
        modprobe.arg("-d").arg(modules).args(["-S", version, "--show-depends", module]);
        // A module that is built into the kernel is listed without a file.
        let output = run("modprobe", &mut modprobe)?;
        for line in String::from_utf8_lossy(&output).lines() {
            let Some(file) = line.strip_prefix("insmod ") else { continue };
            let file = PathBuf::from(file.split_whitespace().next().unwrap_or(file));
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    Ok(files)
}

fn module_name(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.trim_end_matches(".xz").to_string()
}

fn read_module(file: &Path) -> Result<Vec<u8>, ImageError> {
    if file.extension().is_some_and(|ext| ext == "xz") {
        return run("xz", Command::new("xz").arg("-dc").arg(file));
    }
    fs::read(file).map_err(|e| ImageError::Read(file.to_path_buf(), e))
}

fn run(name: &'static str, command: &mut Command) -> Result<Vec<u8>, ImageError> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| ImageError::Run(name, e))?;
    if !output.status.success() {
        return Err(ImageError::Failed(format!("{name} ({})", output.status)));
    }
    Ok(output.stdout)
}

fn only_entry(dir: &Path) -> Result<String, ImageError> {
    let failed = |e| ImageError::Read(dir.to_path_buf(), e);
    let entry = fs::read_dir(dir).map_err(failed)?.next();
    let entry = entry.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?.map_err(failed)?;
    Ok(entry.file_name().to_string_lossy().into_owned())
}
