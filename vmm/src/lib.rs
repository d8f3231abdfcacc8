//! pvmm: an embeddable virtual machine monitor.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `boot.rs` | how a machine comes to be, top to bottom |
//! | `vm.rs` | what can be done with a running one |
//! | `config.rs` | what can be asked for |
//! | `drives.rs` | what can be changed about a running machine's drives |
//! | `agent.rs`, `exec.rs` | how commands run in the guest |

pub mod agent;
mod arch;
mod balloon;
mod boot;
pub mod config;
mod drives;
pub mod error;
pub mod exec;
pub mod kvm;
mod machine;
mod sys;
mod vcpu;
mod vm;

pub use config::{
    Balloon, BootProtocol, CacheMode, Console, Drive, DriveSource, EngineKind, Initrd, Mac, Net,
    RateLimiterConfig, TapSource, VmConfig, Vsock,
};
pub use error::{Error, ErrorKind};
pub use pvmm_devices::virtio::balloon::BalloonStats;
pub use vcpu::run::Outcome;
pub use vm::{CounterValues, DeviceCounters, Vm};
