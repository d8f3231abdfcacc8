//! Host ports that are forwarded into a guest without a network: `run -p`, `port`, and the library.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use pvmm_tests::cli::User;

/// A server that reads from each client until the end of its data, and answers with the length.
const SERVER: &str = "import socketserver\n\
    class Count(socketserver.BaseRequestHandler):\n\
    \x20 def handle(self):\n\
    \x20   total = 0\n\
    \x20   while part := self.request.recv(65536): total += len(part)\n\
    \x20   self.request.sendall(b'%d' % total)\n\
    socketserver.ThreadingTCPServer.request_queue_size = 512\n\
    socketserver.ThreadingTCPServer(('127.0.0.1', 80), Count).serve_forever()";

fn connect(address: &str) -> TcpStream {
    let client = TcpStream::connect(address.parse::<SocketAddr>().unwrap()).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client
}

fn answer(mut client: TcpStream) -> std::io::Result<String> {
    client.shutdown(Shutdown::Write)?;
    let mut text = String::new();
    client.read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn ports_of_a_guest_without_network_serve_hundreds_and_end_with_ctrl_c() {
    let user = User::new();
    let id = user.detached(&["-p", "0:80", "--", "python3", "-c", SERVER]);
    let listed = user.pvmm(["ps", "--json"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let published = listed[0]["ports"][0].as_str().unwrap().strip_suffix("->80").unwrap();
    // Until the server listens, clients are reset.
    let first = (0..600).find_map(|_| {
        std::thread::sleep(Duration::from_millis(100));
        answer(connect(published)).ok()
    });
    assert_eq!(first.as_deref(), Some("0"));

    let mut port = user.spawn(["port", &id, "0:80", "0:81"]);
    let mut lines = BufReader::new(port.stdout.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    let here = line.strip_suffix("->80").unwrap();
    let other = lines.next().unwrap().unwrap();
    let mut clients: Vec<TcpStream> = (0..200).map(|_| connect(here)).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.write_all(&vec![7; number * 100]).unwrap();
    }
    for (number, client) in clients.into_iter().enumerate() {
        assert_eq!(answer(client).unwrap(), (number * 100).to_string());
    }
    let mut big = connect(here);
    big.write_all(&vec![7; 8 << 20]).unwrap();
    assert_eq!(answer(big).unwrap(), (8 << 20).to_string());
    // In the guest, nothing listens on port 81.
    let refused = connect(other.strip_suffix("->81").unwrap()).read(&mut [0; 1]);
    assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);

    let pid = port.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let ended = port.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    assert!(String::from_utf8_lossy(&ended.stderr).contains("port 81"), "{ended:?}");
    assert!(TcpStream::connect(here).is_err());
    assert_eq!(user.pvmm(["kill", &id]).code, Some(0));
    assert!(TcpStream::connect(published).is_err());
}
