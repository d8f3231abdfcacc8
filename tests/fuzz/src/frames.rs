//! The agent's protocol as both ends read it: bytes to frames, frames to messages.
//!
//! How a stream is cut into reads must not change what it says, nothing is held for a frame that
//! its header does not allow, and a message that was read can be written and read again.

use pvmm_guest_agent::frame::{Decoder, Frame, HEADER_LEN, Header, Kind};
use pvmm_guest_agent::message::{
    Answer, Goodbye, Hello, Outcome, Request, Signal, Started, Welcome,
};
use pvmm_guest_agent::{decode, encode};

use crate::input::Input;

/// A stream of frames, read at once and in pieces.
pub fn stream(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    // Mostly headers that could be right: a fuzzer finds the rest by itself.
    let mut wire = Vec::new();
    while !input.is_empty() && wire.len() < 1 << 16 {
        if input.below(4) == 0 {
            wire.extend(input.bytes::<7>());
        } else {
            let len =
                u32::from(input.u8()).wrapping_add(if input.u8() == 0 { input.u32() } else { 0 });
            wire.extend(len.to_le_bytes());
            wire.extend(u32::from(input.below(3)).to_le_bytes());
            wire.extend([input.below(12), input.u8() & 0x83, 0, 0]);
            wire.resize(wire.len() + len.min(600) as usize, input.u8());
        }
    }
    let whole = read(&wire, &[wire.len().max(1)]);
    assert_eq!(read(&wire, &[1]), whole);
    assert_eq!(read(&wire, &[3, 11, 64, 1]), whole);
}

/// Reads a stream that arrives in pieces of these sizes. Returns the frames, and whether it broke.
fn read(wire: &[u8], sizes: &[usize]) -> (Vec<(Header, Vec<u8>)>, bool) {
    let (mut decoder, mut said, mut rest) = (Decoder::default(), Vec::new(), wire);
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (mut piece, later) = rest.split_at((*size).min(rest.len()));
        rest = later;
        while !piece.is_empty() {
            match decoder.next(&mut piece) {
                Ok(Some(Frame { header, payload })) => {
                    let (least, most) = header.kind.payload_bounds();
                    assert!((least..=most).contains(&payload.len()));
                    assert_eq!(payload.len(), header.len as usize);
                    said.push((header, payload.to_vec()));
                }
                Ok(None) => assert!(piece.is_empty()),
                Err(_) => return (said, true),
            }
        }
        assert!(decoder.held() <= HEADER_LEN + Kind::Open.payload_bounds().1);
    }
    (said, false)
}

/// One payload, read as every message that either end expects.
pub fn message(bytes: &[u8]) {
    macro_rules! both_ways {
        ($($message:ty => $kind:expr),+) => {
            $(if let Ok(message) = decode::<$message>(bytes) {
                let mut wire = Vec::new();
                if encode(&mut wire, $kind, 1, &message).is_ok() {
                    let again = decode::<$message>(&wire[HEADER_LEN..]).unwrap();
                    assert_eq!(format!("{again:?}"), format!("{message:?}"));
                }
            })+
        };
    }
    both_ways!(
        // The agent's end.
        Hello => Kind::Hello, Request => Kind::Open, Signal => Kind::Signal,
        // The host's end.
        Welcome => Kind::Welcome, Started => Kind::Started, Outcome => Kind::Done,
        Answer => Kind::Done, Goodbye => Kind::Goodbye
    );
}
