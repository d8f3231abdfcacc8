//! Opens the files that a configuration names by path, before the machine is made.
//!
//! For a caller that gives up its view of the file system first, as a process in a jail does: the
//! machine then opens nothing but its vsock socket and its scratch files.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use pvmm_devices::open::{self, Access};

use super::{Drive, DriveSource, HostOptions, Initrd, KernelSource, Net, Overrides, VmConfig};
use crate::error::{Error, ErrorKind};
use crate::memory::PAGEMAP;

impl VmConfig {
    /// Opens kernel, initial RAM disk, drives, taps and the list of this process's pages, so that
    /// [`crate::Vm::boot`] needs none of their paths. Fails as the boot would.
    pub fn open_files(&mut self) -> Result<(), Error> {
        self.validate()?;
        if let KernelSource::Path(path) = &self.kernel {
            let file = open::file(path, Access::Read).map_err(|e| failed("kernel", path, e))?;
            self.kernel = KernelSource::File(file);
        }
        if let Some(Initrd::Path(path)) = &self.initrd {
            let bytes = std::fs::read(path).map_err(|error| failed("initrd", path, error))?;
            self.initrd = Some(Initrd::Bytes(bytes));
        }
        self.drives.iter_mut().try_for_each(open_drive)?;
        self.nets.iter_mut().enumerate().try_for_each(open_tap)?;
        self.host.open_pagemap()
    }
}

impl Overrides {
    /// Opens drives, taps and the list of this process's pages. `mtus` are those of the template's
    /// network cards.
    pub(crate) fn open_files(&mut self, mtus: &[Option<u16>]) -> Result<(), Error> {
        self.drives.iter_mut().map(|(_, drive)| drive).try_for_each(open_drive)?;
        for (place, net) in &mut self.nets {
            net.mtu = net.mtu.or(mtus.get(*place).copied().flatten());
            open_tap((*place, net))?;
        }
        self.host.open_pagemap()
    }
}

impl HostOptions {
    fn open_pagemap(&mut self) -> Result<(), Error> {
        if self.pagemap.is_none() {
            let path = Path::new(PAGEMAP);
            let file = File::open(path).map_err(|error| failed("memory", path, error))?;
            self.pagemap = Some(Arc::new(file));
        }
        Ok(())
    }
}

fn open_drive(drive: &mut Drive) -> Result<(), Error> {
    if let DriveSource::Path(path) = &drive.source {
        let access = if drive.read_only { Access::Read } else { Access::ReadWrite };
        let open = |access| open::image(path, access).map_err(|e| failed("drive", path, e));
        let (file, reader) = (open(access)?, open(Access::Read)?);
        drive.source = DriveSource::Opened { file, reader, path: path.clone() };
    }
    Ok(())
}

fn open_tap((place, net): (usize, &mut Net)) -> Result<(), Error> {
    let failed =
        |error| Error::new(ErrorKind::InvalidConfig, format!("network card {place}"), error);
    net.open_tap().map_err(failed)
}

fn failed(what: &str, path: &Path, error: io::Error) -> Error {
    Error::new(ErrorKind::InvalidConfig, format!("{what}: cannot open {}", path.display()), error)
}
