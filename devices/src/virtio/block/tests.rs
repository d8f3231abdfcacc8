//! A disk as a driver meets it, with the cases of the bad-input catalogue by their numbers.

use std::io::Write as _;

use super::super::testing::Buffer::{Readable, Writable};
use super::super::testing::MockDriver;
use super::{Block, BlockConfig};

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

#[test]
fn read_of_a_sector_gives_the_bytes_of_the_file() {
    let mut image = tempfile::NamedTempFile::new().unwrap();
    image.write_all(&[7; 4096]).unwrap();
    let mut driver = MockDriver::ready(Block::new(BlockConfig::new(image.path())).unwrap());
    let (used, bytes) = driver.request(0, &[Readable(&header(0, 1)), Writable(512), Writable(1)]);
    assert_eq!(used.unwrap().len, 513);
    assert_eq!((&bytes[1], &bytes[2]), (&vec![7; 512], &vec![0]));
    assert!(driver.take_interrupt());
}
