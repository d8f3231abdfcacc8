//! Encodes and decodes control payloads: MessagePack with bounds on depth and size.
//!
//! Both ends decode untrusted bytes with this one function.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::frame::{HEADER_LEN, Header, Kind};
use crate::limits::MAX_DEPTH;

/// Errors of a control payload.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    #[error("a control payload is not what its frame kind says")]
    Decode(#[source] rmp_serde::decode::Error),
    #[error("a control payload has {0} bytes too many")]
    Trailing(usize),
    #[error("a message cannot be encoded")]
    Encode(#[source] rmp_serde::encode::Error),
    #[error("a message of {len} bytes is over the {most} of its frame kind")]
    TooLarge { len: usize, most: usize },
}

/// Decodes a control payload.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, MessageError> {
    let mut rest = payload;
    let mut reader = rmp_serde::Deserializer::new(&mut rest);
    reader.set_max_depth(MAX_DEPTH);
    let message = T::deserialize(&mut reader).map_err(MessageError::Decode)?;
    if rest.is_empty() { Ok(message) } else { Err(MessageError::Trailing(rest.len())) }
}

/// Appends a whole control frame to `out`, or leaves `out` unchanged.
pub fn encode<T: Serialize>(
    out: &mut Vec<u8>,
    kind: Kind,
    stream: u32,
    message: &T,
) -> Result<(), MessageError> {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_LEN]);
    let mut writer = rmp_serde::Serializer::new(&mut *out).with_struct_map();
    let written = message.serialize(&mut writer).map_err(MessageError::Encode);
    let len = out.len() - start - HEADER_LEN;
    let most = kind.payload_bounds().1;
    let checked = match written {
        Ok(()) if len > most => Err(MessageError::TooLarge { len, most }),
        other => other,
    };
    if checked.is_err() {
        out.truncate(start);
        return checked;
    }
    let header = Header::new(kind, stream, 0, len).to_bytes();
    out[start..start + HEADER_LEN].copy_from_slice(&header);
    Ok(())
}
