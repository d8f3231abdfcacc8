//! A disk from a driver's side, with the cases of the bad-input catalogue by their numbers.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tempfile::{NamedTempFile, TempDir};
use vm_memory::VolatileSlice;

use super::super::conformance::{self, Specimen};
use super::super::registry::{DeviceState, DeviceUpdate};
use super::super::testing::Buffer::{self, Readable, Writable};
use super::super::testing::MockDriver;
use super::super::{VirtioDevice as _, mmio};
use super::io::{Clear, DiskIo, MeasuredDisk, OpenError};
use super::{Block, BlockConfig, BlockError, CacheMode};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

const SECTORS: u64 = 64;

/// An image whose sector n is filled with n.
fn image() -> NamedTempFile {
    let mut image = NamedTempFile::new().unwrap();
    (0..SECTORS).for_each(|sector| image.write_all(&[sector as u8; 512]).unwrap());
    image
}

fn disk(image: &NamedTempFile) -> Block {
    Block::new(BlockConfig::new(image.path()).id("serial")).unwrap()
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

fn range(sector: u64, count: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// Sends buffers followed by room for a status. Returns status, used length and contents.
fn send(driver: &mut MockDriver, buffers: &[Buffer]) -> (u8, u32, Vec<Vec<u8>>) {
    let with_status = [buffers, &[Writable(1)]].concat();
    let (used, bytes) = driver.request(0, &with_status);
    let status = bytes.last().unwrap()[0];
    (status, used.expect("the request was not served").len, bytes)
}

fn read(driver: &mut MockDriver, sector: u64, len: u32) -> (u8, Vec<u8>) {
    let (status, _, bytes) = send(driver, &[Readable(&header(IN, sector)), Writable(len)]);
    (status, bytes[1].clone())
}

fn write(driver: &mut MockDriver, sector: u64, bytes: &[u8]) -> u8 {
    send(driver, &[Readable(&header(OUT, sector)), Readable(bytes)]).0
}

fn flush(driver: &mut MockDriver) -> u8 {
    send(driver, &[Readable(&header(FLUSH, 0))]).0
}

fn clear(driver: &mut MockDriver, kind: u32, ranges: &[u8]) -> u8 {
    send(driver, &[Readable(&header(kind, 0)), Readable(ranges)]).0
}

/// A host disk with injected errors.
#[derive(Clone, Default)]
struct Fragile {
    bytes: Arc<Mutex<Vec<u8>>>,
    // Errors to return, last one first; without any, requests succeed.
    errors: Arc<Mutex<Vec<i32>>>,
    // The maximum number of bytes that one call moves, if not zero.
    step: usize,
    calls: Arc<AtomicU32>,
}

impl Fragile {
    fn new(step: usize) -> Self {
        let bytes = (0..SECTORS).flat_map(|sector| [sector as u8; 512]).collect();
        Self { bytes: Arc::new(Mutex::new(bytes)), step, ..Self::default() }
    }

    fn driver(&self) -> MockDriver {
        MockDriver::ready(Block::on(Box::new(self.clone()), SECTORS))
    }

    fn fail_next(&self, errors: &[i32]) {
        self.errors.lock().unwrap().extend(errors.iter().rev());
    }

    fn begin(&self) -> io::Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.errors.lock().unwrap().pop().map_or(Ok(()), |e| Err(io::Error::from_raw_os_error(e)))
    }

    fn each(
        &self,
        buffers: &[VolatileSlice],
        offset: u64,
        copy: impl Fn(&VolatileSlice, &mut [u8]),
    ) -> io::Result<usize> {
        self.begin()?;
        let mut bytes = self.bytes.lock().unwrap();
        let start = bytes.len().min(offset as usize);
        let limit = if self.step > 0 { self.step } else { usize::MAX };
        let end = bytes.len().min(start.saturating_add(limit));
        let mut rest = &mut bytes[start..end];
        let mut done = 0;
        for buffer in buffers {
            let len = buffer.len().min(rest.len());
            let (part, later) = rest.split_at_mut(len);
            copy(&buffer.subslice(0, len).unwrap(), part);
            (rest, done) = (later, done + len);
        }
        Ok(done)
    }
}

impl DiskIo for Fragile {
    fn read(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize> {
        self.each(buffers, offset, |buffer, bytes| buffer.copy_from(bytes))
    }

    fn write(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize> {
        self.each(buffers, offset, |buffer, bytes| {
            buffer.copy_to(bytes);
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.begin()
    }

    fn clear(&self, _how: Clear, offset: u64, len: u64) -> io::Result<()> {
        self.begin()?;
        self.bytes.lock().unwrap()[offset as usize..][..len as usize].fill(0);
        Ok(())
    }
}

impl MeasuredDisk for Fragile {
    fn measure(&self) -> io::Result<u64> {
        self.begin()?;
        Ok(self.bytes.lock().unwrap().len() as u64)
    }
}

struct Disk(NamedTempFile);

impl Specimen for Disk {
    type Device = Block;
    const QUEUE: usize = 0;

    fn fresh(&self) -> Block {
        disk(&self.0)
    }

    fn restored(&self, state: &DeviceState) -> Block {
        let DeviceState::Block(state) = state else { panic!("{state:?}") };
        Block::restore(BlockConfig::new(self.0.path()), state).unwrap()
    }

    fn exercise(&self, driver: &mut MockDriver) {
        assert_eq!(write(driver, 7, &[0xaa; 1024]), OK);
        assert_eq!(read(driver, 7, 1024), (OK, vec![0xaa; 1024]));
    }
}

conformance::suite!(Disk(image()));

#[test]
fn read_gives_the_bytes_of_the_file_and_their_length() {
    let image = image();
    let mut driver = MockDriver::ready(disk(&image));
    let buffers = [Readable(&header(IN, 3)), Writable(512), Writable(1024)];
    let (status, len, bytes) = send(&mut driver, &buffers);
    assert_eq!((status, len), (OK, 1537));
    assert_eq!(bytes[1], [3; 512]);
    assert_eq!(bytes[2], [[4; 512], [5; 512]].concat());
    assert!(driver.take_interrupt());
}

#[test]
fn write_and_flush_reach_the_file() {
    let image = image();
    let mut driver = MockDriver::ready(disk(&image));
    assert_eq!(write(&mut driver, 63, &[0xcc; 512]), OK);
    assert_eq!(flush(&mut driver), OK);
    let bytes = fs::read(image.path()).unwrap();
    assert_eq!(bytes[63 * 512..], [0xcc; 512]);
    assert_eq!(bytes[62 * 512..63 * 512], [62; 512]);
}

#[test]
fn features_follow_the_configuration() {
    let image = image();
    let features = |config: BlockConfig| Block::new(config).unwrap().features();
    let path = || BlockConfig::new(image.path());
    let bits = |bits: &[u32]| bits.iter().map(|bit| 1u64 << bit).sum::<u64>();
    assert_eq!(features(path()), bits(&[2, 6, 9, 13, 14]));
    assert_eq!(features(path().cache(CacheMode::Unsafe)), bits(&[2, 6, 13, 14]));
    assert_eq!(features(path().read_only(true)), bits(&[2, 5, 6]));
}

#[test]
fn configuration_space_has_capacity_and_limits() {
    let driver = MockDriver::new(disk(&image()));
    assert_eq!(driver.read(mmio::offset::CONFIG), SECTORS as u32);
    assert_eq!(driver.read(mmio::offset::CONFIG + 12), 254);
    assert_eq!(driver.read(mmio::offset::CONFIG + 20), 512);
}

#[test]
fn capacity_of_an_odd_file_is_rounded_down() {
    let image = image();
    image.as_file().set_len(512 * 3 + 511).unwrap();
    let driver = MockDriver::new(disk(&image));
    assert_eq!(driver.read(mmio::offset::CONFIG), 3);
}

#[test]
fn discard_and_write_zeroes_clear_ranges_of_the_file() {
    let image = image();
    let mut driver = MockDriver::ready(disk(&image));
    let ranges = [range(0, 1, 0), range(10, 2, 0)].concat();
    assert_eq!(clear(&mut driver, DISCARD, &ranges), OK);
    assert_eq!(clear(&mut driver, WRITE_ZEROES, &range(20, 1, 0)), OK);
    assert_eq!(clear(&mut driver, WRITE_ZEROES, &range(30, 1, 1)), OK);
    let bytes = fs::read(image.path()).unwrap();
    for (sector, bytes) in bytes.chunks(512).enumerate() {
        let cleared = [0, 10, 11, 20, 30].contains(&sector);
        assert_eq!(bytes, [if cleared { 0 } else { sector as u8 }; 512], "{sector}");
    }
    assert_eq!(bytes.len() as u64, SECTORS * 512);
}

#[test]
fn write_zeroes_where_the_host_cannot_clear_writes_them() {
    let host = Fragile::new(0);
    let mut driver = host.driver();
    host.fail_next(&[libc::EOPNOTSUPP, libc::EOPNOTSUPP]);
    assert_eq!(clear(&mut driver, WRITE_ZEROES, &range(5, 2, 1)), OK);
    let bytes = host.bytes.lock().unwrap();
    assert_eq!(bytes[5 * 512..7 * 512], [0; 1024]);
    assert_eq!(bytes[7 * 512..8 * 512], [7; 512]);
}

#[test]
fn discard_where_the_host_cannot_is_unsupported() {
    let host = Fragile::new(0);
    host.fail_next(&[libc::EOPNOTSUPP]);
    assert_eq!(clear(&mut host.driver(), DISCARD, &range(5, 2, 0)), UNSUPP);
}

#[test]
fn one_turn_serves_a_bounded_share() {
    let host = Fragile::new(0);
    let mut driver = host.driver();
    driver.run();
    let request = driver.place(0, &[Readable(&header(IN, 0)), Writable(512), Writable(1)]);
    // One head again and again: the device returns it before it takes it again.
    (0..256).for_each(|_| driver.offer(0, request.head));
    driver.kick(0);
    driver.devices.run(1);
    assert_eq!(host.calls.load(Ordering::Relaxed), 64);
    driver.run();
    assert_eq!(driver.used_index(0), 256);
}

#[test]
fn one_turn_of_discards_is_bounded_by_their_length() {
    let image = image();
    image.as_file().set_len(64 << 20).unwrap();
    let mut driver = MockDriver::ready(disk(&image));
    driver.run();
    let all = range(0, (64 << 20) / 512, 0);
    let request = driver.place(0, &[Readable(&header(DISCARD, 0)), Readable(&all), Writable(1)]);
    (0..8).for_each(|_| driver.offer(0, request.head));
    driver.kick(0);
    for turn in 1..=8 {
        driver.devices.run(1);
        assert_eq!(driver.used_index(0), turn);
    }
}

#[test]
fn a9_request_longer_than_the_cap_is_an_error_of_length_zero() {
    let image = image();
    image.as_file().set_len(1 << 30).unwrap();
    let mut driver = MockDriver::ready(disk(&image));
    let head = driver.place(0, &[Readable(&header(IN, 0))]).head;
    // One megabyte of memory, 65 times.
    let buffer = driver.allocate(1 << 20).0;
    let status = driver.allocate(1);
    driver.descriptor(0, head, buffer, 16, 1, 1);
    (1..=65).for_each(|index| driver.descriptor(0, index, buffer, 1 << 20, 3, index + 1));
    driver.descriptor(0, 66, status.0, 1, 2, 0);
    driver.offer(0, head);
    driver.kick(0);
    driver.run();
    assert_eq!(driver.used(0).unwrap().len, 0);
    assert_eq!(vm_memory::Bytes::read_obj::<u8>(&driver.memory, status).unwrap(), IOERR);
}

#[test]
fn a18_reset_between_turns_leaves_waiting_requests_alone() {
    let host = Fragile::new(0);
    let mut driver = host.driver();
    driver.run();
    let request = driver.place(0, &[Readable(&header(IN, 5)), Writable(512), Writable(1)]);
    (0..200).for_each(|_| driver.offer(0, request.head));
    driver.kick(0);
    driver.devices.run(1);
    driver.reset();
    let calls = host.calls.load(Ordering::Relaxed);
    vm_memory::Bytes::write_slice(&driver.memory, &[9; 512], request.buffers[1].0).unwrap();
    driver.run();
    assert_eq!(host.calls.load(Ordering::Relaxed), calls);
    assert_eq!(driver.contents(&request)[1], [9; 512]);
}

#[test]
fn c1_sector_that_overflows_is_an_error() {
    let host = Fragile::new(0);
    let mut driver = host.driver();
    for sector in [u64::MAX, u64::MAX >> 9, (u64::MAX >> 9) + 1, u64::MAX - 1, 1 << 55] {
        assert_eq!(read(&mut driver, sector, 512).0, IOERR, "{sector:#x}");
        assert_eq!(write(&mut driver, sector, &[1; 512]), IOERR, "{sector:#x}");
    }
    assert_eq!(host.calls.load(Ordering::Relaxed), 0, "the host was asked");
}

#[test]
fn c2_access_past_the_end_is_an_error_and_writes_nothing() {
    let image = image();
    let before = fs::read(image.path()).unwrap();
    let mut driver = MockDriver::ready(disk(&image));
    for sector in [SECTORS, SECTORS - 1] {
        assert_eq!(read(&mut driver, sector, 1024).0, IOERR);
        assert_eq!(write(&mut driver, sector, &[0xee; 1024]), IOERR);
    }
    assert_eq!(read(&mut driver, SECTORS - 1, 512).0, OK);
    assert_eq!(fs::read(image.path()).unwrap(), before);
}

#[test]
fn c3_length_that_is_not_whole_sectors_is_an_error() {
    let mut driver = MockDriver::ready(disk(&image()));
    for len in [1, 511, 513, 1000] {
        assert_eq!(read(&mut driver, 0, len).0, IOERR);
        assert_eq!(write(&mut driver, 0, &vec![1; len as usize]), IOERR);
    }
}

#[test]
fn c4_header_in_pieces_is_parsed_and_a_short_one_is_an_error() {
    let mut driver = MockDriver::ready(disk(&image()));
    let bytes = header(IN, 9);
    let mut pieces: Vec<Buffer> = bytes.chunks(3).map(Readable).collect();
    pieces.push(Writable(512));
    let (status, _, contents) = send(&mut driver, &pieces);
    assert_eq!((status, &contents[pieces.len() - 1]), (OK, &vec![9; 512]));
    assert_eq!(send(&mut driver, &[Readable(&bytes[..15]), Writable(512)]).0, IOERR);
    assert_eq!(send(&mut driver, &[]).0, IOERR);
}

#[test]
fn c5_request_without_room_for_a_status_asks_for_reset() {
    let image = image();
    let header = header(IN, 0);
    let cases: [&[Buffer]; 3] = [
        &[Readable(&header)],
        &[Readable(&header), Readable(&[0])],
        &[Readable(&header), Writable(512), Writable(0)],
    ];
    for buffers in cases {
        let mut driver = MockDriver::ready(disk(&image));
        assert_eq!(driver.request(0, buffers).0, None, "{buffers:?}");
        assert!(driver.needs_reset());
        assert_eq!(driver.transport.counters().faults, 1);
    }
}

#[test]
fn c6_unknown_kind_is_unsupported() {
    let mut driver = MockDriver::ready(disk(&image()));
    for kind in [2, 3, 5, 9, 10, 12, 14, 0x8000_0000, u32::MAX] {
        let (status, len, _) = send(&mut driver, &[Readable(&header(kind, 0)), Writable(512)]);
        assert_eq!((status, len), (UNSUPP, 0), "{kind}");
    }
    assert_eq!(driver.transport.counters().refused, 9);
}

#[test]
fn c7_write_to_a_read_only_disk_is_an_error_whatever_the_driver_accepted() {
    let image = image();
    let before = fs::read(image.path()).unwrap();
    // The descriptor is writable, so that only the device protects the file.
    let file = File::options().read(true).write(true).open(image.path()).unwrap();
    let config = BlockConfig::from_file(file).read_only(true);
    let mut driver = MockDriver::new(Block::new(config).unwrap());
    driver.start_with(mmio::VERSION_1);
    assert_eq!(write(&mut driver, 0, &[0xee; 512]), IOERR);
    assert_eq!(clear(&mut driver, DISCARD, &range(0, 1, 0)), IOERR);
    assert_eq!(clear(&mut driver, WRITE_ZEROES, &range(0, 1, 0)), IOERR);
    assert_eq!(read(&mut driver, 1, 512), (OK, vec![1; 512]));
    assert_eq!(fs::read(image.path()).unwrap(), before);
}

#[test]
fn c8_id_is_cut_to_the_buffer() {
    let image = image();
    let mut driver = MockDriver::ready(disk(&image));
    let mut id = |len| {
        let buffers = [Readable(&header(GET_ID, 0)), Writable(len)];
        let (status, used, bytes) = send(&mut driver, &buffers);
        assert_eq!((status, used), (OK, len.min(20) + 1));
        bytes[1].clone()
    };
    assert_eq!(id(20), b"serial\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(id(3), b"ser");
    assert_eq!(id(0), b"");
    assert_eq!(id(30)[20..], [0; 10]);
}

#[test]
fn c9_bad_ranges_are_errors_and_clear_nothing() {
    let host = Fragile::new(0);
    let mut driver = host.driver();
    let good = range(0, 1, 0);
    let cases = [
        range(SECTORS, 1, 0),
        range(SECTORS - 1, 2, 0),
        range(u64::MAX, 1, 0),
        range(1 << 55, 1, 0),
        range(u64::MAX, u32::MAX, 0),
        range(0, u32::MAX, 0),
        good[..15].to_vec(),
        Vec::new(),
        good.repeat(17),
    ];
    for kind in [DISCARD, WRITE_ZEROES] {
        for ranges in &cases {
            assert_eq!(clear(&mut driver, kind, ranges), IOERR, "{ranges:?}");
        }
        // A bad range after a good one fails both, and so does an unknown flag.
        let second = [good.clone(), range(SECTORS, 1, 0)].concat();
        assert_eq!(clear(&mut driver, kind, &second), IOERR);
        assert_eq!(clear(&mut driver, kind, &range(0, 1, 2)), UNSUPP);
    }
    assert_eq!(clear(&mut driver, DISCARD, &range(0, 1, 1)), UNSUPP);
    assert_eq!(host.calls.load(Ordering::Relaxed), 0, "the host was asked");
}

#[test]
fn c10_file_that_shrank_is_an_error_and_the_disk_lives() {
    let image = image();
    let mut driver = MockDriver::ready(disk(&image));
    image.as_file().set_len(512 * 10).unwrap();
    assert_eq!(read(&mut driver, 9, 1024).0, IOERR);
    assert_eq!(read(&mut driver, 60, 512).0, IOERR);
    assert_eq!(read(&mut driver, 9, 512), (OK, vec![9; 512]));
    assert!(!driver.needs_reset());
}

#[test]
fn c11_host_error_is_one_error_without_a_second_try() {
    for errno in [libc::EIO, libc::ENOSPC, libc::EDQUOT] {
        let host = Fragile::new(0);
        let mut driver = host.driver();
        host.fail_next(&[errno]);
        assert_eq!(write(&mut driver, 0, &[1; 512]), IOERR);
        assert_eq!(host.calls.load(Ordering::Relaxed), 1);
        host.fail_next(&[errno]);
        assert_eq!(read(&mut driver, 0, 512).0, IOERR);
        host.fail_next(&[errno]);
        assert_eq!(clear(&mut driver, DISCARD, &range(0, 1, 0)), IOERR);
        assert_eq!(write(&mut driver, 0, &[1; 512]), OK);
        assert!(!driver.needs_reset());
    }
}

#[test]
fn c12_short_and_interrupted_transfers_are_resumed_to_full_length() {
    let host = Fragile::new(100);
    let mut driver = host.driver();
    host.fail_next(&[libc::EINTR, libc::EINTR]);
    let buffers = [
        Readable(&header(OUT, 2)),
        Readable(&[1; 30]),
        Readable(&[]),
        Readable(&[2; 482]),
        Readable(&[3; 512]),
    ];
    assert_eq!(send(&mut driver, &buffers).0, OK);
    host.fail_next(&[libc::EINTR]);
    let (status, bytes) = read(&mut driver, 2, 1024);
    assert_eq!(status, OK);
    assert_eq!(bytes, [&[1; 30][..], &[2; 482], &[3; 512]].concat());
    assert_eq!(host.bytes.lock().unwrap()[4 * 512..5 * 512], [4; 512]);
}

#[test]
fn c13_failed_flush_fails_for_good() {
    let host = Fragile::new(0);
    let mut driver = host.driver();
    assert_eq!(flush(&mut driver), OK);
    host.fail_next(&[libc::EIO]);
    assert_eq!(flush(&mut driver), IOERR);
    assert_eq!(flush(&mut driver), IOERR);
    driver.start();
    assert_eq!(flush(&mut driver), IOERR);
    let DeviceState::Block(state) = driver.suspend().state.device else { panic!() };
    assert!(state.flush_failed);
}

#[test]
fn flush_of_an_unsafe_disk_asks_nothing_of_the_host() {
    let host = Fragile::new(0);
    let mut block = Block::on(Box::new(host.clone()), SECTORS);
    block.facts.cache = CacheMode::Unsafe;
    assert_eq!(flush(&mut MockDriver::ready(block)), OK);
    assert_eq!(host.calls.load(Ordering::Relaxed), 0);
}

#[test]
fn c14_file_in_use_is_refused_unless_all_only_read() {
    let image = image();
    let open = |read_only| Block::new(BlockConfig::new(image.path()).read_only(read_only));
    let is_locked = |read_only| {
        matches!(open(read_only), Err(BlockError::Open { source: OpenError::Locked { .. }, .. }))
    };
    let writer = open(false).unwrap();
    assert!(is_locked(false) && is_locked(true));
    drop(writer);
    let _readers = [open(true).unwrap(), open(true).unwrap()];
    assert!(is_locked(false));
}

#[test]
fn c15_anything_but_a_file_of_useful_size_is_refused() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("good"), [0; 512]).unwrap();
    symlink(path("good"), path("link")).unwrap();
    let fifo = std::process::Command::new("mkfifo").arg(path("fifo")).status().unwrap();
    assert!(fifo.success());
    let open = |path: &std::path::Path, read_only| match Block::new(
        BlockConfig::new(path).read_only(read_only),
    ) {
        Err(BlockError::Open { source, .. }) => Err(source),
        other => Ok(other.unwrap()),
    };
    for read_only in [true, false] {
        assert!(matches!(open(&path("link"), read_only), Err(OpenError::Symlink)));
        assert!(matches!(open(&path("fifo"), read_only), Err(OpenError::Kind)));
        assert!(matches!(open(dir.path(), read_only), Err(OpenError::Kind)));
        assert!(matches!(open("/dev/null".as_ref(), read_only), Err(OpenError::Kind)));
        assert!(matches!(open(&path("none"), read_only), Err(OpenError::Access { .. })));
        assert!(open(&path("good"), read_only).is_ok());
    }
}

#[test]
fn c15_absurdly_large_file_is_refused() {
    let file = crate::sys::memory_file("disk").unwrap();
    file.set_len(i64::MAX as u64).unwrap();
    let error = Block::new(BlockConfig::from_file(file)).err().unwrap();
    assert!(matches!(error, BlockError::Open { source: OpenError::Size { .. }, .. }));
}

#[test]
fn image_of_less_than_a_sector_is_a_disk_of_none_until_it_is_replaced() {
    let dir = TempDir::new().unwrap();
    for size in [0, 511] {
        let (stub, real) = (dir.path().join("stub"), dir.path().join("real"));
        fs::write(&stub, vec![0; size]).unwrap();
        fs::write(&real, [0; 2048]).unwrap();
        let mut block = Block::new(BlockConfig::new(stub)).unwrap();
        assert_eq!(block.facts.capacity_sectors, 0, "{size}");
        let update = block.handle().open(super::Source::Path(real)).unwrap();
        block.change(DeviceUpdate::Block(update)).unwrap();
        assert_eq!(block.facts.capacity_sectors, 4, "{size}");
    }
}

#[test]
fn id_that_is_too_long_or_unprintable_is_refused() {
    let image = image();
    for id in ["123456789012345678901", "a\nb", "\0", "é"] {
        let config = BlockConfig::new(image.path()).id(id);
        assert!(matches!(Block::new(config), Err(BlockError::Id { .. })), "{id:?}");
    }
}

#[test]
fn restore_onto_another_disk_is_refused() {
    let image = image();
    let state = disk(&image).state();
    let restore = |state: &super::BlockStateV1| {
        Block::restore(BlockConfig::new(image.path()), state).map(|block| block.state())
    };
    assert_eq!(restore(&state).unwrap(), state);
    let larger = super::BlockStateV1 { capacity_sectors: 65, ..state.clone() };
    assert!(matches!(restore(&larger), Err(BlockError::Capacity { saved: 65, here: 64 })));
    let read_only = super::BlockStateV1 { read_only: true, ..state };
    assert!(matches!(restore(&read_only), Err(BlockError::Access { .. })));
}

#[path = "tests/engines.rs"]
mod engines;
#[path = "tests/updates.rs"]
mod updates;
