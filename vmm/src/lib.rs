//! pvmm: an embeddable virtual machine monitor.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `boot.rs` | how a machine comes to be, top to bottom |
//! | `boot_timer.rs` | how a guest says that it has booted |
//! | `vm.rs` | what can be done with a running one |
//! | `freeze.rs`, `restore.rs` | how a running machine becomes a template, and a template a machine |
//! | `rollback.rs` | how a machine goes back to its checkpoint |
//! | `refresh.rs` | how a copy becomes somebody of its own |
//! | `snapshot/` | a template in a folder, or as two files |
//! | `config.rs` | what can be asked for |
//! | `drives.rs`, `nets.rs`, `balloon.rs` | what can be changed about a running machine's devices |
//! | `trace.rs` | where the time of a restore goes |
//! | `agent.rs`, `exec.rs` | how commands run in the guest |

pub mod agent;
mod arch;
mod balloon;
mod boot;
mod boot_timer;
pub mod config;
mod drives;
pub mod error;
pub mod exec;
mod freeze;
pub mod kvm;
mod machine;
mod memory;
mod nets;
mod packed;
mod refresh;
mod restore;
mod rollback;
pub mod scratch;
pub mod snapshot;
mod storage;
mod sys;
mod template;
#[cfg(feature = "testing")]
pub mod testing;
pub mod trace;
mod vcpu;
mod vm;

pub use balloon::Hinting;
pub use config::{
    Balloon, BootProtocol, CacheMode, Console, Drive, DriveSource, EngineKind, Initrd, Mac,
    MmdsConfig, MmdsVersion, Net, RateLimiterConfig, TapSource, ThreadNames, VmConfig, Vsock,
};
pub use error::{Error, ErrorKind};
pub use freeze::UnfinishedTemplate;
pub use pvmm_devices::virtio::balloon::BalloonStats;
pub use pvmm_devices::{listen_privately, open};
pub use refresh::Forked;
pub use snapshot::{NOTE_MAX, SaveKind};
pub use template::{Overrides, Prefault, Template, Touched};
pub use vcpu::run::Outcome;
pub use vm::{CounterValues, DeviceCounters, Vm, next_trim};
