//! Sequences of everything that a guest can do to a virtio device from outside its requests.
//!
//! Single requests are not enough: the worst published bugs of this kind were in the order of
//! things, such as registers written after the device was started. After each sequence the device
//! must come to rest, hold no chain that it was not asked to fail over, be saved and restored, and
//! work after a reset.

use std::cell::RefCell;
use std::io::Write;

use pvmm_devices::bus::BusDevice;
use pvmm_devices::virtio::VirtioDevice;
use pvmm_devices::virtio::block::{Block, BlockConfig};
use pvmm_devices::virtio::mmio::offset;
use pvmm_devices::virtio::net::testing::{MAC, NO_HEADER, RX, TX, wired};
use pvmm_devices::virtio::net::wire::HEADER_LEN;
use pvmm_devices::virtio::rng::Rng;
use pvmm_devices::virtio::testing::Buffer::{Readable, Writable};
use pvmm_devices::virtio::testing::{HOLE_START, MEMORY_START, MockDriver};

use crate::input::Input;

/// On the simplest device there is.
pub fn rng(bytes: &[u8]) {
    sequence(bytes, 0, &|| Rng::default(), &|driver| {
        assert_eq!(driver.request(0, &[Writable(8)]).0.unwrap().len, 8);
    });
}

/// On a network card, whose receive queue is served by the host's frames and not by kicks alone.
pub fn net(bytes: &[u8]) {
    let peer = RefCell::new(None);
    let card = || {
        let (net, other_end) = wired();
        other_end.offer(&[5; 3000]);
        other_end.offer(&[6; 60]);
        peer.replace(Some(other_end));
        net
    };
    let queue = usize::from(bytes.first().is_some_and(|byte| byte & 1 == 1));
    sequence(bytes, queue, &card, &|driver| {
        let peer = peer.borrow();
        let peer = peer.as_ref().unwrap();
        while peer.receive().is_some() {}
        let frame = [&[0xff; 6][..], &MAC.0, &[8; 50]].concat();
        assert!(driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame)]).0.is_some());
        assert_eq!(peer.receive().unwrap()[HEADER_LEN..], frame);
        assert!(peer.offer(&frame));
        // The two that the wire began with may still be there.
        (0..3).for_each(|_| drop(driver.send(RX, &[Writable(4096)])));
        driver.run();
        let last = std::iter::from_fn(|| driver.used(RX)).last();
        assert_eq!(last.unwrap().len as usize, HEADER_LEN + frame.len());
    });
}

/// On a disk, whose requests have a shape.
pub fn block(bytes: &[u8]) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 16 * 512]).unwrap();
    let disk = || {
        let file = file.try_clone().unwrap();
        Block::new(BlockConfig::from_file(file)).unwrap()
    };
    sequence(bytes, 0, &disk, &|driver| {
        let buffers = [Readable(&[0; 16]), Writable(512), Writable(1)];
        assert_eq!(driver.request(0, &buffers).0.unwrap().len, 513);
    });
    assert_eq!(file.metadata().unwrap().len(), 16 * 512, "the guest changed the image's size");
}

fn sequence<D: VirtioDevice + 'static>(
    bytes: &[u8],
    queue: usize,
    device: &dyn Fn() -> D,
    exercise: &dyn Fn(&mut MockDriver),
) {
    let mut input = Input::new(bytes);
    let mut driver = MockDriver::ready(device());
    let mut steps = 0;
    while !input.is_empty() && steps < 200 {
        steps += 1;
        match input.below(12) {
            0 => {
                // Any register, in any width.
                let register = if input.u8() & 1 == 0 {
                    4 * u64::from(input.below(64))
                } else {
                    input.number()
                };
                let data = input.number().to_le_bytes();
                let width = input.below(9).into();
                driver.transport.write(register % 0x1000, &data[..width]);
            }
            1 => {
                let mut data = [0xaa; 8];
                let width = input.below(9).into();
                driver.transport.read(input.number() % 0x1000, &mut data[..width]);
            }
            2 => driver.write(offset::STATUS, input.u8().into()),
            3 => {
                driver.write(offset::QUEUE_SELECT, input.below(3).into());
                let registers = [0x038, 0x044, 0x080, 0x084, 0x090, 0x094, 0x0a0, 0x0a4];
                let register = registers[usize::from(input.below(8))];
                driver.write(register, input.number() as u32);
            }
            4 | 5 => {
                let (at, address) = (u16::from(input.below(8)), address(&mut input));
                let len =
                    if input.u8() & 1 == 0 { input.u8().into() } else { input.number() as u32 };
                driver.descriptor(
                    queue,
                    at,
                    address,
                    len,
                    input.below(8).into(),
                    input.below(10).into(),
                );
            }
            6 => {
                let head = if input.u8() < 200 { input.below(8).into() } else { input.u16() };
                driver.offer(queue, head);
            }
            7 => driver.set_avail_index(queue, input.u16()),
            8 => driver.set_used_event(queue, input.u16()),
            9 => driver.start(),
            10 => driver.reset(),
            _ => {
                driver.run();
                let suspended = driver.suspend();
                let restored = device();
                // A state that was saved can always be restored.
                driver = suspended.resume(restored).unwrap();
            }
        }
        driver.kick(input.below(2).into());
        if input.u8() & 1 == 0 {
            driver.run();
        }
    }
    driver.run();
    // Whatever came before, a driver that starts over gets a device that works.
    driver.start();
    driver.run();
    exercise(&mut driver);
}

fn address(input: &mut Input) -> u64 {
    match input.below(4) {
        0 => MEMORY_START + u64::from(input.u16()),
        1 => HOLE_START - 64 + u64::from(input.u8()),
        // Where the rings are.
        2 => 0x1_0000 + u64::from(input.u16()),
        _ => input.number(),
    }
}
