//! An embeddable virtual machine monitor: it boots a Linux guest on KVM from Rust, without a
//! daemon. It runs commands in the guest through a small agent, and it freezes, forks, rolls back
//! and saves a VM that is running.
//!
//! # Example
//!
//! ```no_run
//! use std::path::Path;
//! use std::time::{Duration, Instant};
//!
//! use pvmm::agent::{Agent, Refresh};
//! use pvmm::exec::ExecRequest;
//! use pvmm::{Drive, Initrd, Kvm, Overrides, Vm, VmConfig, Vsock};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = VmConfig::new("vmlinux");
//! config.memory_mib = 512;
//! config.cmdline = "quiet pvmm.root=/dev/vda pvmm.rootfstype=ext4".into();
//! config.initrd = Some(Initrd::Path("initramfs.cpio".into()));
//! config.drives.push(Drive::read_only("rootfs.ext4"));
//! config.vsock = Some(Vsock::new(3, "/run/demo.sock"));
//!
//! // Boot: the VM is loaded, and paused before its first instruction.
//! let kvm = Kvm::open()?;
//! let mut vm = Vm::boot(&kvm, config)?;
//! vm.resume()?;
//! let deadline = Instant::now() + Duration::from_secs(10);
//! let agent = vm.agent(deadline)?;
//! let output = agent.exec(&ExecRequest::argv(["python3", "-c", "print(6*7)"]))?;
//! assert_eq!(output.stdout.bytes, b"42\n");
//!
//! // Freeze: the template is the VM at this instant; the VM itself runs on.
//! let control = Agent::connect_control(Path::new("/run/demo.sock"), deadline)?;
//! control.freeze(deadline)?;
//! let template = vm.freeze()?;
//! control.thaw(deadline)?;
//!
//! // Fork: a new VM with a socket of its own, refreshed before its workload goes on.
//! let vsock = Some(Vsock::new(3, "/run/fork.sock"));
//! let forked = template.fork(Overrides { vsock, ..Overrides::default() })?;
//! let (fork, agent) = forked.refreshed(&Refresh::new(1)?, deadline)?;
//! println!("{:?}", agent.exec(&ExecRequest::shell("cat /etc/machine-id"))?.stdout);
//! # fn is_send<T: Send>(_: &T) {}
//! # fn is_shared<T: Send + Sync>(_: &T) {}
//! # (is_send(&vm), is_send(&fork), is_shared(&template), is_shared(&agent));
//! # Ok(())
//! # }
//! ```
//!
//! # What a caller provides
//!
//! - A **kernel**: an ELF `vmlinux` or a `bzImage`. Its drivers for virtio-mmio are built in, or
//!   modules in the initramfs.
//! - An **initramfs with the agent** as `/init`. `pvmm_images::initramfs` builds one in memory
//!   from the agent in `pvmm_agent_image::AGENT`, for [`Initrd::Bytes`]. The agent mounts the root
//!   image that `pvmm.root=` on the kernel command line names.
//! - A **path for the vsock socket**, which every VM needs to itself. The host reaches the agent
//!   through this Unix socket; beside it, `<path>_<port>` are the sockets that the guest's own
//!   connections arrive at.
//! - `/dev/kvm` on x86-64 Linux; [`kvm::host::probe`] says whether it can run a guest.
//!
//! A VM without agent or vsock works too: it can be booted, frozen, forked and saved, but no
//! command can be run in it, and its forks are not refreshed.
//!
//! # Threads
//!
//! Calls block, and most of those that wait for the guest take a deadline. There is no async
//! runtime. A [`Vm`] has no thread before its first [`Vm::resume`], unless a page server supplies
//! its memory; from then on it has one for each vCPU, one for its devices, and one for the console
//! once the guest prints. It has one owner
//! at a time and can be moved to another thread. A [`Template`] can be shared between threads. An
//! [`agent::Agent`] can be cloned and used from many threads; its connection may have a thread that
//! reads, which ends with the last handle of the connection.
//!
//! No signal handler is installed. One thing is process-wide: a limit on mappings for page dedup,
//! which the VMs of a process share as the kernel counts them together.
//!
//! # Errors
//!
//! Calls about a VM return [`Error`]. Its text names what failed, its sources are the causes, and
//! `{:#}` prints all of them in one line. Its [`ErrorKind`] says whose fault it is, and
//! [`Error::is_retryable`] whether the same call may succeed later. After [`ErrorKind::Broken`] a
//! VM can only be dropped. Calls to the agent return [`agent::AgentError`] or [`exec::ExecError`].
//! That the guest ended is not an error: [`Vm::wait`] returns how, as an [`Outcome`]. A command
//! that fails is none either: see [`exec::ExitStatus`].
//!
//! # Settings and versions
//!
//! Structs of settings, such as [`VmConfig`], [`Overrides`] and [`HostOptions`], gain fields in
//! later versions, and that is no breaking change: make them by their constructor and set fields,
//! or end a literal with `..Default::default()`.
//!
//! # What ends on drop
//!
//! Dropping a [`Vm`] stops its vCPUs and then its devices, and waits for their threads. The guest
//! is not told, as if its power was cut: to let it shut down, call [`agent::Agent::shutdown`] and
//! [`Vm::wait`] first. The socket's file is removed unless [`Vsock::keep_socket`] is set, and disk
//! writes that went to nameless files are gone. Forks live on without the VM and without the
//! template that they were made from.
//!
//! Dropping an [`exec::Process`] kills the process in the guest, and dropping an [`agent::CodeRun`]
//! interrupts its code. Detached processes and sessions stay.
//!
//! # The source
//!
//! | file | what it answers |
//! | --- | --- |
//! | `boot.rs` | how a machine comes to be, top to bottom |
//! | `vm/` | what can be done with a VM and with a template |
//! | `machine/` | the parts of a running machine, and what can be changed about its devices |
//! | `frozen.rs`, `state.rs` | a machine that stands still, and the registers of one |
//! | `freeze.rs`, `restore.rs` | how a machine becomes a template, and a template a machine |
//! | `rollback.rs` | how a machine goes back to its checkpoint |
//! | `refresh.rs` | how a copy gets its own identity, randomness and clock |
//! | `snapshot/` | a template in a folder, or as two files |
//! | `config.rs` | what can be asked for |
//! | `cpu/` | processor baselines: which features a guest is offered |
//! | `trace.rs` | where the time of a restore goes |
//! | `error.rs`, `outcome.rs` | what can fail, and how a VM ends |
//! | `agent/`, `exec.rs` | how commands run in the guest |
//! | `memory/` | guest memory: images, dirty pages, working sets |
//! | `kvm/`, `vcpu/`, `arch/` | KVM's VM and registers, the vCPU threads, what a processor wants |
//! | `storage.rs`, `scratch.rs` | the drives of a machine, and where their top layers are |
//! | `thread_filters.rs` | which system calls the threads of a VM may use |
//! | `ablation.rs` | what a benchmark can leave out |

