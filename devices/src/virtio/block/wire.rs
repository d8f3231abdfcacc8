//! The bytes of a block request (virtio 1.2 section 5.2.6), and the arithmetic on their values.
//!
//! The functions are pure: guest bytes in, checked values out. A request that this file accepts
//! lies within the disk.

/// The unit of all positions on the wire.
pub const SECTOR_SIZE: u64 = 512;
/// The length of the header at the start of every request.
pub const HEADER_LEN: usize = 16;
/// The maximum length of a serial number.
pub const ID_LEN: usize = 20;
/// The length of one range of a discard or write-zeroes request.
pub const RANGE_LEN: usize = 16;
/// The maximum number of bytes that one read or write moves.
pub const TRANSFER_MAX: u64 = 64 << 20;

/// The status in the last byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
}

/// The header of a request of a known type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub sector: u64,
}

impl Header {
    /// Returns None for an unknown type.
    pub fn parse(raw: [u8; HEADER_LEN]) -> Option<Self> {
        let raw = u128::from_le_bytes(raw);
        let kind = match raw as u32 {
            0 => Kind::Read,
            1 => Kind::Write,
            4 => Kind::Flush,
            8 => Kind::GetId,
            11 => Kind::Discard,
            13 => Kind::WriteZeroes,
            _ => return None,
        };
        Some(Self { kind, sector: (raw >> 64) as u64 })
    }
}

/// Returns the file offset of a read or write of `len` bytes at `sector`. Returns None if it is not
/// whole sectors within the disk, or is longer than one request may be.
pub fn transfer_offset(sector: u64, len: u64, capacity_sectors: u64) -> Option<u64> {
    let whole = len.is_multiple_of(SECTOR_SIZE) && len <= TRANSFER_MAX;
    let end = sector.checked_add(len / SECTOR_SIZE)?;
    (whole && end <= capacity_sectors).then_some(())?;
    sector.checked_mul(SECTOR_SIZE)
}

/// A range of sectors to discard or zero, in bytes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub offset: u64,
    pub len: u64,
    pub unmap: bool,
}

/// The limits of a range of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug)]
pub struct RangeLimits {
    pub capacity_sectors: u64,
    pub sectors_max: u32,
    /// Only write-zeroes has the unmap flag.
    pub may_unmap: bool,
}

impl Range {
    /// Parses a range. Refuses it with `IoError` if it leaves the disk or is too long, and with
    /// `Unsupported` if it has unknown flags.
    pub fn parse(raw: [u8; RANGE_LEN], limits: RangeLimits) -> Result<Self, Status> {
        let raw = u128::from_le_bytes(raw);
        let (sector, count, flags) = (raw as u64, (raw >> 64) as u32, (raw >> 96) as u32);
        if flags > u32::from(limits.may_unmap) {
            return Err(Status::Unsupported);
        }
        let end = sector.checked_add(u64::from(count));
        let inside = end.is_some_and(|end| end <= limits.capacity_sectors);
        if count > limits.sectors_max || !inside {
            return Err(Status::IoError);
        }
        let offset = sector.checked_mul(SECTOR_SIZE).ok_or(Status::IoError)?;
        let len = u64::from(count) * SECTOR_SIZE;
        Ok(Self { offset, len, unmap: flags == 1 })
    }
}

/// Returns the serial number as the guest reads it.
pub fn id_bytes(id: &str) -> [u8; ID_LEN] {
    let mut bytes = [0; ID_LEN];
    for (to, from) in bytes.iter_mut().zip(id.bytes()) {
        *to = from;
    }
    bytes
}
