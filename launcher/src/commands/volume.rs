//! `pvmm volume`: disks that outlive the VMs that use them.

use pvmm_sandbox::vm_dir::now;
use pvmm_sandbox::volumes::{Volume, Volumes};

use crate::cli::{self, VolumeVerb};
use crate::exit::{Failure, Outcome};
use crate::output::{self, Table};

pub fn volume(args: cli::Volume) -> Outcome {
    let volumes = Volumes::open()?;
    match args.verb {
        VolumeVerb::Create { name, size } => {
            output::line(&volumes.create(&name, size << 20)?.name)?;
        }
        VolumeVerb::Ls { json } => list(&volumes.list()?, json)?,
        VolumeVerb::Resize { name, size } => {
            output::line(&volumes.resize(&name, size << 20)?.name)?;
        }
        VolumeVerb::Cp { name, new_name } => output::line(&volumes.copy(&name, &new_name)?.name)?,
        VolumeVerb::Rm { names } => {
            for name in names {
                volumes.remove(&name)?;
                output::line(&name)?;
            }
        }
    }
    Ok(0)
}

fn list(volumes: &[Volume], json: bool) -> Result<(), Failure> {
    if json {
        return Ok(output::json(&volumes)?);
    }
    let mut table = Table::new(&["NAME", "SIZE", "ON DISK", "AGE", "STATE"]);
    for volume in volumes {
        table.row(vec![
            volume.name.clone(),
            output::bytes(volume.bytes),
            output::bytes(volume.disk_bytes),
            output::age(now().saturating_sub(volume.created)),
            if volume.in_use { "in use" } else { "free" }.to_owned(),
        ]);
    }
    Ok(table.print()?)
}
