//! Snapshots of disks alone: read by the program that starts a VM, booted by the VM's own process.
//!
//! Between the two an order and the open disks are passed on, as for forks.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pvmm::snapshot::{Disk, Disks, LoadOptions};
use pvmm::{CpuBaseline, Drive, DriveSource};
use pvmm_agent_image::AGENT;
use pvmm_images::{Kernel, overlay};
use serde::{Deserialize, Serialize};

use crate::control::Note;
use crate::failure::Failure;
use crate::kernel_file::KernelFile;
use crate::machine::SPARE_DRIVE;
use crate::net_card::NetCard;
use crate::overrides::CopyParts;
use crate::prepare::{self, Parts};
use crate::rootfs;
use crate::scratch;
use crate::vm_dir::Record;

/// How long a guest may take to boot, unless its user says otherwise.
const BOOT_PATIENCE: Duration = Duration::from_secs(60);

/// A snapshot of disks, opened, with the kernel and the size of its VM.
#[derive(Debug)]
pub struct DiskSnapshot {
    pub cpus: u32,
    pub memory_mib: u64,
    /// The interfaces of the network cards that a VM gets.
    pub taps: Vec<String>,
    /// How long a VM may take until its agent answers.
    pub boot_patience: Duration,
    cpu: CpuBaseline,
    kernel: Kernel,
    rootfs_type: String,
    disks: Vec<Disk>,
}

impl DiskSnapshot {
    /// Opens the snapshot in the folder `dir`, and its kernel or the one at the path `kernel`.
    pub fn open(dir: &Path, options: &LoadOptions, kernel: Option<&Path>) -> Result<Self, Failure> {
        let Disks { manifest, cpu, note, disks } = Disks::load(dir, options).map_err(|error| {
            // A damaged snapshot is the fault of whoever gave it.
            Failure::usage(format!("{error:#}"))
        })?;
        let note = Note::read(&note);
        let kernel = match (kernel, &note.kernel_file) {
            (Some(path), _) => Kernel::from_path(path).map_err(prepare::refuse)?,
            (None, Some(file)) => file.find(&note.kernel, &options.roots)?,
            (None, None) => {
                return Err(Failure::usage("the snapshot does not say which kernel its VM ran")
                    .hint("give one with --kernel FILE"));
            }
        };
        let rootfs_type = match disks.as_slice() {
            [Disk::ReadOnly { path, .. }, Disk::Own(_), ..] => rootfs::filesystem_type(path)?,
            [Disk::Missing { path }, ..] => return Err(missing("root filesystem", path)),
            _ => return Err(Failure::usage("these are not the disks of a VM of 'pvmm run'")),
        };
        Ok(Self {
            cpus: manifest.machine.vcpus,
            memory_mib: manifest.machine.memory_mib,
            taps: manifest.taps,
            boot_patience: BOOT_PATIENCE,
            cpu,
            kernel,
            rootfs_type: rootfs_type.to_owned(),
            disks,
        })
    }

    /// Returns `record` with the size and the kernel of the snapshot.
    pub fn described(&self, record: Record) -> Record {
        Record {
            cpus: self.cpus,
            memory_mib: self.memory_mib,
            kernel: self.kernel.label.clone(),
            kernel_file: KernelFile::of(&self.kernel.vmlinux),
            ..record
        }
    }

    /// Refuses overrides and volumes that a VM with these disks cannot have.
    pub fn check(&self, copy: &CopyParts, volumes: usize) -> Result<(), Failure> {
        copy.boot_card(&self.taps)?;
        let last = self.disks.len();
        if let Some(place) = copy.drive_places().find(|at| *at < SPARE_DRIVE || *at >= last) {
            let message = format!("--drive: drive {place} of the snapshot cannot be another one");
            return Err(Failure::usage(message)
                .hint(format!("it has {last}, counted from 0; the first two are its own")));
        }
        if volumes > 0 && last > SPARE_DRIVE {
            return Err(Failure::usage("a snapshot with drives of its own takes no volumes"));
        }
        for (place, disk) in self.disks.iter().enumerate() {
            if let Disk::Missing { path } = disk
                && !copy.drive_places().any(|other| other == place)
            {
                return Err(missing("drive", path));
            }
        }
        Ok(())
    }

    /// Returns the order for the process of a VM, and the open disks that go with it.
    pub fn order(&self) -> io::Result<(BootOrder, Vec<OwnedFd>)> {
        let mut files = Vec::new();
        let mut disks = Vec::new();
        for disk in &self.disks {
            disks.push(match disk {
                Disk::Own(file) => {
                    files.push(file.try_clone()?.into());
                    DiskOrder::Own
                }
                Disk::ReadOnly { file, path } => {
                    files.push(file.try_clone()?.into());
                    DiskOrder::ReadOnly(path.clone())
                }
                Disk::Missing { .. } => DiskOrder::Replaced,
            });
        }
        let (kernel, rootfs_type) = (self.kernel.clone(), self.rootfs_type.clone());
        let (cpu, taps) = (self.cpu.clone(), self.taps.clone());
        Ok((BootOrder { cpu, kernel, rootfs_type, disks, taps }, files))
    }
}

fn missing(what: &str, path: &Path) -> Failure {
    let message = format!(
        "{what} {}: is gone, not the file it was, or in no folder that a snapshot may name",
        path.display()
    );
    Failure::usage(message).hint("put it back, or allow its folder with --allow-files")
}

/// The disks and the kernel that a VM's process boots.
#[derive(Debug, Serialize, Deserialize)]
pub struct BootOrder {
    /// The processor features that the VM was offered before.
    pub cpu: CpuBaseline,
    kernel: Kernel,
    rootfs_type: String,
    /// The disks in the guest's order; each has one file, unless it is replaced.
    disks: Vec<DiskOrder>,
    taps: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
enum DiskOrder {
    Own,
    ReadOnly(PathBuf),
    Replaced,
}

impl BootOrder {
    /// Returns the parts that the VM is booted from, and its network card.
    pub fn parts(
        self,
        files: Vec<OwnedFd>,
        copy: &CopyParts,
    ) -> Result<(Parts, Option<NetCard>), Failure> {
        let scratch = scratch::place()?.dir;
        let mut files = files.into_iter().map(File::from);
        let mut next = || files.next().ok_or_else(|| Failure::fault("a disk is missing"));
        let mut drives = Vec::new();
        for (place, disk) in self.disks.into_iter().enumerate() {
            let drive = match disk {
                DiskOrder::Own => {
                    let top = overlay::unnamed(&scratch).map_err(prepare::refuse)?;
                    Drive::over(next()?, top)
                }
                DiskOrder::ReadOnly(path) => {
                    let file = next()?;
                    let reader = file.try_clone()?;
                    let source = DriveSource::Opened { file, reader, path: path.clone() };
                    Drive { source, ..Drive::read_only(path) }
                }
                DiskOrder::Replaced => Drive::read_only(""),
            };
            drives.push(copy.drive_at(place).unwrap_or(drive));
        }
        let initramfs = self.kernel.initramfs(AGENT).map_err(prepare::refuse)?;
        let (kernel, rootfs_type) = (self.kernel, self.rootfs_type);
        let parts = Parts { kernel, initramfs, rootfs_type, drives, used_disk: true };
        Ok((parts, copy.boot_card(&self.taps)?))
    }
}
