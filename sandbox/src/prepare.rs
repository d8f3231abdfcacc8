//! Prepares what a run needs before its VM: kernel, root filesystem, empty disk.
//!
//! This slow work happens before the monitor process is forked, with progress. Errors of the
//! libraries are converted to failures here, with an exit code by cause.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use pvmm::Drive;
use pvmm_agent_image::AGENT;
use pvmm_images::cache::CacheError;
use pvmm_images::kernel::KernelError;
use pvmm_images::oci::OciError;
use pvmm_images::overlay::{self, OverlayError};
use pvmm_images::packages::PackagesError;
use pvmm_images::template::{BASE, TemplateError};
use pvmm_images::{Cache, ImportError, Kernel, Progress, Recipe, Template};

use crate::failure::{Failure, FailureKind};
use crate::rootfs;
use crate::scratch;
use crate::sys::process;

/// The files that a VM is booted from.
pub struct Parts {
    pub kernel: Kernel,
    pub initramfs: Vec<u8>,
    pub rootfs_type: String,
    /// The root filesystem, the writable disk, and others in the guest's order.
    pub drives: Vec<Drive>,
    /// Whether another VM has used the writable disk, and left its identity there.
    pub used_disk: bool,
}

/// Where the parts come from, checked as far as possible without creating anything.
pub struct Sources {
    pub kernel: Option<Kernel>,
    pub rootfs: RootfsSource,
    pub disk_mib: u64,
}

pub enum RootfsSource {
    Image {
        path: PathBuf,
        kind: &'static str,
    },
    Template(Template),
    /// The built-in template, to be built now.
    Base,
}

impl Sources {
    /// Refuses files and names that cannot work.
    pub fn check(
        kernel: Option<PathBuf>,
        rootfs: Option<PathBuf>,
        template: &str,
        disk_mib: u64,
    ) -> Result<Self, Failure> {
        let kernel = kernel.map(|path| Kernel::from_path(&path)).transpose().map_err(refuse)?;
        let rootfs = match rootfs {
            Some(path) => {
                let kind = rootfs::filesystem_type(&path)?;
                let path = std::path::absolute(&path).unwrap_or(path);
                RootfsSource::Image { path, kind }
            }
            None if template == BASE => RootfsSource::Base,
            None => {
                let cache = Cache::open().map_err(refuse)?;
                RootfsSource::Template(Template::find(&cache, template).map_err(refuse)?)
            }
        };
        Ok(Self { kernel, rootfs, disk_mib })
    }

    /// Downloads and builds the parts that are missing.
    pub fn prepare(self, steps: &mut dyn Progress) -> Result<Parts, Failure> {
        let cache = Cache::open().map_err(refuse)?;
        if matches!(self.rootfs, RootfsSource::Base) && Template::find(&cache, BASE).is_err() {
            // Checked on first use, so that no download comes before the message that there is no
            // KVM.
            require_kvm()?;
        }
        let kernel = match self.kernel {
            Some(kernel) => kernel,
            None => Kernel::default_in(&cache, steps).map_err(refuse)?,
        };
        let (rootfs, rootfs_type) = match self.rootfs {
            RootfsSource::Image { path, kind } => (path, kind),
            RootfsSource::Template(template) => (template.rootfs, "ext4"),
            RootfsSource::Base => {
                let base = Template::ensure(&cache, &Recipe::base(), steps).map_err(refuse)?;
                (base.rootfs, "ext4")
            }
        };
        let dir = scratch::place()?.dir;
        let upper = writable_disk(&cache, &dir, self.disk_mib << 20, steps).map_err(refuse)?;
        let initramfs = kernel.initramfs(AGENT).map_err(refuse)?;
        // The writable disk is an unnamed file that is freed with its last file descriptor.
        let drives = vec![Drive::read_only(rootfs), Drive::from_file(upper)];
        let rootfs_type = rootfs_type.to_owned();
        Ok(Parts { kernel, initramfs, rootfs_type, drives, used_disk: false })
    }
}

fn require_kvm() -> Result<(), Failure> {
    pvmm::kvm::host::probe().map(drop).map_err(|error| {
        Failure::fault(format!("no VM can run on this host: {error}"))
            .hint("'pvmm doctor' says what this host lacks, and how to get it")
    })
}

