//! The bytes of a vsock packet header and of an event (virtio 1.2 section 5.10.6).
//!
//! The code is pure: no memory, no sockets. Decoding never fails, because any 44 bytes are a
//! header; its values are checked where the connection is known.

/// The length of a packet header.
pub const HEADER_LEN: usize = 44;
/// The address of the host.
pub const HOST_CID: u64 = 2;
/// The longest payload that a packet may carry in either direction.
pub const MAX_PAYLOAD: u32 = 64 * 1024;
/// The only socket type that is offered.
pub const TYPE_STREAM: u16 = 1;
/// Flag of a shutdown: the sender will receive no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of a shutdown: the sender will send no more.
pub const SHUTDOWN_SEND: u32 = 2;
/// Both shutdown flags.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
/// The event that makes a driver drop its connections and read its address again.
pub const EVENT_TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();

/// The operation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    Request = 1,
    Response = 2,
    Reset = 3,
    Shutdown = 4,
    Data = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    /// Returns the operation of that number, if there is one.
    pub fn from_raw(raw: u16) -> Option<Self> {
        Some(match raw {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }
}

/// A packet header. `kind` and `op` are numbers because the guest may send unknown ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    pub len: u32,
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
}

impl Header {
    pub fn decode(raw: &[u8; HEADER_LEN]) -> Self {
        Self {
            src_cid: u64::from_le_bytes(part(raw, 0)),
            dst_cid: u64::from_le_bytes(part(raw, 8)),
            src_port: u32::from_le_bytes(part(raw, 16)),
            dst_port: u32::from_le_bytes(part(raw, 20)),
            len: u32::from_le_bytes(part(raw, 24)),
            kind: u16::from_le_bytes(part(raw, 28)),
            op: u16::from_le_bytes(part(raw, 30)),
            flags: u32::from_le_bytes(part(raw, 32)),
            buf_alloc: u32::from_le_bytes(part(raw, 36)),
            fwd_cnt: u32::from_le_bytes(part(raw, 40)),
        }
    }

    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut raw = [0; HEADER_LEN];
        raw[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        raw[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        raw[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        raw[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        raw[24..28].copy_from_slice(&self.len.to_le_bytes());
        raw[28..30].copy_from_slice(&self.kind.to_le_bytes());
        raw[30..32].copy_from_slice(&self.op.to_le_bytes());
        raw[32..36].copy_from_slice(&self.flags.to_le_bytes());
        raw[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        raw[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        raw
    }
}

fn part<const N: usize>(raw: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&raw[at..at + N]);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn header_of_a_known_packet_has_the_documented_layout() {
        let header = Header {
            src_cid: 2,
            dst_cid: 3,
            src_port: 0x0102_0304,
            dst_port: 1024,
            len: 5,
            kind: TYPE_STREAM,
            op: Op::Data as u16,
            flags: 3,
            buf_alloc: 0x4_0000,
            fwd_cnt: 7,
        };
        let mut expected = Vec::new();
        expected.extend([2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([4, 3, 2, 1, 0, 4, 0, 0, 5, 0, 0, 0, 1, 0, 5, 0]);
        expected.extend([3, 0, 0, 0, 0, 0, 4, 0, 7, 0, 0, 0]);
        assert_eq!(header.encode().to_vec(), expected);
    }

    #[test]
    fn op_outside_the_list_is_unknown() {
        for raw in [0, 8, 0x105, u16::MAX] {
            assert_eq!(Op::from_raw(raw), None, "{raw}");
        }
        for raw in 1..=7 {
            assert_eq!(Op::from_raw(raw).map(|op| op as u16), Some(raw));
        }
    }

    proptest! {
        #[test]
        fn header_of_any_bytes_survives_the_round_trip(raw: [u8; HEADER_LEN]) {
            prop_assert_eq!(Header::decode(&raw).encode(), raw);
        }
    }
}
