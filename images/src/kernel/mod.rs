//! The guest kernel: which one a VM boots, and the modules that it needs before it sees its disk.
//!
//! pvmm's own kernel is used if it has been built; until then Debian's stock one, unpacked here.

mod bzimage;
mod debian;
mod elf;
mod modules;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use bzimage::BzImageError;
pub use debian::DebianKernelError;
pub use modules::ModulesError;

use crate::cache::Cache;
use crate::initramfs::initramfs;
use crate::progress::Progress;

/// The bytes that identify a kernel file: the ELF header, or bzImage's setup header.
const HEAD_LEN: u64 = 4096;

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("--kernel: {} does not exist: give the path of a vmlinux or bzImage file", path.display())]
    NotFound { path: PathBuf },
    #[error("--kernel: {} is not a regular file: give the path of a vmlinux or bzImage file", path.display())]
    NotAFile { path: PathBuf },
    #[error("--kernel: {} is empty: build or copy the kernel again", path.display())]
    Empty { path: PathBuf },
    #[error("--kernel: {} may not be read by this user: chmod a+r it, or copy it", path.display())]
    NotAllowed { path: PathBuf },
    #[error("--kernel: {} is neither an x86-64 ELF vmlinux nor a bzImage", path.display())]
    NotAKernel { path: PathBuf },
    #[error("--kernel: the path {:?} has a NUL byte", path)]
    Nul { path: PathBuf },
    #[error("cannot read kernel {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the kernel in {} is damaged: build it again with `make kernel`", path.display())]
    Own { path: PathBuf, source: Box<KernelError> },
    #[error("cannot read module {}", path.display())]
    ReadModule { path: PathBuf, source: io::Error },
    #[error("cannot prepare Debian's stock kernel")]
    Debian(#[from] Box<DebianKernelError>),
}

/// Where a kernel came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Built from this project's configuration.
    Own,
    /// Debian's cloud kernel, unpacked.
    Debian,
    /// A file that the user named.
    User,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    Elf,
    BzImage,
}

/// A module's name, as the kernel spells it, and its uncompressed file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    pub name: String,
    pub path: PathBuf,
}

/// A kernel that can be booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// The file to load; a bzImage only if the user gave one.
    pub vmlinux: PathBuf,
    pub format: Format,
    /// Modules to load before the root disk is mounted, dependencies first.
    pub modules: Vec<Module>,
    /// `uname -r`, or empty if the file does not say.
    pub release: String,
    /// A name for display: "pvmm kernel 6.12.115", "Debian kernel 6.12.115+deb12-cloud-amd64".
    pub label: String,
    pub origin: Origin,
}

impl Kernel {
    /// Returns pvmm's own kernel if there is one, otherwise Debian's, downloaded on first use.
    pub fn default_for_host(progress: &mut dyn Progress) -> Result<Kernel, KernelError> {
        let cache = Cache::open().map_err(|err| Box::new(DebianKernelError::from(err)))?;
        Kernel::default_in(&cache, progress)
    }

    /// Returns the default kernel, as [`Kernel::default_for_host`], with a given cache.
    pub fn default_in(cache: &Cache, progress: &mut dyn Progress) -> Result<Kernel, KernelError> {
        match Kernel::own(cache)? {
            Some(kernel) => Ok(kernel),
            None => Kernel::debian(cache, progress),
        }
    }

    /// Returns the file that [`Kernel::default_in`] would load, if it exists, without reading it.
    pub fn default_file(cache: &Cache) -> Option<PathBuf> {
        let file = |name: &str| cache.path("kernels", name).join("vmlinux");
        ["current", "debian"].iter().find_map(|name| fs::canonicalize(file(name)).ok())
    }

    /// Returns the newest kernel that was built from this project's configuration.
    pub fn own(cache: &Cache) -> Result<Option<Kernel>, KernelError> {
        let current = cache.path("kernels", "current").join("vmlinux");
        // Resolves the link: a VM must not change kernels because a build ends meanwhile.
        let Ok(path) = fs::canonicalize(&current) else { return Ok(None) };
        let kernel = Kernel::from_path(&path)
            .map_err(|source| KernelError::Own { path, source: Box::new(source) })?;
        let label = format!("pvmm kernel {}", kernel.release);
        Ok(Some(Kernel { label, origin: Origin::Own, ..kernel }))
    }

    /// Returns Debian's stock cloud kernel, from the cache or from the package mirrors.
    pub fn debian(cache: &Cache, progress: &mut dyn Progress) -> Result<Kernel, KernelError> {
        Ok(debian::kernel(cache, progress).map_err(Box::new)?)
    }

    /// Opens a kernel file of the user, which must have all drivers for its root disk built in.
    pub fn from_path(path: &Path) -> Result<Kernel, KernelError> {
        let own = || path.to_owned();
        if path.as_os_str().as_encoded_bytes().contains(&0) {
            return Err(KernelError::Nul { path: own() });
        }
        let refused = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                KernelError::NotFound { path: own() }
            }
            io::ErrorKind::PermissionDenied => KernelError::NotAllowed { path: own() },
            _ => KernelError::Read { path: own(), source },
        };
        // Checked before opening, because opening a FIFO would wait for a writer.
        let meta = fs::metadata(path).map_err(refused)?;
        if !meta.is_file() {
            return Err(KernelError::NotAFile { path: own() });
        }
        if meta.len() == 0 {
            return Err(KernelError::Empty { path: own() });
        }
        let file = File::open(path).map_err(refused)?;
        let mut head = Vec::new();
        (&file).take(HEAD_LEN).read_to_end(&mut head).map_err(refused)?;
        let (format, release) = if elf::is_x86_64(&head) {
            (Format::Elf, elf::kernel_release(&file).unwrap_or_default())
        } else if let Ok(setup) = bzimage::Setup::parse(&head) {
            (Format::BzImage, setup.release(&file).unwrap_or_default())
        } else {
            return Err(KernelError::NotAKernel { path: own() });
        };
        let label = match release.as_str() {
            "" => format!("kernel {}", path.display()),
            release => format!("kernel {} ({release})", path.display()),
        };
        let vmlinux = std::path::absolute(path).map_err(refused)?;
        Ok(Kernel { vmlinux, format, modules: Vec::new(), release, label, origin: Origin::User })
    }

    /// Opens a kernel that [`Kernel::default_in`] or [`Kernel::from_path`] has returned before, by
    /// its file.
    pub fn found(vmlinux: &Path) -> Result<Kernel, KernelError> {
        match vmlinux.parent().and_then(debian::load) {
            Some(kernel) if kernel.vmlinux == vmlinux => Ok(kernel),
            _ => Kernel::from_path(vmlinux),
        }
    }

    /// Reads the modules, in load order.
    pub fn read_modules(&self) -> Result<Vec<(String, Vec<u8>)>, KernelError> {
        let read = |module: &Module| match fs::read(&module.path) {
            Ok(bytes) => Ok((module.name.clone(), bytes)),
            Err(source) => Err(KernelError::ReadModule { path: module.path.clone(), source }),
        };
        self.modules.iter().map(read).collect()
    }

    /// Builds the initramfs that this kernel boots with, with `agent` as `/init`.
    pub fn initramfs(&self, agent: &[u8]) -> Result<Vec<u8>, KernelError> {
        Ok(initramfs(agent, &self.read_modules()?))
    }
}
