//! Servers that never serve, end early or end late; one that serves is in the suite, with a guest.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::sync::mpsc;

use pvmm_devices::virtio::thread::DeviceThread;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::memory::{Memory, MemoryImage, Mode, Region};

fn memory() -> Memory {
    let regions =
        vec![Region { address: 0, len: 1 << 20 }, Region { address: 1 << 32, len: 1 << 20 }];
    Memory::map(MemoryImage::empty(regions), Mode::Tracked, None).unwrap()
}

fn listen() -> (tempfile::TempDir, std::path::PathBuf, UnixListener) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages");
    let listener = UnixListener::bind(&path).unwrap();
    (dir, path, listener)
}

#[test]
fn hand_over_is_one_short_json_array_with_one_descriptor() {
    let (memory, (_dir, path, listener)) = (memory(), listen());
    let server = PageServer::connect(&path, &memory.guest, None).unwrap();
    let (socket, _) = listener.accept().unwrap();
    let mut bytes = [0; 1024];
    let (len, file) = socket.recv_with_fd(&mut bytes).unwrap();
    assert!(file.is_some());
    let ranges: serde_json::Value = serde_json::from_slice(&bytes[..len]).unwrap();
    let ranges = ranges.as_array().unwrap();
    assert_eq!(ranges.len(), 2);
    for (range, (offset, address, size)) in ranges.iter().zip(pages::host_regions(&memory.guest)) {
        assert_eq!(range["base_host_virt_addr"], address as u64);
        assert_eq!((&range["size"], &range["offset"]), (&size.into(), &offset.into()));
        assert_eq!((&range["page_size"], &range["page_size_kib"]), (&4096.into(), &4096.into()));
    }
    drop(server);
}

#[test]
fn server_that_is_not_there_is_an_error_that_names_it() {
    let memory = memory();
    let error =
        PageServer::connect(Path::new("/nowhere/pages"), &memory.guest, None).err().unwrap();
    assert!(error.to_string().contains("/nowhere/pages"), "{error}");
}

#[test]
fn owner_that_waits_for_a_page_goes_on_when_the_server_ends_and_is_told() {
    let (memory, (_dir, path, listener)) = (memory(), listen());
    let mut server = PageServer::connect(&path, &memory.guest, None).unwrap();
    let ending = std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        drop(socket);
    });
    // Waits for a page that nobody serves.
    memory.guest.read_obj::<u64>(GuestAddress(0x5000)).unwrap();
    let mut devices = DeviceThread::new().unwrap();
    devices.start().unwrap();
    let started = server.started(devices.handle().clone(), Arc::new(|_| {}));
    assert!(matches!(started, Err(PageServerError::Lost)));
    assert!(server.check().is_err());
    ending.join().unwrap();
}

#[test]
fn end_of_the_server_is_the_end_of_the_machine_and_dropping_wakes_who_waits() {
    let (memory, (_dir, path, listener)) = (memory(), listen());
    let mut server = PageServer::connect(&path, &memory.guest, None).unwrap();
    let (mut socket, _) = listener.accept().unwrap();
    let mut devices = DeviceThread::new().unwrap();
    devices.start().unwrap();
    let (sender, outcomes) = mpsc::channel();
    let report: Report = Arc::new(move |outcome| drop(sender.send(outcome)));
    server.started(devices.handle().clone(), report).unwrap();
    // What the server says is ignored.
    io::Write::write_all(&mut socket, b"hello").unwrap();
    assert!(outcomes.recv_timeout(Duration::from_millis(50)).is_err());
    let guest = memory.guest.clone();
    let waiting = std::thread::spawn(move || guest.read_obj::<u64>(GuestAddress(0x7000)).unwrap());
    socket.set_nonblocking(true).unwrap();
    let _ = socket.read(&mut [0; 2048]);
    drop(socket);
    assert_eq!(outcomes.recv_timeout(Duration::from_secs(10)).unwrap(), Outcome::MemoryLost);
    assert!(server.check().is_err());
    assert!(!waiting.is_finished());
    drop(server);
    waiting.join().unwrap();
}
