//! A mock driver: a guest without a machine, for tests and fuzz targets.
//!
//! It accesses a device only as a guest can, through registers and rings in guest memory, and runs
//! the device loop inline, so that a test decides when the device runs.
#![allow(clippy::unwrap_used, reason = "a mock that cannot do its part should end its test")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use vm_memory::{Bytes, GuestAddress};

use super::device_loop::{Command, DeviceLoop, Reply};
use super::mmio::{KickShortcut, RestoreError, TransportStateV1, offset, status};
use super::thread::DeviceCalls;
use super::{DeviceError, DeviceHandle, MmioTransport, VirtioDevice};
use crate::GuestMemory;
use crate::bus::BusDevice;
use crate::lines::{self, testing::Raised};

/// The start of guest memory; the first page is left out so that a null address is never valid.
pub const MEMORY_START: u64 = 0x1000;
/// The end of the first region, where a hole begins.
pub const HOLE_START: u64 = 0x20_0000;
/// The start of the second region.
pub const HOLE_END: u64 = 0x40_0000;
pub const MEMORY_END: u64 = 0x80_0000;

/// Flags of a descriptor.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

const RINGS_START: u64 = 0x1_0000;
const RINGS_SIZE: u64 = 0x1_0000;
const DESC: u64 = 0;
const AVAIL: u64 = 0x4000;
const USED: u64 = 0x8000;

/// Creates guest memory of two regions with a hole between them.
pub fn memory() -> GuestMemory {
    let range = |from: u64, to: u64| (GuestAddress(from), (to - from) as usize);
    GuestMemory::from_ranges(&[range(MEMORY_START, HOLE_START), range(HOLE_END, MEMORY_END)])
        .unwrap()
}

/// A device loop that runs on the calling thread.
pub struct InlineLoop(Mutex<DeviceLoop>);

impl InlineLoop {
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(DeviceLoop::new().unwrap())))
    }

    pub fn handle(self: &Arc<Self>) -> DeviceHandle {
        DeviceHandle::new(self.clone())
    }

    /// Waits for events as the device thread would, and serves them.
    pub fn wait(&self, timeout_ms: i32) {
        self.0.lock().unwrap().poll(timeout_ms).unwrap();
    }

    /// Serves events until none is ready, or for `rounds` rounds. Returns how many rounds it took.
    pub fn run(&self, rounds: usize) -> usize {
        let mut devices = self.0.lock().unwrap();
        (0..rounds).take_while(|_| devices.poll(0).unwrap() > 0).count()
    }
}

impl DeviceCalls for InlineLoop {
    fn call(&self, command: Command) -> Result<Reply, DeviceError> {
        self.0.lock().unwrap().handle(command)
    }
}

/// One buffer that the driver offers.
#[derive(Clone, Copy, Debug)]
pub enum Buffer<'a> {
    /// The device reads these bytes.
    Readable(&'a [u8]),
    /// The device may write this many bytes.
    Writable(u32),
}

/// A chain that was offered: its head, and the address and length of each buffer.
#[derive(Clone, Debug)]
pub struct Offered {
    pub head: u16,
    pub buffers: Vec<(GuestAddress, u32)>,
}

/// An entry of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub head: u32,
    pub len: u32,
}

#[derive(Clone, Copy, Default)]
struct Ring {
    size: u16,
    next_descriptor: u16,
    avail: u16,
    used: u16,
}

/// A driver with its transport, memory and device loop.
pub struct MockDriver {
    pub transport: Arc<MmioTransport>,
    raised: Raised,
    pub memory: GuestMemory,
    pub devices: Arc<InlineLoop>,
    rings: Vec<Ring>,
    next_buffer: u64,
}

impl MockDriver {
    /// Creates a driver that has not accessed the device yet.
    pub fn new(device: impl VirtioDevice + 'static) -> Self {
        Self::in_memory(device, memory(), &InlineLoop::new())
    }

    /// Creates a driver that shares memory and loop with others.
    pub fn in_memory(
        device: impl VirtioDevice + 'static,
        memory: GuestMemory,
        devices: &Arc<InlineLoop>,
    ) -> Self {
        Self::made_of(device, memory, devices, Box::new(()))
    }

