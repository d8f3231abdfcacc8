//! The engines compared with each other: equal requests on plain files, with direct I/O, and on
//! io_uring.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::EngineKind;
use super::super::io::{Engine, FileDisk, Op, Target, Uring};
use super::*;
use crate::rate_limiter::{BucketConfig, RateLimiterConfig};

/// Creates a disk on io_uring whose operations have completed when its turn ends, so that tests
/// need not wait.
fn uring(image: &NamedTempFile) -> Block {
    settled(image, disk(image))
}

fn event() -> Arc<EventFd> {
    Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())
}

fn settled(image: &NamedTempFile, mut block: Block) -> Block {
    let ended = event();
    let file = File::options().read(true).write(true).open(image.path()).unwrap();
    // The first disk holds the lock; this is another description of its file.
    let disk = FileDisk::unlocked(file);
    let mut uring = Uring::new(&disk, &ended).expect("this host has no io_uring");
    uring.settles = true;
    (block.engine, block.ended) = (Box::new(uring), Some(ended));
    block
}

struct UringDisk(NamedTempFile);

impl Specimen for UringDisk {
    type Device = Block;
    const QUEUE: usize = 0;

    fn fresh(&self) -> Block {
        uring(&self.0)
    }

    fn restored(&self, state: &DeviceState) -> Block {
        let DeviceState::Block(state) = state else { panic!("{state:?}") };
        settled(&self.0, Block::restore(BlockConfig::new(self.0.path()), state).unwrap())
    }

    fn exercise(&self, driver: &mut MockDriver) {
        assert_eq!(write(driver, 7, &[0xaa; 512]), OK);
        assert_eq!(read(driver, 7, 512), (OK, vec![0xaa; 512]));
        assert_eq!(flush(driver), OK);
    }
}

conformance::suite!(UringDisk(image()));

/// An image of 64 KiB blocks, large enough for direct I/O of any unit.
fn large_image() -> NamedTempFile {
    // Not in /tmp, which may be a memory file system without direct I/O.
    let mut image = NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    image.write_all(&vec![7; 1 << 20]).unwrap();
    image
}

