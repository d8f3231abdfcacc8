//! Debian's kernel image and the initrd that Debian's tools make for it, for the test that boots
//! both unmodified.
//!
//! The packages are unpacked into a template, the template is unpacked into a folder, and
//! initramfs-tools runs in that folder. Nothing is installed on this machine, and its boot loader
//! and kernel are not touched.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use pvmm_images::cache::{self, CacheError};
use pvmm_images::template::TemplateError;
use pvmm_images::{Cache, Progress, Recipe, Template};

const NAME: &str = "suite-stock";
const PACKAGES: [&str; 4] =
    ["initramfs-tools", "linux-image-6.12-cloud-amd64", "mount", "util-linux"];
/// The place of the two files in the cache, where the suite finds them.
const KIND: &str = "stock";
const ENTRY: &str = "current";
const KEY: &str = "key";

/// A script that makes the initrd as an installation would, with two more modules that a machine
/// with its own disk does not need.
const MAKE: &str = "set -e; cd /; release=$(ls /lib/modules); depmod \"$release\"
printf '%s\\n' vmw_vsock_virtio_transport overlay >> /etc/initramfs-tools/modules
mkinitramfs -o /initrd \"$release\"; mv \"/boot/vmlinuz-$release\" /vmlinuz";

#[derive(Debug, thiserror::Error)]
pub enum StockError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error("cannot look at {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot run {0}")]
    Run(&'static str, #[source] io::Error),
    #[error("{program} failed:\n{output}")]
    Failed { program: &'static str, output: String },
}

/// Makes the files if the cache does not have them.
pub fn prepare(cache: &Cache, progress: &mut dyn Progress) -> Result<(), StockError> {
    let recipe = Recipe::new(NAME, &PACKAGES.map(str::to_owned))?;
    let rootfs = Template::ensure(cache, &recipe, progress)?.rootfs;
    let facts = fs::metadata(&rootfs).map_err(|e| StockError::Read(rootfs.clone(), e))?;
    let words = [MAKE.to_owned(), facts.size().to_string(), facts.mtime().to_string()];
    let key = cache::key(words.iter().map(|word| word.as_bytes()));
    let is_current = |entry: &Path| fs::read_to_string(entry.join(KEY)).is_ok_and(|it| it == key);
    cache.publish(KIND, ENTRY, progress, is_current, |dir, progress| {
        progress.step("Making Debian's initrd");
        make(&rootfs, dir)?;
        fs::write(dir.join(KEY), &key).map_err(|e| StockError::Read(dir.join(KEY), e))
    })?;
    Ok(())
}

fn make(rootfs: &Path, dir: &Path) -> Result<(), StockError> {
    let root = dir.join("root");
    fs::create_dir(&root).map_err(|e| StockError::Read(root.clone(), e))?;
    let mut unpack = Command::new("debugfs");
    unpack.arg("-R").arg(format!("rdump / {}", root.display())).arg(rootfs);
    run("debugfs", unpack)?;
    // Without root, the command runs in a namespace in which this user is root.
    let mut chroot = Command::new(if crate::sys::is_root() { "chroot" } else { "unshare" });
    if !crate::sys::is_root() {
        chroot.args(["--map-root-user", "chroot"]);
    }
    chroot.arg(&root).args(["/bin/sh", "-c", MAKE]);
    chroot.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    run("mkinitramfs", chroot)?;
    for name in ["initrd", "vmlinuz"] {
        fs::rename(root.join(name), dir.join(name))
            .map_err(|e| StockError::Read(root.join(name), e))?;
    }
    fs::remove_dir_all(&root).map_err(|e| StockError::Read(root, e))
}

fn run(program: &'static str, mut command: Command) -> Result<(), StockError> {
    let output = command.output().map_err(|e| StockError::Run(program, e))?;
    if output.status.success() {
        return Ok(());
    }
    let output = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(StockError::Failed { program, output })
}
