//! The wire protocol between a host and the agent in its guest: frames, messages, windows, limits.
//! It is a library of its own because both ends must agree on it byte for byte; it does no I/O but for
//! `archive`, with which either end packs and unpacks trees.
//!
//! `docs/agent-protocol.md` describes the same thing for other clients.

pub mod archive;
pub mod codec;
pub mod frame;
pub mod limits;
pub mod message;
pub mod output;
pub mod session;
pub mod sparse;
pub mod window;

#[cfg(test)]
mod tests;

pub use codec::{MessageError, decode, encode};
pub use frame::{Channel, Decoder, Frame, FrameError, Header, Kind};
