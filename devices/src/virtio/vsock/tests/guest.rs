//! A guest with a vsock driver, reduced to what tests need: packets out, packets in, and Unix
//! sockets on the host.
//!
//! Receive buffers have fixed addresses in the second region of memory, so that they outlive any
//! number of transmitted packets.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use crate::virtio::registry::DeviceState;
use crate::virtio::testing::{Buffer, HOLE_END, MockDriver, WRITE};
use crate::virtio::vsock::mux::Limits;
use crate::virtio::vsock::wire::{HEADER_LEN, HOST_CID, Header, Op, TYPE_STREAM};
use crate::virtio::vsock::{Vsock, VsockConfig};

pub const CID: u64 = 3;
pub const RX: usize = 0;
pub const TX: usize = 1;
pub const EVENT: usize = 2;
/// The receive window of the mock guest.
pub const GUEST_WINDOW: u32 = 64 << 10;
/// The size of the receive buffers of stock drivers.
pub const RX_LEN: u32 = 4096 + HEADER_LEN as u32;
const RX_STRIDE: u64 = 0x4000;
const PATIENCE: Duration = Duration::from_secs(5);

/// The guest, its device and the directory of its sockets.
pub struct Guest {
    pub driver: MockDriver,
    pub dir: TempDir,
    free_rx: VecDeque<u16>,
}

/// The ports of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    pub host: u32,
    pub guest: u32,
}

impl Guest {
    /// Creates a guest with plenty of receive buffers.
    pub fn new() -> Self {
        let mut guest = Self::without_buffers(Limits::default());
        guest.post_all();
        guest
    }

    /// Creates a guest with plenty of receive buffers and a device with other limits.
    pub fn with_limits(limits: Limits) -> Self {
        let mut guest = Self::without_buffers(limits);
        guest.post_all();
        guest
    }

    /// Creates a guest without receive buffers.
    pub fn without_buffers(limits: Limits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let driver = MockDriver::ready(open(&dir, limits));
        Self { driver, dir, free_rx: (0..256).collect() }
    }

    pub fn uds(&self) -> PathBuf {
        self.dir.path().join("vsock")
    }

    pub fn run(&self) {
        self.driver.run();
    }

    /// Runs the device until `done`, waiting for host sockets and timers in between.
    pub fn run_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        loop {
            self.run();
            if done(self) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "it never happens");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Offers one receive buffer.
    pub fn post(&mut self) {
        let slot = self.free_rx.pop_front().expect("all receive buffers are offered");
        let address = HOLE_END + RX_STRIDE * u64::from(slot);
        self.driver.descriptor(RX, slot, address, RX_LEN, WRITE, 0);
        self.driver.offer(RX, slot);
        self.driver.kick(RX);
    }

    pub fn post_all(&mut self) {
        while !self.free_rx.is_empty() {
            self.post();
        }
    }

    /// Returns the next packet from the device; its buffer is not offered again.
    pub fn receive_once(&mut self) -> Option<(Header, Vec<u8>)> {
        let used = self.driver.used(RX)?;
        let slot = used.head as u16;
        let mut bytes = vec![0; used.len as usize];
        let address = GuestAddress(HOLE_END + RX_STRIDE * u64::from(slot));
        self.driver.memory.read_slice(&mut bytes, address).unwrap();
        self.free_rx.push_back(slot);
        let payload = bytes.split_off(HEADER_LEN);
        let header = Header::decode(&bytes.try_into().unwrap());
        assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
        assert_eq!(header.len as usize, payload.len());
        Some((header, payload))
    }