    /// Creates a driver whose kicks may get a shortcut.
    pub fn with_shortcut(
        device: impl VirtioDevice + 'static,
        shortcut: Box<dyn KickShortcut>,
    ) -> Self {
        Self::made_of(device, memory(), &InlineLoop::new(), shortcut)
    }

    fn made_of(
        device: impl VirtioDevice + 'static,
        memory: GuestMemory,
        devices: &Arc<InlineLoop>,
        shortcut: Box<dyn KickShortcut>,
    ) -> Self {
        let (sizes, device) = (device.queue_sizes(), Box::new(device));
        let (line, raised) = lines::testing::line();
        let handle = devices.handle();
        let transport = MmioTransport::new(device, memory.clone(), handle, shortcut, line);
        let rings = sizes.iter().map(|_| Ring::default()).collect();
        let (transport, devices) = (Arc::new(transport.unwrap()), devices.clone());
        // Above every ring; buffers are below the hole.
        let next_buffer = RINGS_START + RINGS_SIZE * sizes.len() as u64;
        Self { transport, raised, memory, devices, rings, next_buffer }
    }

    /// Creates a driver that has started its device with all offered features.
    pub fn ready(device: impl VirtioDevice + 'static) -> Self {
        let mut driver = Self::new(device);
        driver.start();
        driver
    }

