//! `delete`: cleans up after a daemon that is gone, so that nothing of its pod is left.

use std::io::{self, Write};
use std::time::SystemTime;

use containerd_shim_protos::api::DeleteResponse;
use containerd_shim_protos::protobuf::Message;
use pvmm_sandbox::{FailureKind, Sandboxes};

use crate::bundle::{self, Bundle};
use crate::error::ShimError;
use crate::flags::Flags;
use crate::start;

/// The exit status of a container whose shim was killed.
const KILLED: u32 = 128 + 9;

pub fn delete(flags: &Flags) -> Result<(), ShimError> {
    bundle::check_id(&flags.id)?;
    let bundle = Bundle::of(flags)?;
    if let Some(id) = bundle.read_vm() {
        match Sandboxes::open()?.get(&id) {
            Ok(vm) => vm.end()?,
            Err(failure) if failure.kind() == FailureKind::NotFound => (),
            Err(failure) => return Err(failure.into()),
        }
        // Only the container that a pod began with has the VM, and it ends the pod.
        let _ = std::fs::remove_file(start::socket_of(flags, &flags.id));
    }
    let mut answer = DeleteResponse::new();
    answer.set_exit_status(KILLED);
    answer.set_exited_at(SystemTime::now().into());
    let bytes = answer.write_to_bytes().map_err(|error| ShimError::Invalid(error.to_string()))?;
    io::stdout().write_all(&bytes).map_err(ShimError::io("stdout"))
}