/// Waits for a used entry of a disk that works in the background.
fn wait_used(driver: &mut MockDriver) -> super::super::super::testing::Used {
    let start = Instant::now();
    loop {
        driver.run();
        if let Some(used) = driver.used(0) {
            return used;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn auto_and_io_uring_engines_serve_what_a_plain_one_does() {
    for engine in [EngineKind::Plain, EngineKind::IoUring, EngineKind::Auto] {
        let image = image();
        let config = BlockConfig::new(image.path()).engine(engine);
        let mut driver = MockDriver::ready(Block::new(config).unwrap());
        let sent = driver.send(0, &[Readable(&header(OUT, 9)), Readable(&[5; 1024]), Writable(1)]);
        assert_eq!(wait_used(&mut driver).len, 1);
        assert_eq!(driver.contents(&sent)[2], [OK]);
        let sent = driver.send(0, &[Readable(&header(IN, 8)), Writable(1024), Writable(1)]);
        assert_eq!(wait_used(&mut driver).len, 1025);
        assert_eq!(driver.contents(&sent)[1], [[8; 512], [5; 512]].concat());
        driver.send(0, &[Readable(&header(FLUSH, 0)), Writable(1)]);
        wait_used(&mut driver);
        assert_eq!(fs::read(image.path()).unwrap()[9 * 512..11 * 512], [5; 1024]);
    }
}

/// Returns whether an engine is a ring: a ring completes nothing before `submit`, plain calls have
/// completed when they return.
fn is_ring(mut engine: Box<dyn Engine>) -> bool {
    engine.start(1, Op::Sync);
    engine.finished().is_none()
}

#[test]
fn engine_is_a_ring_where_one_is_asked_for() {
    let image = image();
    let engine = |kind| Block::new(BlockConfig::new(image.path()).engine(kind)).unwrap().engine;
    assert!(!is_ring(engine(EngineKind::Plain)));
    assert!(is_ring(engine(EngineKind::IoUring)));
    assert!(is_ring(engine(EngineKind::Auto)));
}

/// Runs an ignored test of this file with a failing system call: this program is run again with
/// that one test under strace, which injects the error.
fn where_it_fails(call: &str, test: &str) {
    let run = std::process::Command::new("strace")
        .args(["-f", "-o", "/dev/null", "-e", &format!("inject={call}")])
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact"])
        .arg(format!("virtio::block::tests::engines::{test}"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("1 passed"), "{run:?}");
}

#[test]
fn flush_of_a_disk_is_a_sync_of_its_file() {
    where_it_fails("fdatasync:error=EIO", "disk_of_a_host_that_cannot_sync");
}

#[test]
#[ignore = "run by the test above"]
fn disk_of_a_host_that_cannot_sync() {
    let image = image();
    let disk = BlockConfig::new(image.path()).engine(EngineKind::Plain);
    assert_eq!(flush(&mut MockDriver::ready(Block::new(disk).unwrap())), IOERR);
}

#[test]
fn auto_engine_is_plain_where_the_host_makes_no_ring() {
    where_it_fails("io_uring_setup:error=EPERM", "disk_of_a_host_without_rings");
}

#[test]
#[ignore = "run by the test above"]
fn disk_of_a_host_without_rings() {
    let image = image();
    let open = |kind| Block::new(BlockConfig::new(image.path()).engine(kind));
    let refused = open(EngineKind::IoUring).err().unwrap();
    assert!(matches!(refused, BlockError::Open { source: OpenError::IoUring { .. }, .. }));
    let mut driver = MockDriver::ready(open(EngineKind::Auto).unwrap());
    assert_eq!(read(&mut driver, 8, 512), (OK, vec![8; 512]));
}

#[test]
fn ring_refuses_a_token_that_is_out_already() {
    let image = image();
    let ended = event();
    let file = File::options().read(true).write(true).open(image.path()).unwrap();
    let mut ring = Uring::new(&FileDisk::unlocked(file), &ended).unwrap();
    ring.start(1, Op::Sync);
    ring.start(1, Op::Sync);
    let refused = ring.finished().unwrap();
    assert_eq!(refused.result.unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    ring.wait().unwrap();
    assert!(ring.finished().unwrap().result.is_ok());
    assert!(ring.finished().is_none());
}

#[test]
fn ring_dropped_with_operations_out_waits_for_them() {
    let image = large_image();
    let ended = event();
    let file = File::options().read(true).write(true).open(image.path()).unwrap();
    for _ in 0..50 {
        let mut ring = Uring::new(&FileDisk::unlocked(file.try_clone().unwrap()), &ended).unwrap();
        for token in 0..64 {
            let bounce = super::super::io::Bounce::new(64 << 10, 512);
            let into = Target::Host(bounce);
            ring.start(token, Op::Read { into, offset: u64::from(token % 16) << 16 });
        }
        ring.submit().unwrap();
    }
}

#[test]
fn quiesce_and_reset_wait_for_what_is_out() {
    let image = large_image();
    let config = BlockConfig::new(image.path()).engine(EngineKind::IoUring);
    let mut driver = MockDriver::ready(Block::new(config).unwrap());
    driver.run();
    let mut sent = Vec::new();
    for round in 0..20u8 {
        for chain in 0..50u64 {
            let data = vec![round; 16 << 10];
            let head = header(OUT, chain * 32);
            sent.push(driver.place(0, &[Readable(&head), Readable(&data), Writable(1)]));
            driver.offer(0, sent.last().unwrap().head);
        }
        driver.kick(0);
        driver.devices.run(1);
        if round % 2 == 0 {
            driver.devices.handle().quiesce_all().unwrap();
            assert!(driver.transport.save().is_ok(), "something was still out");
            driver.devices.handle().resume_all().unwrap();
        } else {
            driver.start();
        }
        driver.run();
    }
    driver.start();
    assert!(!driver.needs_reset());
}

/// Returns whether this process has the image open for direct I/O.
fn is_open_direct(image: &NamedTempFile) -> bool {
    let fds = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let ours = fds.filter(|fd| fs::read_link(fd.path()).is_ok_and(|path| path == image.path()));
    ours.into_iter().any(|fd| {
        let info = format!("/proc/self/fdinfo/{}", fd.file_name().display());
        let info = fs::read_to_string(info).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap_or("0");
        i32::from_str_radix(flags.trim(), 8).unwrap() & libc::O_DIRECT != 0
    })
}

#[test]
fn direct_io_takes_buffers_of_any_alignment_and_keeps_to_its_unit() {
    for engine in [EngineKind::Plain, EngineKind::IoUring] {
        let image = large_image();
        let config = BlockConfig::new(image.path()).direct(true).engine(engine);
        let block = match Block::new(config) {
            Ok(block) => block,
            Err(error) => panic!("{error:?}"),
        };
        assert!(is_open_direct(&image));
        let unit = block.facts.block_size;
        let mut driver = MockDriver::ready(block);
        assert_eq!(driver.read(mmio::offset::CONFIG + 20), unit);
        // The mock places buffers at multiples of 16, which is never aligned for direct I/O.
        let data: Vec<u8> = (0..300 << 10).map(|byte| (byte / 1000) as u8).collect();
        let data = &data[..data.len() / unit as usize * unit as usize];
        driver.allocate(48);
        driver.send(0, &[Readable(&header(OUT, 64)), Readable(data), Writable(1)]);
        assert_eq!(wait_used(&mut driver).len, 1);
        let len = data.len() as u32;
        let sent = driver.send(0, &[Readable(&header(IN, 64)), Writable(len), Writable(1)]);
        assert_eq!(wait_used(&mut driver).len, len + 1);
        assert!(driver.contents(&sent)[1] == data);
        assert!(fs::read(image.path()).unwrap()[64 * 512..][..data.len()] == *data);
        if unit > 512 {
            let sent = driver.send(0, &[Readable(&header(IN, 1)), Writable(512), Writable(1)]);
            wait_used(&mut driver);
            assert_eq!(driver.contents(&sent)[2], [IOERR]);
        }
    }
}

#[test]
fn limited_disk_serves_its_rate_and_everything_in_the_end() {
    let image = image();
    let bucket = BucketConfig { size: 5, one_time_burst: 0, refill_time_ms: 50 };
    let limits = RateLimiterConfig { bytes: None, ops: Some(bucket) };
    let config = BlockConfig::new(image.path()).limits(limits);
    let mut driver = MockDriver::ready(Block::new(config).unwrap());
    driver.run();
    let start = Instant::now();
    for sector in 0..20 {
        driver.send(0, &[Readable(&header(IN, sector)), Writable(512), Writable(1)]);
    }
    driver.run();
    assert_eq!(driver.used_index(0), 5);
    // A snapshot while requests wait for the limiter has nothing in flight.
    driver.devices.handle().quiesce_all().unwrap();
    assert_eq!(driver.transport.save().unwrap().queues[0].next_avail, 5);
    driver.devices.handle().resume_all().unwrap();
    for _ in 0..20 {
        assert_eq!(wait_used(&mut driver).len, 513);
    }
    assert!(start.elapsed() >= Duration::from_millis(145), "{:?}", start.elapsed());
}

#[test]
fn limited_disk_moves_its_bytes_in_time_after_its_burst() {
    let image = image();
    let bucket = BucketConfig { size: 1024, one_time_burst: 512, refill_time_ms: 200 };
    let limits = RateLimiterConfig { bytes: Some(bucket), ops: None };
    let config = BlockConfig::new(image.path()).limits(limits);
    let mut driver = MockDriver::ready(Block::new(config).unwrap());
    let start = Instant::now();
    for sector in 0..6 {
        driver.send(0, &[Readable(&header(IN, sector)), Writable(512), Writable(1)]);
    }
    driver.run();
    // One by the burst and two by the bucket; the other three need one and a half refills.
    assert_eq!(driver.used_index(0), 3);
    for _ in 0..6 {
        assert_eq!(wait_used(&mut driver).len, 513);
    }
    assert!(start.elapsed() >= Duration::from_millis(295), "{:?}", start.elapsed());
}

#[test]
fn request_larger_than_the_byte_limit_is_served() {
    let image = large_image();
    let bucket = BucketConfig { size: 4096, one_time_burst: 0, refill_time_ms: 1 };
    let limits = RateLimiterConfig { bytes: Some(bucket), ops: None };
    let config = BlockConfig::new(image.path()).limits(limits);
    let mut driver = MockDriver::ready(Block::new(config).unwrap());
    for _ in 0..3 {
        driver.send(0, &[Readable(&header(IN, 0)), Writable(256 << 10), Writable(1)]);
        assert_eq!(wait_used(&mut driver).len, (256 << 10) + 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Any requests, valid and invalid: both engines return equal results and leave the disk as the
    /// model expects.
    #[test]
    fn engines_and_a_model_agree_on_any_requests(
        requests in prop::collection::vec((0..6usize, 0..70u64, 0..6u32, any::<u8>(), 0..3u32), 1..40),
    ) {
        let (plain, ring) = (image(), image());
        let mut model: Vec<u8> = fs::read(plain.path()).unwrap();
        let mut drivers = [MockDriver::ready(disk(&plain)), MockDriver::ready(uring(&ring))];
        for (kind, sector, count, fill, flags) in requests {
            let len = count as usize * 512;
            let fits = sector + u64::from(count) <= SECTORS;
            let at = sector as usize * 512;
            let mut expected = if fits { OK } else { IOERR };
            let answers = drivers.each_mut().map(|driver| match kind {
                0 => read(driver, sector, len as u32),
                1 => (write(driver, sector, &vec![fill; len]), Vec::new()),
                2 => (clear(driver, DISCARD, &range(sector, count, flags)), Vec::new()),
                3 => (clear(driver, WRITE_ZEROES, &range(sector, count, flags)), Vec::new()),
                4 => (flush(driver), Vec::new()),
                _ => read(driver, sector, len as u32 + 1),
            });
            let most_flags = [2, 2, 0, 1, 2, 2][kind];
            if flags > most_flags {
                expected = UNSUPP;
            }
            match kind {
                1 if fits => model[at..at + len].fill(fill),
                2 | 3 if expected == OK => model[at..at + len].fill(0),
                4 => expected = OK,
                5 => expected = IOERR,
                _ => {}
            }
            prop_assert_eq!(answers[0].0, expected, "{} at {}+{}", kind, sector, count);
            prop_assert_eq!(&answers[0], &answers[1]);
            if kind == 0 && fits {
                prop_assert_eq!(&answers[0].1, &model[at..at + len]);
            }
        }
        drop(drivers);
        prop_assert!(fs::read(plain.path()).unwrap() == model);
        prop_assert!(fs::read(ring.path()).unwrap() == model);
    }
}

/// An engine whose operations complete when a test says so.
#[derive(Clone, Default)]
struct Held(Arc<Mutex<HeldOps>>);

#[derive(Default)]
struct HeldOps {
    waiting: Vec<super::super::io::Finished>,
    ended: Vec<super::super::io::Finished>,
}

impl Held {
    fn driver(&self, image: &NamedTempFile) -> MockDriver {
        let mut block = disk(image);
        block.engine = Box::new(self.clone());
        MockDriver::ready(block)
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap().waiting.len()
    }

    fn end_all(&self) {
        let HeldOps { waiting, ended } = &mut *self.0.lock().unwrap();
        ended.append(waiting);
    }
}

impl Engine for Held {
    fn start(&mut self, token: u16, op: Op) {
        let finished = super::super::io::Finished { token, op, result: Ok(512) };
        self.0.lock().unwrap().waiting.push(finished);
    }
    fn has_room(&self) -> bool {
        self.count() < 4
    }
    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn finished(&mut self) -> Option<super::super::io::Finished> {
        self.0.lock().unwrap().ended.pop()
    }
    fn wait(&mut self) -> io::Result<()> {
        if self.count() == 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.end_all();
        Ok(())
    }
    fn measure(&self) -> io::Result<u64> {
        Ok(SECTORS * 512)
    }
}

#[test]
fn a12_head_offered_again_while_the_host_works_on_it_asks_for_reset() {
    let (image, held) = (image(), Held::default());
    let mut driver = held.driver(&image);
    driver.run();
    let sent = driver.send(0, &[Readable(&header(IN, 0)), Writable(512), Writable(1)]);
    driver.run();
    assert_eq!((held.count(), driver.used_index(0)), (1, 0));
    driver.offer(0, sent.head);
    driver.kick(0);
    driver.run();
    assert!(driver.needs_reset());
    // Requests that complete now have no driver.
    held.end_all();
    driver.kick(0);
    driver.run();
    assert_eq!((driver.used_index(0), driver.contents(&sent)[2][0]), (0, 0));
    driver.start();
    driver.send(0, &[Readable(&header(IN, 0)), Writable(512), Writable(1)]);
    driver.run();
    held.end_all();
    driver.kick(0);
    driver.run();
    assert_eq!(driver.used(0).unwrap().len, 513);
}

#[test]
fn a18_reset_while_the_host_works_waits_for_it_and_tells_nobody() {
    let (image, held) = (image(), Held::default());
    let mut driver = held.driver(&image);
    let sent = driver.send(0, &[Readable(&header(IN, 0)), Writable(512), Writable(1)]);
    driver.run();
    assert_eq!(held.count(), 1);
    driver.reset();
    assert_eq!(held.count(), 0, "an operation outlived the reset");
    driver.run();
    assert_eq!((driver.used_index(0), driver.contents(&sent)[2][0]), (0, 0));
}

#[test]
fn full_engine_leaves_requests_in_the_ring_until_there_is_room() {
    let (image, held) = (image(), Held::default());
    let mut driver = held.driver(&image);
    driver.run();
    for sector in 0..10 {
        driver.send(0, &[Readable(&header(IN, sector)), Writable(512), Writable(1)]);
    }
    driver.run();
    assert_eq!(held.count(), 4);
    driver.devices.handle().quiesce_all().unwrap();
    // While quiesced nothing is in flight, and requests that were not begun are still in the ring.
    let saved = driver.transport.save().unwrap();
    assert_eq!((driver.used_index(0), saved.queues[0].next_avail), (4, 4));
    driver.devices.handle().resume_all().unwrap();
    for served in [8, 10] {
        driver.run();
        held.end_all();
        driver.kick(0);
        driver.run();
        assert_eq!(driver.used_index(0), served);
    }
}

#[test]
fn image_that_looks_like_another_format_is_bytes_like_any_other() {
    let image = image();
    // The header of a QCOW2 image, followed by the name of a host file.
    let mut forged = b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\0\x68\0\0\0\x0b".to_vec();
    forged.resize(0x68, 0);
    forged.extend(b"/etc/passwd");
    forged.resize(512, 0);
    image.as_file().set_len(512 * SECTORS).unwrap();
    fs::write(image.path(), &forged).unwrap();
    image.as_file().set_len(512 * SECTORS).unwrap();
    let mut driver = MockDriver::ready(disk(&image));
    assert_eq!(driver.read(mmio::offset::CONFIG), SECTORS as u32);
    assert_eq!(read(&mut driver, 0, 512), (OK, forged));
    assert_eq!(read(&mut driver, 1, 512), (OK, vec![0; 512]));
}
