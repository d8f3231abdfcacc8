//! The wire protocol between a host and the agent in its guest: frames, messages, windows, limits.
//!
//! It is a library because both ends must agree on it byte for byte. It does no I/O except in
//! `archive`, with which either end packs and unpacks trees. `docs/agent-protocol.md` describes the
//! protocol for other clients. The agent itself is the binary of this crate; the host's end is
//! `pvmm::agent`.
//!
//! | module | contents |
//! | --- | --- |
//! | [`frame`] | the header of every frame, and a decoder of a stream of them |
//! | [`codec`] | control payloads as bounded MessagePack |
//! | [`message`] | the requests, answers and failures |
//! | [`window`] | flow control: the credit of each channel |
//! | [`limits`] | every number that bounds the protocol |
//! | [`session`], [`sparse`], [`archive`] | what streams carry: records, segments of files, trees |
//! | [`output`] | the last bytes of an output whose middle is dropped |

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
