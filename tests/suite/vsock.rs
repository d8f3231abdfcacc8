//! Streams between a real guest and Unix sockets of the host.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use pvmm::exec::{ExecRequest, ProcessEvent};
use pvmm_tests::guest::Guest;

const PATIENCE: Duration = Duration::from_secs(60);

/// Sets timeouts on a socket, so that a stream that stalls fails the test instead of hanging it.
fn patient(socket: UnixStream) -> UnixStream {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    socket
}

#[test]
fn guest_sends_megabytes_to_a_listener_of_the_host_in_order() {
    let guest = Guest::boot();
    let listener = UnixListener::bind(format!("{}_5000", guest.socket().display())).unwrap();
    let receiver = thread::spawn(move || {
        let mut bytes = Vec::new();
        patient(listener.accept().unwrap().0).read_to_end(&mut bytes).unwrap();
        bytes
    });
    let code = "import socket; s = socket.socket(socket.AF_VSOCK); s.connect((2, 5000)); \
                s.sendall(bytes(range(256)) * (16 << 12))";
    guest.prints(&format!("python3 -c '{code}'"));
    let bytes = receiver.join().unwrap();
    assert_eq!(bytes.len(), 16 << 20);
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == at as u8));
}

#[test]
fn many_host_clients_reach_an_echo_in_the_guest_at_once() {
    let guest = Guest::boot();
    let code = "import socketserver, socket
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        while data := self.connection.recv(65536):
            self.connection.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    address_family = socket.AF_VSOCK
    request_queue_size = 64
    def server_bind(self):
        self.socket.bind(self.server_address)
server = Server((socket.VMADDR_CID_ANY, 7000), Echo)
print('up', flush=True)
server.serve_forever()";
    let server = ExecRequest::argv(["python3", "-c", code]);
    let mut server = guest.agent.start(&server).unwrap();
    let deadline = Some(Instant::now() + PATIENCE);
    assert!(matches!(server.next_event(deadline), Ok(Some(ProcessEvent::Stdout(_)))));
    thread::scope(|scope| {
        for client in 0..16u8 {
            let path = guest.socket();
            scope.spawn(move || {
                let mut socket = patient(UnixStream::connect(path).unwrap());
                socket.write_all(b"CONNECT 7000\n").unwrap();
                let mut line = [0; 1];
                while line[0] != b'\n' {
                    socket.read_exact(&mut line).unwrap();
                }
                let sent = vec![client; 200_000];
                let mut writer = socket.try_clone().unwrap();
                let writing = thread::spawn({
                    let sent = sent.clone();
                    move || writer.write_all(&sent).unwrap()
                });
                let mut received = vec![0; sent.len()];
                socket.read_exact(&mut received).unwrap();
                writing.join().unwrap();
                assert!(received == sent);
            });
        }
    });
}

#[test]
fn e12_port_without_listener_is_refused_both_ways() {
    let guest = Guest::boot();
    let code = "import socket; s = socket.socket(socket.AF_VSOCK); print(s.connect_ex((2, 5999)))";
    assert_ne!(guest.prints(&format!("python3 -c '{code}'")), "0");
    let mut socket = patient(UnixStream::connect(guest.socket()).unwrap());
    socket.write_all(b"CONNECT 5999\n").unwrap();
    assert_eq!(socket.read(&mut [0; 16]).unwrap(), 0);
}
