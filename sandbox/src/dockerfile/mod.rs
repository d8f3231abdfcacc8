//! Builds templates from Dockerfiles, each step in a sandbox.
//!
//! The file is parsed (`parse`, `words`) and planned (`plan`) as a whole before anything runs, so
//! that an instruction that cannot work is refused at once. Every step that changes the guest has a
//! key of all that it depends on. After it, a snapshot of the sandbox is kept under that key
//! (`kept`), and a later build begins after the last step that it finds there (`build`). At the end
//! the guest's root is read out and becomes the image of the template.

mod build;
mod context;
mod copy_in;
mod kept;
mod log;
mod parse;
mod plan;
mod words;

pub use build::{BuildOptions, build};
pub(crate) use kept::unneeded_steps;
pub use log::Log;
