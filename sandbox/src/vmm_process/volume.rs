//! The volumes of a VM in its monitor process: opened and locked before the jail is closed, mounted
//! when the agent answers.

use std::path::Path;
use std::time::Duration;

use pvmm::exec::ExecRequest;
use pvmm::open::{self, Access};
use pvmm::{Drive, DriveSource};

use crate::failure::{Failure, FailureKind};
use crate::guest_agent;
use crate::sys::lock;
use crate::vm_dir::{RunDir, VolumeMount};

/// How long a volume may take to be mounted, its journal replayed.
const MOUNT_PATIENCE: Duration = Duration::from_secs(60);
/// How long a guest may take to write its volumes.
const FLUSH_PATIENCE: Duration = Duration::from_secs(10);
/// Mounts a volume once the guest has noticed that there is one: `sh -c … sh DEVICE OPTIONS PLACE`.
const MOUNT: &str = r#"
i=0
until mount -t ext4 -o "$2" "/dev/$1" "$3" 2>/dev/null; do
    i=$((i + 1))
    [ $i -lt 100 ] || exec mount -t ext4 -o "$2" "/dev/$1" "$3"
    mkdir -p "$3"
    sleep 0.05
done
"#;

/// Opens the image of a volume and takes its lock, which is held as long as the process has the
/// file open: one VM may write a volume, or several may read it.
pub fn open(volume: &VolumeMount) -> Result<DriveSource, Failure> {
    let path = &volume.image;
    let access = if volume.read_only { Access::Read } else { Access::ReadWrite };
    let open = |access| {
        open::image(path, access)
            .map_err(|error| Failure::fault(format!("volume {}: {error}", path.display())))
    };
    let (file, reader) = (open(access)?, open(Access::Read)?);
    let free = if volume.read_only { lock::try_shared(&file) } else { lock::try_exclusive(&file) };
    if !free? {
        let message = format!("volume {} is in use by another sandbox", path.display());
        return Err(Failure::usage(message).of_kind(FailureKind::Conflict));
    }
    Ok(DriveSource::Opened { file, reader, path: path.clone() })
}

/// Returns the drive of a VM that is booted with a volume.
pub fn drive(volume: &VolumeMount, source: DriveSource) -> Drive {
    let read_only = volume.read_only;
    Drive { source, read_only, ..Drive::writable(&volume.image) }
}

/// Lets the guest write what it has only in memory, before a VM with volumes is ended at once. A
/// guest that does not answer keeps what its volumes have.
pub fn flush(vsock: &Path, volumes: &[VolumeMount]) {
    if volumes.iter().all(|volume| volume.read_only) {
        return;
    }
    if let Err(error) = guest_agent::sync(vsock, FLUSH_PATIENCE) {
        log::warn!("the volumes may lack the last writes: {error}");
    }
}

/// Mounts the volumes in the guest.
pub fn mount(dir: &RunDir, volumes: &[VolumeMount]) -> Result<(), Failure> {
    if volumes.iter().all(|volume| volume.mounted) {
        return Ok(());
    }
    let agent = guest_agent::connect_at(&dir.vsock(), MOUNT_PATIENCE);
    let agent = agent.map_err(guest_agent::refuse)?;
    for (letter, volume) in (b'c'..).zip(volumes).filter(|(_, volume)| !volume.mounted) {
        let device = format!("vd{}", char::from(letter));
        let options = if volume.read_only { "ro,noload" } else { "rw" };
        let argv = ["/bin/sh", "-c", MOUNT, "sh", &device, options, &volume.at];
        let request = ExecRequest::argv(argv).user("root").timeout(MOUNT_PATIENCE);
        let output = agent.exec(&request).map_err(guest_agent::refuse_exec)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr.bytes).trim().to_owned();
            return Err(Failure::fault(format!(
                "cannot mount the volume at {}: {said}",
                volume.at
            )));
        }
    }
    Ok(())
}
