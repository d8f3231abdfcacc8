//! The system call filters of a monitor process, one for each kind of thread.
//!
//! They are compiled from `seccomp/x86_64.policy` when the program is built, so that nothing is
//! parsed in the process that they confine.

use std::sync::Arc;

use pvmm::{FilterError, SystemCallFilter, ThreadFilters};

mod programs {
    include!(concat!(env!("OUT_DIR"), "/filters.rs"));
}

/// `return` in classic BPF, the lower half of an instruction.
const RETURN: u32 = 0x06;
const SECCOMP_RET_KILL_PROCESS: u32 = 0x8000_0000;
const SECCOMP_RET_TRAP: u32 = 0x0003_0000;

/// The filters of one monitor process.
pub struct Filters {
    /// For the threads of the VM.
    pub threads: Arc<ThreadFilters>,
    /// For the thread that owns the VM, and for the threads that it starts later. The owner
    /// installs it once the VM's threads exist.
    pub owner: SystemCallFilter,
    /// For the thread that keeps the console's log.
    pub log: SystemCallFilter,
}

impl Filters {
    /// The filters of the monitor process of `pvmm run`, `fork` and `restore`. A forbidden call
    /// kills the process.
    pub fn of_monitor() -> Result<Self, FilterError> {
        Self::with(programs::CONTROL, SystemCallFilter::new)
    }

    /// The filters of the Firecracker API server. A forbidden call sends SIGSYS, whose handler
    /// ends the process with Firecracker's exit code.
    pub fn of_api_server() -> Result<Self, FilterError> {
        Self::with(programs::API, trapping)
    }

    fn with(
        owner: &[u64],
        filter: fn(&[u64]) -> Result<SystemCallFilter, FilterError>,
    ) -> Result<Self, FilterError> {
        let mut threads = ThreadFilters::all(&filter(programs::DEVICES)?);
        threads.vcpu = filter(programs::VCPU)?;
        threads.console = filter(programs::CONSOLE)?;
        threads.pages = filter(programs::PAGES)?;
        threads.copier = filter(programs::COPIER)?;
        let (owner, log) = (filter(owner)?, filter(programs::LOG)?);
        Ok(Self { threads: Arc::new(threads), owner, log })
    }
}

/// Makes a filter that sends a signal where the policy kills.
fn trapping(instructions: &[u64]) -> Result<SystemCallFilter, FilterError> {
    let encoded = |action: u32| u64::from(action) << 32 | u64::from(RETURN);
    let (kill, trap) = (encoded(SECCOMP_RET_KILL_PROCESS), encoded(SECCOMP_RET_TRAP));
    let signal = |word: &u64| if *word == kill { trap } else { *word };
    SystemCallFilter::new(&instructions.iter().map(signal).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests;
