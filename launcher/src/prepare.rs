//! Everything slow that a run needs before its machine: kernel, root filesystem, empty disk.
//!
//! It happens in the launcher, before the VMM process is forked, with progress and with Ctrl-C; the
//! libraries' errors become the launcher's here, each with the exit code of whose fault it is.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use pvmm_agent_image::AGENT;
use pvmm_sandbox::cache::CacheError;
use pvmm_sandbox::kernel::KernelError;
use pvmm_sandbox::overlay::{self, OverlayError};
use pvmm_sandbox::packages::PackagesError;
use pvmm_sandbox::template::{BASE, TemplateError};
use pvmm_sandbox::{Cache, Kernel, Recipe, Template};

use crate::exit::{self, Failure};
use crate::progress::Steps;
use crate::rootfs;
use crate::scratch;
use crate::sys::{process, signals};

/// What the machine is made from, ready to use.
pub struct Parts {
    pub kernel: Kernel,
    pub initramfs: Vec<u8>,
    pub rootfs: PathBuf,
    pub rootfs_type: &'static str,
    /// The writable disk; it has no name and is gone with its last user.
    pub upper: File,
}

/// Where the parts come from, checked as far as that is possible without making anything.
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

    /// Fetches and builds what is not there yet.
    pub fn prepare(self, quiet: bool) -> Result<Parts, Failure> {
        signals::catch_interrupts();
        let parts = self.make(&mut Steps::new(quiet));
        or_interrupted(parts)
    }

    fn make(self, steps: &mut Steps) -> Result<Parts, Failure> {
        let cache = Cache::open().map_err(refuse)?;
        if matches!(self.rootfs, RootfsSource::Base) && Template::find(&cache, BASE).is_err() {
            // On first use: nobody should wait for a download to learn that there is no KVM.
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
        let dir = scratch::place(true)?.dir;
        let upper = writable_disk(&cache, &dir, self.disk_mib << 20, steps).map_err(refuse)?;
        let initramfs = kernel.initramfs(AGENT).map_err(refuse)?;
        Ok(Parts { kernel, initramfs, rootfs, rootfs_type, upper })
    }
}

fn require_kvm() -> Result<(), Failure> {
    pvmm::kvm::host::probe().map(drop).map_err(|error| {
        Failure::fault(format!("no VM can run on this host: {error}"))
            .hint("'pvmm doctor' says what this host lacks, and how to get it")
    })
}

/// The guest's own disk, where the disk writes of VMs go. The empty one that it is a copy of comes from the
/// cache, or is made in that place if the cache cannot be written.
fn writable_disk(
    cache: &Cache,
    dir: &Path,
    bytes: u64,
    steps: &mut Steps,
) -> Result<File, OverlayError> {
    let made = overlay::pristine(cache, bytes, steps)
        .and_then(|_| overlay::create_upper(cache, dir, bytes));
    if !matches!(made, Err(OverlayError::Cache(_))) {
        return made;
    }
    // A cache on a shared filesystem may also not tell where its holes are, so none of it is copied.
    let Some(own) = own_directory(dir) else { return made };
    let elsewhere = Cache::at(&own)
        .map_err(OverlayError::from)
        .and_then(|own| overlay::create_upper(&own, own.root(), bytes));
    // The disk has no name, so it outlives the place it was made in.
    let _ = std::fs::remove_dir_all(&own);
    elsewhere.or(made)
}

/// A new directory in `dir` that nobody else can have put there.
fn own_directory(dir: &Path) -> Option<PathBuf> {
    let random: [u8; 8] = process::random().ok()?;
    let path = dir.join(format!("pvmm-disk-{:016x}", u64::from_ne_bytes(random)));
    std::fs::DirBuilder::new().mode(0o700).create(&path).ok()?;
    Some(path)
}

/// If a signal came meanwhile, that is how it ended, whatever else went wrong because of it.
pub fn or_interrupted<T>(result: Result<T, Failure>) -> Result<T, Failure> {
    match signals::caught() {
        Some(signal) => Err(Failure::silent(exit::by_signal(signal))),
        None => result,
    }
}

/// Whose fault an error of the libraries is.
pub trait Blame: Error {
    /// Whether the user's input is at fault, not pvmm or the host.
    fn is_users(&self) -> bool;

    /// What to try, where the message does not say it.
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

impl Blame for TemplateError {
    fn is_users(&self) -> bool {
        match self {
            TemplateError::Name { .. }
            | TemplateError::Unknown { .. }
            | TemplateError::BasePackages
            | TemplateError::ReadRecipe { .. }
            | TemplateError::ParseRecipe { .. } => true,
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

/// One line with every cause; what stands after `: ` and names a fix stays in it.
pub fn refuse(error: impl Blame) -> Failure {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // A transparent variant repeats what stands already.
        if !message.ends_with(&text) {
            message += &format!(": {text}");
        }
        cause = error.source();
    }
    let failure = match error.is_users() {
        true => Failure::usage(message),
        false => Failure::fault(message),
    };
    Failure { hint: error.hint().map(str::to_owned), ..failure }
}