#![deny(missing_docs)]

pub mod ablation;
pub mod agent;
mod arch;
mod boot;
pub mod config;
pub mod cpu;
pub mod error;
pub mod exec;
mod freeze;
mod frozen;
pub mod kvm;
mod machine;
mod memory;
mod outcome;
mod packed;
mod refresh;
mod restore;
mod rollback;
pub mod scratch;
pub mod snapshot;
mod state;
mod storage;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod thread_filters;
pub mod trace;
mod vcpu;
mod vm;

pub use config::{
    Balloon, BootProtocol, BusDevice, CacheMode, Console, Drive, DriveSource, EngineKind,
    HostOptions, Initrd, KernelSource, Mac, MmdsConfig, MmdsVersion, Net, Overrides, Prefault,
    RateLimiterConfig, Registers, TapSource, VmConfig, Vsock,
};
pub use cpu::{CpuBaseline, CpuLevel};
pub use error::{Error, ErrorKind};
pub use kvm::Kvm;
pub use machine::Hinting;
pub use memory::Adoption;
pub use outcome::Outcome;
pub use pvmm_devices::virtio::balloon::BalloonStats;
pub use pvmm_devices::{listen_privately, open};
pub use snapshot::{NOTE_MAX, SaveKind};
pub use thread_filters::{FILTER_MAX, FilterError, SystemCallFilter, ThreadFilters};
pub use vm::{
    CounterValues, DeviceCounters, Forked, Template, Touched, UnfinishedTemplate, Vm, next_trim,
};