    /// Returns the next packet from the device and offers its buffer again.
    pub fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let packet = self.receive_once()?;
        self.post();
        Some(packet)
    }

    /// Runs the device and returns the next packet, which must be an `op`.
    pub fn expect(&mut self, op: Op) -> (Header, Vec<u8>) {
        self.run();
        let packet = self.receive().unwrap_or_else(|| panic!("no packet, expected {op:?}"));
        assert_eq!(Op::from_raw(packet.0.op), Some(op), "{:?}", packet.0);
        packet
    }

    /// Runs the device, which must send nothing.
    pub fn expect_silence(&mut self) {
        self.run();
        assert_eq!(self.receive(), None);
    }

    /// Returns a header from the guest with its full window and nothing read yet.
    pub fn header(&self, ports: Ports, op: Op, len: u32) -> Header {
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: ports.guest,
            dst_port: ports.host,
            len,
            kind: TYPE_STREAM,
            op: op as u16,
            flags: 0,
            buf_alloc: GUEST_WINDOW,
            fwd_cnt: 0,
        }
    }

    pub fn send_raw(&mut self, header: &Header, payload: &[u8]) {
        let header = header.encode();
        let parts = [Buffer::Readable(&header), Buffer::Readable(payload)];
        let parts = if payload.is_empty() { &parts[..1] } else { &parts[..] };
        self.driver.send(TX, parts);
    }

    pub fn send(&mut self, ports: Ports, op: Op) {
        self.send_raw(&self.header(ports, op, 0), &[]);
    }

    pub fn send_data(&mut self, ports: Ports, payload: &[u8]) {
        self.send_raw(&self.header(ports, Op::Data, payload.len() as u32), payload);
    }

    pub fn send_shutdown(&mut self, ports: Ports, flags: u32) {
        let header = Header { flags, ..self.header(ports, Op::Shutdown, 0) };
        self.send_raw(&header, &[]);
    }

    /// Reports to the device how much was read so far.
    pub fn send_credit(&mut self, ports: Ports, fwd_cnt: u32) {
        let header = Header { fwd_cnt, ..self.header(ports, Op::CreditUpdate, 0) };
        self.send_raw(&header, &[]);
    }

    /// Connects a host client that sends `request`.
    pub fn client(&self, request: impl AsRef<[u8]>) -> UnixStream {
        let mut stream = UnixStream::connect(self.uds()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_ref()).unwrap();
        stream
    }

    /// Connects a host client to the guest's port 1024.
    pub fn connected_client(&mut self) -> (UnixStream, Ports) {
        let mut client = self.client("CONNECT 1024\n");
        let (request, _) = self.expect(Op::Request);
        let ports = Ports { host: request.src_port, guest: request.dst_port };
        self.send(ports, Op::Response);
        self.run();
        assert_eq!(read_line(&mut client), format!("OK {}\n", ports.host));
        (client, ports)
    }

    /// Listens for the guest's connections to `port`.
    pub fn listen(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.dir.path().join(format!("vsock_{port}"))).unwrap()
    }

    /// Connects the guest to a listener at `port`.
    pub fn connected_guest(&mut self, listener: &UnixListener, ports: Ports) -> UnixStream {
        self.send(ports, Op::Request);
        self.expect(Op::Response);
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Leaves out a receive buffer whose descriptor was used for something else.
    pub fn skip_slot(&mut self) {
        self.free_rx.pop_front();
    }

    /// Forgets which receive buffers were offered, as a new driver does.
    pub fn reset_buffers(&mut self) {
        self.free_rx = (0..256).collect();
    }

    /// Offers one event buffer.
    pub fn post_event(&mut self) {
        self.driver.send(EVENT, &[Buffer::Writable(4)]);
    }

    /// Restores this guest on a new device, with sockets elsewhere; its old host side is gone.
    pub fn restored(self) -> Self {
        let Self { driver, free_rx, .. } = self;
        let suspended = driver.suspend();
        let DeviceState::Vsock(state) = suspended.state.device.clone() else {
            panic!("not a vsock state")
        };
        let dir = tempfile::tempdir().unwrap();
        let device = open(&dir, Limits::default()).restore(&state).unwrap();
        Self { driver: suspended.resume(device).unwrap(), dir, free_rx }
    }
}

pub fn open(dir: &TempDir, limits: Limits) -> Vsock {
    let config = VsockConfig {
        guest_cid: CID,
        uds_path: dir.path().join("vsock"),
        keep_socket: false,
        dial_path: None,
    };
    let mut device = Vsock::open(&config).unwrap();
    device.limits = limits;
    device
}

pub fn read_line(stream: &mut UnixStream) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// Reads to the end of the stream.
pub fn read_rest(stream: &mut UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    rest
}

/// Returns whether the peer closed the stream without sending anything.
pub fn is_closed(stream: &mut UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let closed = match stream.read(&mut [0]) {
        Ok(0) => true,
        Ok(_) => panic!("it has something to say"),
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    stream.set_nonblocking(false).unwrap();
    closed
}

/// Returns bytes whose position shows in their value.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}
