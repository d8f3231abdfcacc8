//! What a sandbox is made from: guest kernels, root filesystems, writable disks.
//! It is a crate of its own because all of it runs before, and outside, the VMM process.

pub mod cache;
mod deb;
pub mod initramfs;
pub mod kernel;
pub mod overlay;
pub mod packages;
pub mod progress;
mod rootfs;
mod sys;
pub mod template;
mod tool;

pub use cache::Cache;
pub use deb::DebError;
pub use initramfs::initramfs;
pub use kernel::Kernel;
pub use progress::{Event, Progress, Silent};
pub use rootfs::RootfsError;
pub use template::{Recipe, Template};
pub use tool::ToolError;
