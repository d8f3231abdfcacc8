//! The guest that every example starts from: kernel and root filesystem of `pvmm run`, 256 MiB, and
//! changes kept in memory.
//!
//! The kernel and the `base` root filesystem are in the cache once `make demo` or `pvmm run` has
//! been there. The agent is part of the program.

#![allow(dead_code)] // No example needs all of it.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::ExecRequest;
use pvmm::{Drive, Initrd, Overrides, VmConfig, Vsock};
use pvmm_agent_image::AGENT;
use pvmm_images::{Cache, Kernel, Silent, Template};

/// Enough for a boot even where processors are emulated.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A guest with one vCPU and 256 MiB, whose socket is `dir/parent.sock`.
pub fn guest(dir: &Path) -> Result<VmConfig, Box<dyn Error>> {
    let cache = Cache::open()?;
    let kernel = Kernel::default_in(&cache, &mut Silent)?;
    let base = Template::find(&cache, "base")?;

    let mut config = VmConfig::new(&kernel.vmlinux);
    config.cmdline = "quiet reboot=k panic=-1 pvmm.root=/dev/vda pvmm.rootfstype=ext4".to_owned();
    // The agent is the guest's first process. It mounts the root filesystem and puts a layer in
    // memory over it, so that the image is never written.
    config.initrd = Some(Initrd::Bytes(kernel.initramfs(AGENT)?));
    config.drives.push(Drive::read_only(base.rootfs));
    config.vsock = Some(Vsock::new(3, dir.join("parent.sock")));
    Ok(config)
}

/// Returns the overrides of a fork: its own socket `dir/name.sock`.
pub fn fork_in(dir: &Path, name: &str) -> Overrides {
    let vsock = Vsock::new(3, dir.join(format!("{name}.sock")));
    Overrides { vsock: Some(vsock), ..Overrides::default() }
}

/// The deadline of something that begins now.
pub fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// Returns the output of a shell line in the guest, without the last newline.
pub fn prints(agent: &Agent, line: &str) -> Result<String, Box<dyn Error>> {
    let output = agent.exec(&ExecRequest::shell(line).timeout(PATIENCE))?;
    if !output.status.success() {
        return Err(format!("{line}: {:?}", output.status.status).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout.bytes).trim_end().to_owned())
}
