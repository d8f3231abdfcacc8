//! System call filters of a VM's threads: one program for each kind of thread.
//!
//! The library has no policy of its own. A caller that confines a VM supplies the programs, and
//! each thread installs its own before it does anything else. Without them nothing is installed.

use std::io;
use std::sync::Arc;

use pvmm_devices::ThreadEntry;
use seccompiler::{BpfProgram, sock_filter};

use crate::outcome::{Outcome, Report};

/// The most instructions that the kernel takes in one filter.
pub const FILTER_MAX: usize = 4096;

/// Why a filter is not in force.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The kernel refuses an empty program, and one that is longer than [`FILTER_MAX`].
    #[error("a system call filter has {0} instructions; 1 to {max} are possible", max = FILTER_MAX)]
    Length(usize),
    /// The kernel refused the program.
    #[error("the kernel refuses a system call filter")]
    Install(#[source] io::Error),
}

/// A program that the kernel runs at each system call of a thread.
#[derive(Clone, Debug)]
pub struct SystemCallFilter {
    program: BpfProgram,
}

impl SystemCallFilter {
    /// Makes a filter from its instructions, each as the eight bytes of the kernel's `sock_filter`.
    /// The kernel checks them when the filter is installed.
    pub fn new(instructions: &[u64]) -> Result<Self, FilterError> {
        if !(1..=FILTER_MAX).contains(&instructions.len()) {
            return Err(FilterError::Length(instructions.len()));
        }
        let decode = |word: &u64| sock_filter {
            code: *word as u16,
            jt: (*word >> 16) as u8,
            jf: (*word >> 24) as u8,
            k: (*word >> 32) as u32,
        };
        Ok(Self { program: instructions.iter().map(decode).collect() })
    }

    /// Puts the filter in force for the calling thread and the threads and processes that it starts
    /// from now on. A filter cannot be taken off again. Allocates no memory.
    pub fn install(&self) -> Result<(), FilterError> {
        seccompiler::apply_filter(&self.program).map_err(|error| {
            FilterError::Install(match error {
                seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
                _ => io::ErrorKind::InvalidInput.into(),
            })
        })
    }
}

/// The filters of a VM's threads.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ThreadFilters {
    /// For threads that run a vCPU.
    pub vcpu: SystemCallFilter,
    /// For the thread that runs the virtio devices.
    pub devices: SystemCallFilter,
    /// For the thread that writes the serial console's output.
    pub console: SystemCallFilter,
    /// For the thread that watches a page server.
    pub pages: SystemCallFilter,
    /// For the process that copies guest memory while the guest runs.
    pub copier: SystemCallFilter,
}

impl ThreadFilters {
    /// Returns one filter for every thread, kinds of a later version included.
    pub fn all(filter: &SystemCallFilter) -> Self {
        let [vcpu, devices, console, pages, copier] = [(); 5].map(|()| filter.clone());
        Self { vcpu, devices, console, pages, copier }
    }
}

/// Returns the first step of a thread: it installs the filter that `of` selects, if there are
/// filters. If that fails, the thread does not run and the VM ends as broken.
pub(crate) fn entry(
    filters: Option<&Arc<ThreadFilters>>,
    of: fn(&ThreadFilters) -> &SystemCallFilter,
    report: &Report,
) -> Option<ThreadEntry> {
    let (filters, report) = (filters?.clone(), report.clone());
    Some(Arc::new(move || {
        of(&filters).install().map_err(|error| {
            report(Outcome::Broken { why: format!("a thread cannot be confined: {error}") });
            io::Error::other(error)
        })
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `return` with this value, as the kernel's instruction.
    fn ret(value: u32) -> u64 {
        u64::from(value) << 32 | 0x06
    }

    #[test]
    fn filter_that_allows_everything_is_installed() {
        let filter = SystemCallFilter::new(&[ret(0x7fff_0000)]).unwrap();
        let installed = std::thread::spawn(move || filter.install()).join().unwrap();
        assert!(installed.is_ok(), "{installed:?}");
    }

    #[test]
    fn filter_without_a_program_or_with_an_invalid_one_is_refused() {
        assert!(matches!(SystemCallFilter::new(&[]), Err(FilterError::Length(0))));
        let long = vec![ret(0); FILTER_MAX + 1];
        assert!(matches!(SystemCallFilter::new(&long), Err(FilterError::Length(4097))));
        let invalid = SystemCallFilter::new(&[u64::MAX]).unwrap();
        let refused = std::thread::spawn(move || invalid.install()).join().unwrap();
        assert!(matches!(refused, Err(FilterError::Install(_))));
    }
}
