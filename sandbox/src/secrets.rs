//! Secrets of a VM: the file with their values, and what its guest is told in place of them.
//!
//! The values pass from file to file. No process of a VM has them in its memory, but the one that
//! puts them into requests (`pvmm-egress`), which reads them from a descriptor.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek};
use std::os::unix::fs::OpenOptionsExt;

use pvmm::agent::Refresh;
use pvmm_egress::secrets::Placeholders;

use crate::failure::{Failure, io_text};
use crate::vm_dir::{Egress, VmDir};

/// The port of a secret's host that the guest may reach without a rule.
const HTTPS: u16 = 443;

/// Secrets of which this process knows names and hosts only.
pub struct VmSecrets {
    /// The document with the values.
    pub values: File,
    /// The placeholders that the guest is told; `None` if it knows them, as that of a fork does.
    pub shown: Option<Placeholders>,
}

impl VmSecrets {
    /// Lets the guest reach the hosts of its secrets.
    pub fn allow(&self, egress: &mut Egress) {
        for host in self.shown.iter().flat_map(|shown| &shown.hosts) {
            let rule = format!("{host}:{HTTPS}");
            if !egress.policy.allow_host.contains(&rule) {
                egress.policy.allow_host.push(rule);
            }
        }
    }
}

/// Opens the secrets of a VM, for a fork of it or its egress process; `None` if it has none.
pub fn of_vm(dir: &VmDir) -> Result<Option<VmSecrets>, Failure> {
    match File::open(dir.secrets()) {
        Ok(values) => Ok(Some(VmSecrets { values, shown: None })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(Failure::fault(format!("cannot read the VM's secrets: {}", io_text(&error))))
        }
    }
}

/// Copies values into a VM's directory, where only its egress process gets them from.
pub fn install(mut document: &File, dir: &VmDir) -> Result<(), Failure> {
    let mut copy = || -> io::Result<u64> {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(dir.secrets())?;
        document.rewind()?;
        // From file to file in the kernel: the values do not come into this process.
        io::copy(&mut document, &mut file)
    };
    copy().map(drop).map_err(|error| {
        Failure::fault(format!("cannot keep the VM's secrets: {}", io_text(&error)))
    })
}

/// Adds placeholders and the authority of the certificates that the guest will see to a refresh.
pub fn tell(shown: Option<&Placeholders>, refresh: Refresh) -> Refresh {
    match shown {
        Some(shown) => {
            let variables = shown.variables.iter();
            let variables = variables.map(|(name, value)| (name.as_str(), value.as_str()));
            refresh.trust(&shown.authority, variables)
        }
        None => refresh,
    }
}
