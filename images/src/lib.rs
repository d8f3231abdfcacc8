//! Prepares the parts of a sandbox: guest kernels, root filesystems, writable disks.
//!
//! A separate crate because all of it runs before, and outside, the monitor process. It needs no
//! root and no Docker; packages are fetched with apt. `examples/prepare.rs` shows the whole crate.
//!
//! Start with [`Cache::open`]; [`Kernel::default_in`] then gives a guest kernel, and
//! [`Template::ensure`] with [`Recipe::base`] a root filesystem image, which it builds if there is
//! none. Both report what they do to a [`Progress`]; [`Silent`] is one that ignores it.
//!
//! | module | contents |
//! | --- | --- |
//! | [`cache`] | the directory that keeps everything below between runs |
//! | [`kernel`], [`initramfs()`] | the guest kernel, and the initramfs with the agent |
//! | [`template`], [`packages`] | root filesystem images, and the Debian packages in them |
//! | [`Import`], [`compression`] | root filesystems from archives, folders and guests |
//! | [`oci`] | container images |
//! | [`part`] | the files of a template or snapshot that is sent to another host |
//! | [`store`] | the images of templates, by digest, until nothing needs them |
//! | [`overlay`] | the writable disk of one VM |
//! | [`progress`] | events of long work, for a caller that shows them |

mod budget;
pub mod cache;
pub mod compression;
mod deb;
pub mod initramfs;
pub mod kernel;
pub mod oci;
pub mod overlay;
pub mod packages;
pub mod part;
pub mod progress;
mod rootfs;
mod source;
pub mod store;
mod sys;
pub mod template;
mod tool;
pub mod volume;

pub use cache::Cache;
pub use deb::DebError;
pub use initramfs::initramfs;
pub use kernel::Kernel;
pub use progress::{Event, Progress, Silent};
pub use rootfs::{Import, ImportError, RootfsError};
pub use source::{Origin, Settings, Source, SourceKind};
pub use template::{Recipe, Template};
pub use tool::ToolError;
