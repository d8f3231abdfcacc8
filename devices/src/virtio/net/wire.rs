//! The header before each frame (virtio 1.2 section 5.1.6.1), and the checks of the guest's
//! headers.
//!
//! The functions are pure: bytes in, bytes or a refusal out. An accepted header is rebuilt from
//! checked fields, so the host's kernel never sees an unchecked bit.

/// The length of the header. It always has the count of buffers, as virtio 1 requires.
pub const HEADER_LEN: usize = 12;
/// The length of destination, source and type.
pub const ETHERNET_LEN: usize = 14;
/// The longest frame: a whole unsegmented IP packet with its Ethernet header and a tag.
pub const FRAME_MAX: usize = ETHERNET_LEN + 4 + 65536;
/// The offset of the count of buffers in the header.
pub const NUM_BUFFERS_OFFSET: u64 = 10;

const NEEDS_CSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_ECN: u8 = 0x80;

/// The types of tagged frames: a guest may not send to VLANs of the host.
const TAGGED: [[u8; 2]; 3] = [[0x81, 0x00], [0x88, 0xa8], [0x91, 0x00]];

/// The negotiated transmit offloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxOffloads {
    pub csum: bool,
    pub tso4: bool,
    pub tso6: bool,
    pub ecn: bool,
}

/// Why a frame of the guest is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Length,
    Checksum,
    Segmentation,
    Source,
    Tagged,
}

/// Checks a header against its frame's length and returns the header to send.
pub fn check_header(
    header: &[u8; HEADER_LEN],
    frame_len: usize,
    offloads: TxOffloads,
) -> Result<[u8; HEADER_LEN], Refusal> {
    if !(ETHERNET_LEN..=FRAME_MAX).contains(&frame_len) {
        return Err(Refusal::Length);
    }
    let [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1, ..] = *header;
    let (header_len, gso_size) = (u16::from_le_bytes([h0, h1]), u16::from_le_bytes([g0, g1]));
    let (start, offset) = (u16::from_le_bytes([s0, s1]), u16::from_le_bytes([o0, o1]));
    let mut clean = [0; HEADER_LEN];
    let wants_csum = flags & NEEDS_CSUM != 0;
    if wants_csum {
        let end = usize::from(start) + usize::from(offset) + 2;
        if !offloads.csum || usize::from(start) < ETHERNET_LEN || end > frame_len {
            return Err(Refusal::Checksum);
        }
        clean[0] = NEEDS_CSUM;
        clean[6..10].copy_from_slice(&[s0, s1, o0, o1]);
    }
    if gso_type != GSO_NONE {
        let ecn = gso_type & GSO_ECN != 0;
        let allowed = match gso_type & !GSO_ECN {
            GSO_TCPV4 => offloads.tso4,
            GSO_TCPV6 => offloads.tso6,
            _ => false,
        };
        let sane = wants_csum && gso_size > 0 && usize::from(header_len) <= frame_len;
        if !allowed || ecn && !offloads.ecn || !sane {
            return Err(Refusal::Segmentation);
        }
        clean[1] = gso_type;
        clean[2..6].copy_from_slice(&[h0, h1, g0, g1]);
    }
    Ok(clean)
}

/// Refuses frames with the source address of another machine and frames with a VLAN tag.
pub fn check_ethernet(header: &[u8; ETHERNET_LEN], mac: [u8; 6]) -> Result<(), Refusal> {
    if header[6..12] != mac {
        return Err(Refusal::Source);
    }
    if TAGGED.iter().any(|kind| header[12..14] == *kind) {
        return Err(Refusal::Tagged);
    }
    Ok(())
}
