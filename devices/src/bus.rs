//! A map from guest addresses to devices.
//!
//! It is built before the vCPUs start and only read afterwards, so a vCPU finds a device without a
//! lock. Each device protects its own registers.

use std::sync::Arc;

/// A device that answers guest loads and stores in one address range.
///
/// Offsets are relative to the start of the range. The data length is the access size that the
/// guest used: of a size that it does not support, a device reads zeros and ignores writes.
pub trait BusDevice: Send + Sync {
    fn read(&self, offset: u64, data: &mut [u8]);
    fn write(&self, offset: u64, data: &[u8]);
}

/// Why a device could not be placed on a bus.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    #[error("range {base:#x}+{len:#x} is empty or wraps around")]
    BadRange { base: u64, len: u64 },
    #[error("range {base:#x}+{len:#x} overlaps a device already placed")]
    Overlap { base: u64, len: u64 },
}

struct Range {
    base: u64,
    len: u64,
    device: Arc<dyn BusDevice>,
}

/// An address space of devices: one for memory-mapped I/O, one for ports.
#[derive(Default)]
pub struct Bus {
    // Sorted by base, for a binary search.
    ranges: Vec<Range>,
}

impl Bus {
    /// Places `device` at `base..base + len`.
    pub fn insert(
        &mut self,
        base: u64,
        len: u64,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        let end = base.checked_add(len).filter(|end| *end > base);
        let end = end.ok_or(BusError::BadRange { base, len })?;
        let at = self.ranges.partition_point(|range| range.base < base);
        let clear_before = at == 0 || {
            let before = &self.ranges[at - 1];
            before.base + before.len <= base
        };
        let clear_after = self.ranges.get(at).is_none_or(|after| end <= after.base);
        if !clear_before || !clear_after {
            return Err(BusError::Overlap { base, len });
        }
        self.ranges.insert(at, Range { base, len, device });
        Ok(())
    }

    /// Answers a guest load. Returns false, with all ones in `data`, if no device is there.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        match self.find(address, data.len()) {
            Some((device, offset)) => {
                data.fill(0);
                device.read(offset, data);
                true
            }
            None => {
                data.fill(0xff);
                false
            }
        }
    }

    /// Delivers a guest store. Returns false if no device is there.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        match self.find(address, data.len()) {
            Some((device, offset)) => {
                device.write(offset, data);
                true
            }
            None => false,
        }
    }

    fn find(&self, address: u64, len: usize) -> Option<(&dyn BusDevice, u64)> {
        let after = self.ranges.partition_point(|range| range.base <= address);
        let range = &self.ranges[after.checked_sub(1)?];
        let offset = address - range.base;
        let end = offset.checked_add(len as u64)?;
        (end <= range.len).then_some((&*range.device, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo;

    impl BusDevice for Echo {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data[0] = offset as u8;
        }
        fn write(&self, _offset: u64, _data: &[u8]) {}
    }

    fn bus() -> Bus {
        let mut bus = Bus::default();
        bus.insert(0x1000, 0x100, Arc::new(Echo)).unwrap();
        bus.insert(0x1200, 0x100, Arc::new(Echo)).unwrap();
        bus
    }

    #[test]
    fn read_inside_a_range_gives_the_offset() {
        let mut data = [0; 1];
        assert!(bus().read(0x12ff, &mut data));
        assert_eq!(data, [0xff]);
    }

    #[test]
    fn b12_read_of_unmapped_or_straddling_address_gives_all_ones() {
        let mut data = [0; 4];
        for address in [0, 0xfff, 0x10fd, 0x1100, 0x1300, u64::MAX] {
            assert!(!bus().read(address, &mut data), "{address:#x}");
            assert_eq!(data, [0xff; 4]);
        }
    }

    #[test]
    fn insert_of_overlapping_or_wrapping_range_is_refused() {
        let mut bus = bus();
        for (base, len) in [(0x1000, 1), (0xfff, 2), (0x10ff, 0x102), (0, 0), (u64::MAX, 2)] {
            assert!(bus.insert(base, len, Arc::new(Echo)).is_err(), "{base:#x}+{len:#x}");
        }
        bus.insert(0x1100, 0x100, Arc::new(Echo)).unwrap();
    }
}