/// Creates the guest's writable disk in the scratch folder `dir`. It is a copy of an empty disk
/// from the cache, or of one made in `dir` if the cache cannot be written.
fn writable_disk(
    cache: &Cache,
    dir: &Path,
    bytes: u64,
    steps: &mut dyn Progress,
) -> Result<File, OverlayError> {
    let made = overlay::pristine(cache, bytes, steps)
        .and_then(|_| overlay::create_upper(cache, dir, bytes));
    if !matches!(made, Err(OverlayError::Cache(_))) {
        return made;
    }
    // A cache on a shared filesystem may not report its holes either, so nothing is copied from
    // there.
    let Some(own) = own_directory(dir) else { return made };
    let elsewhere = Cache::at(&own)
        .map_err(OverlayError::from)
        .and_then(|own| overlay::create_upper(&own, own.root(), bytes));
    // The disk is an unnamed file, so it outlives the folder.
    let _ = std::fs::remove_dir_all(&own);
    elsewhere.or(made)
}

/// Creates a private folder with an unpredictable name in `dir`.
fn own_directory(dir: &Path) -> Option<PathBuf> {
    let random: [u8; 8] = process::random().ok()?;
    let path = dir.join(format!("pvmm-disk-{:016x}", u64::from_ne_bytes(random)));
    std::fs::DirBuilder::new().mode(0o700).create(&path).ok()?;
    Some(path)
}

/// Decides who is at fault for an error of the libraries.
pub trait Blame: Error {
    /// Whether the user's input is at fault, and not pvmm or the host.
    fn is_users(&self) -> bool;

    /// Returns more about the fault, where it is known.
    fn kind(&self) -> Option<FailureKind> {
        None
    }

    /// Returns what to try, if the message does not say it.
    fn hint(&self) -> Option<&'static str> {
        None
    }
}

impl Blame for CacheError {
    fn is_users(&self) -> bool {
        matches!(self, CacheError::NoHome | CacheError::Create { .. })
    }

    fn hint(&self) -> Option<&'static str> {
        matches!(self, CacheError::Create { .. })
            .then_some("set XDG_CACHE_HOME to a directory that you can write to")
    }
}

impl Blame for OverlayError {
    fn is_users(&self) -> bool {
        matches!(self, OverlayError::Size { .. })
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            OverlayError::Cache(error) => error.hint(),
            _ => None,
        }
    }
}

impl Blame for KernelError {
    fn is_users(&self) -> bool {
        !matches!(self, KernelError::Debian(_) | KernelError::ReadModule { .. })
    }
}

impl Blame for OciError {
    fn is_users(&self) -> bool {
        true
    }
}

impl Blame for TemplateError {
    fn kind(&self) -> Option<FailureKind> {
        matches!(self, TemplateError::Unknown { .. }).then_some(FailureKind::NotFound)
    }

    fn is_users(&self) -> bool {
        match self {
            TemplateError::Name { .. }
            | TemplateError::Unknown { .. }
            | TemplateError::BasePackages
            | TemplateError::ReadRecipe { .. }
            | TemplateError::ParseRecipe { .. } => true,
            TemplateError::BaseImport | TemplateError::Adopt { .. } => true,
            TemplateError::Import { source, .. } => {
                !matches!(source, ImportError::Rootfs(_) | ImportError::Unpack { .. })
            }
            TemplateError::Packages(error) => {
                matches!(error, PackagesError::Unknown { .. } | PackagesError::Name { .. })
            }
            _ => false,
        }
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            TemplateError::Cache(error) => error.hint(),
            _ => None,
        }
    }
}

/// Returns an error and all its causes in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // A transparent variant repeats text that is already there.
        if !message.ends_with(&text) {
            message += &format!(": {text}");
        }
        cause = error.source();
    }
    message
}

/// Builds a one-line failure from an error and all its causes.
pub fn refuse(error: impl Blame) -> Failure {
    let message = chain(&error);
    let mut failure =
        if error.is_users() { Failure::usage(message) } else { Failure::fault(message) };
    failure.special = error.kind();
    Failure { hint: error.hint().map(str::to_owned), ..failure }
}