    pub fn read(&self, register: u64) -> u32 {
        let mut data = [0; 4];
        BusDevice::read(&*self.transport, register, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn write(&self, register: u64, value: u32) {
        BusDevice::write(&*self.transport, register, &value.to_le_bytes());
    }

    pub fn status(&self) -> u32 {
        self.read(offset::STATUS)
    }

    pub fn needs_reset(&self) -> bool {
        self.status() & status::NEEDS_RESET != 0
    }

    /// Returns the offered features.
    pub fn offered(&self) -> u64 {
        let page = |select| {
            self.write(offset::DEVICE_FEATURES_SELECT, select);
            u64::from(self.read(offset::DEVICE_FEATURES))
        };
        page(0) | page(1) << 32
    }

    /// Starts the device, from reset to DRIVER_OK, in the order of virtio 1.2 section 3.1.
    pub fn start(&mut self) {
        self.start_with(self.offered());
    }

    pub fn start_with(&mut self, features: u64) {
        self.negotiate(features);
        self.set_up_queues();
        self.write(offset::STATUS, self.status() | status::DRIVER_OK);
    }

    /// Starts the device up to and including FEATURES_OK.
    pub fn negotiate(&self, features: u64) {
        self.write(offset::STATUS, 0);
        self.write(offset::STATUS, status::ACKNOWLEDGE);
        self.write(offset::STATUS, self.status() | status::DRIVER);
        for page in [0, 1] {
            self.write(offset::DRIVER_FEATURES_SELECT, page);
            self.write(offset::DRIVER_FEATURES, (features >> (32 * page)) as u32);
        }
        self.write(offset::STATUS, self.status() | status::FEATURES_OK);
    }

    /// Sets up a new ring of the maximum size for every queue.
    pub fn set_up_queues(&mut self) {
        for index in 0..self.rings.len() {
            self.set_up_queue(index, u16::MAX);
        }
    }

    /// Sets up a new ring of at most `size` entries.
    pub fn set_up_queue(&mut self, queue: usize, size: u16) {
        self.write(offset::QUEUE_SELECT, queue as u32);
        let size = size.min(self.read(offset::QUEUE_SIZE_MAX) as u16);
        self.write(offset::QUEUE_SIZE, size.into());
        let ring_parts = [
            (offset::QUEUE_DESC_LOW, DESC),
            (offset::QUEUE_DRIVER_LOW, AVAIL),
            (offset::QUEUE_DEVICE_LOW, USED),
        ];
        for (register, part) in ring_parts {
            self.write(register, self.address(queue, part).0 as u32);
            self.write(register + 4, 0);
        }
        self.memory.write_slice(&vec![0; RINGS_SIZE as usize], self.address(queue, 0)).unwrap();
        self.write(offset::QUEUE_READY, 1);
        self.rings[queue] = Ring { size, ..Ring::default() };
    }

    pub fn reset(&self) {
        self.write(offset::STATUS, 0);
    }

    /// Offers a chain of these buffers and kicks.
    pub fn send(&mut self, queue: usize, buffers: &[Buffer]) -> Offered {
        let offered = self.place(queue, buffers);
        self.offer(queue, offered.head);
        self.kick(queue);
        offered
    }

    /// Offers a chain, lets the device serve it, and returns its used entry and the bytes of each
    /// buffer.
    pub fn request(&mut self, queue: usize, buffers: &[Buffer]) -> (Option<Used>, Vec<Vec<u8>>) {
        let offered = self.send(queue, buffers);
        self.run();
        (self.used(queue), self.contents(&offered))
    }

    /// Writes buffers and their descriptors, without offering them.
    pub fn place(&mut self, queue: usize, buffers: &[Buffer]) -> Offered {
        let ring = self.rings[queue];
        let head = ring.next_descriptor;
        let mut offered = Offered { head, buffers: Vec::new() };
        for (step, buffer) in buffers.iter().enumerate() {
            let (len, write) = match buffer {
                Buffer::Readable(bytes) => (bytes.len() as u32, 0),
                Buffer::Writable(len) => (*len, WRITE),
            };
            let address = self.allocate(len);
            if let Buffer::Readable(bytes) = buffer {
                self.memory.write_slice(bytes, address).unwrap();
            }
            let index = head.wrapping_add(step as u16) % ring.size;
            let next = if step + 1 < buffers.len() { NEXT } else { 0 };
            self.descriptor(queue, index, address.0, len, write | next, (index + 1) % ring.size);
            offered.buffers.push((address, len));
        }
        self.rings[queue].next_descriptor = head.wrapping_add(buffers.len() as u16) % ring.size;
        offered
    }

    /// Writes one raw descriptor.
    pub fn descriptor(
        &self,
        queue: usize,
        index: u16,
        address: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let at = self.address(queue, DESC + 16 * u64::from(index));
        self.memory.write_slice(&raw_descriptor(address, len, flags, next), at).unwrap();
    }

    /// Puts a head into the avail ring and advances its index.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let ring = &mut self.rings[queue];
        let slot = 4 + 2 * u64::from(ring.avail % ring.size);
        ring.avail = ring.avail.wrapping_add(1);
        let index = ring.avail;
        self.memory.write_obj(head.to_le(), self.address(queue, AVAIL + slot)).unwrap();
        self.set_avail_index(queue, index);
    }

    /// Sets the avail index to any value.
    pub fn set_avail_index(&self, queue: usize, index: u16) {
        let at = self.address(queue, AVAIL + 2);
        self.memory.store(index.to_le(), at, Ordering::Release).unwrap();
    }

    /// Sets after which used entry the driver wants an interrupt, if event indices were negotiated.
    pub fn set_used_event(&self, queue: usize, index: u16) {
        let at = AVAIL + 4 + 2 * u64::from(self.rings[queue].size);
        self.memory.write_obj(index.to_le(), self.address(queue, at)).unwrap();
    }

    /// Returns whether a driver with event indices would kick for the next chain.
    pub fn is_kick_wanted(&self, queue: usize) -> bool {
        let ring = self.rings[queue];
        let at = self.address(queue, USED + 4 + 8 * u64::from(ring.size));
        u16::from_le(self.memory.read_obj(at).unwrap()) == ring.avail
    }

    pub fn kick(&self, queue: usize) {
        self.write(offset::QUEUE_NOTIFY, queue as u32);
    }

    /// Lets the devices serve all events. Fails the test if they never become idle.
    pub fn run(&self) {
        assert!(self.devices.run(10_000) < 10_000, "the device never comes to rest");
    }

    /// Returns the next used entry that this driver has not seen.
    pub fn used(&mut self, queue: usize) -> Option<Used> {
        let ring = self.rings[queue];
        if self.used_index(queue) == ring.used {
            return None;
        }
        let entry = self.address(queue, USED + 4 + 8 * u64::from(ring.used % ring.size));
        let [head, len]: [u32; 2] = self.memory.read_obj(entry).unwrap();
        self.rings[queue].used = ring.used.wrapping_add(1);
        Some(Used { head: u32::from_le(head), len: u32::from_le(len) })
    }

    /// Returns the index of the used ring.
    pub fn used_index(&self, queue: usize) -> u16 {
        let at = self.address(queue, USED + 2);
        u16::from_le(self.memory.load(at, Ordering::Acquire).unwrap())
    }

    /// Returns the current bytes of a chain's buffers.
    pub fn contents(&self, offered: &Offered) -> Vec<Vec<u8>> {
        let read = |(address, len): &(GuestAddress, u32)| {
            let mut bytes = vec![0; *len as usize];
            self.memory.read_slice(&mut bytes, *address).unwrap();
            bytes
        };
        offered.buffers.iter().map(read).collect()
    }

    /// Acknowledges a pending interrupt. Returns true if there was one.
    pub fn take_interrupt(&self) -> bool {
        let pending = self.raised.take() > 0;
        self.write(offset::INTERRUPT_ACK, self.read(offset::INTERRUPT_STATUS));
        pending
    }

    /// Quiesces the devices, saves this one and drops it; guest memory stays.
    pub fn suspend(self) -> Suspended {
        self.devices.handle().quiesce_all().unwrap();
        let state = self.transport.save().unwrap();
        let Self { memory, rings, next_buffer, .. } = self;
        Suspended { state, memory, rings, next_buffer }
    }

    /// Allocates guest memory for a buffer of `len` bytes. It wraps around before the hole.
    pub fn allocate(&mut self, len: u32) -> GuestAddress {
        let first = RINGS_START + RINGS_SIZE * self.rings.len() as u64;
        if self.next_buffer + u64::from(len) > HOLE_START {
            self.next_buffer = first;
        }
        let address = GuestAddress(self.next_buffer);
        self.next_buffer = (self.next_buffer + u64::from(len)).next_multiple_of(16);
        address
    }

    /// Returns the address of a queue's descriptor table.
    pub fn descriptor_table(&self, queue: usize) -> GuestAddress {
        self.address(queue, DESC)
    }

    pub fn available_ring(&self, queue: usize) -> GuestAddress {
        self.address(queue, AVAIL)
    }

    pub fn used_ring(&self, queue: usize) -> GuestAddress {
        self.address(queue, USED)
    }

    fn address(&self, queue: usize, offset: u64) -> GuestAddress {
        GuestAddress(RINGS_START + RINGS_SIZE * queue as u64 + offset)
    }
}

/// A driver without a device, to be restored.
pub struct Suspended {
    pub state: TransportStateV1,
    pub memory: GuestMemory,
    rings: Vec<Ring>,
    next_buffer: u64,
}

impl Suspended {
    /// Restores the driver on a device that was created from the saved state.
    pub fn resume(self, device: impl VirtioDevice + 'static) -> Result<MockDriver, RestoreError> {
        let Self { state, memory, rings, next_buffer } = self;
        let driver = MockDriver::in_memory(device, memory, &InlineLoop::new());
        driver.devices.handle().quiesce_all().unwrap();
        driver.transport.restore(&state)?;
        driver.devices.handle().resume_all().unwrap();
        Ok(MockDriver { rings, next_buffer, ..driver })
    }
}

/// Repeats an action on another thread until it is dropped: a second vCPU that interferes.
pub struct Racer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Racer {
    pub fn spawn(mut act: impl FnMut() + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                act();
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Racer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let raced = self.thread.take().map(JoinHandle::join);
        // A second panic would hide the first.
        assert!(std::thread::panicking() || matches!(raced, Some(Ok(()))), "the racer panicked");
    }
}

/// Returns a descriptor as it is in guest memory.
pub fn raw_descriptor(address: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let high = u128::from(len) | u128::from(flags) << 32 | u128::from(next) << 48;
    (u128::from(address) | high << 64).to_le_bytes()
}
