//! Metadata: a guest reads it through its network card, which still carries other traffic.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pvmm::{Mac, MmdsConfig, MmdsVersion, Net, TapSource};
use pvmm_tests::child::Child;
use pvmm_tests::firecracker::Firecracker;
use pvmm_tests::guest::Guest;
use pvmm_tests::network;
use serde_json::json;

const TAP: &str = "tap-mmds";
const ADDRESSES: &str = " ip=10.9.0.2::10.9.0.1:255.255.255.0::eth0:off";

/// A program that sends a request as a program in the guest would, and prints the status and the
/// body.
const ASK: &str = r#"
import http.client, sys
method, path, *headers = sys.argv[1:]
c = http.client.HTTPConnection("169.254.169.254", 80, timeout=30)
c.request(method, path, headers=dict(h.split("=", 1) for h in headers))
r = c.getresponse()
sys.stdout.write("%d %s" % (r.status, r.read().decode()))
"#;

fn ask(words: &str) -> String {
    format!("python3 -c '{ASK}' {words}")
}

fn net(tap: &str, version: MmdsVersion) -> Net {
    let mmds = Some(MmdsConfig { version, ..MmdsConfig::default() });
    Net { mac: Some(Mac([2, 0, 0, 0, 0, 7])), mmds, ..Net::new(TapSource::Name(tap.into())) }
}

#[test]
fn guest_gets_its_metadata_and_still_its_traffic() {
    network::isolated(|| {
        let mut guest = Guest::boot_with(|config| {
            config.cmdline += ADDRESSES;
            config.nets.push(net(TAP, MmdsVersion::V2));
        });
        network::host(&["addr", "add", "10.9.0.1/24", "dev", TAP]);
        let long = "0123456789abcdef".repeat(3000);
        let content =
            json!({ "id": "parent", "latest": { "a": { "b": 1 }, "c": "d" }, "long": long });
        assert_eq!(guest.vm.set_metadata(&Arc::new(content)).unwrap(), 1);

        // Version 2, through the default route, and thus with the gateway's hardware address.
        assert!(guest.prints(&ask("GET /id")).starts_with("401 "));
        let token = guest.prints(&ask("PUT /latest/api/token X-metadata-token-ttl-seconds=60"));
        let token = token.strip_prefix("200 ").unwrap().to_owned();
        let with_token = |words: &str| ask(&format!("{words} X-metadata-token={token}"));
        assert_eq!(guest.prints(&with_token("GET /id")), "200 parent");
        assert_eq!(guest.prints(&with_token("GET /latest/")), "200 a/\nc");
        let json = with_token("GET /latest/a Accept=application/json");
        assert_eq!(guest.prints(&json), "200 {\"b\":1}");
        assert_eq!(guest.prints(&with_token("GET /nothing")).split(' ').next(), Some("404"));

        // On the link itself, where the hardware address has to be resolved first. A long answer
        // arrives complete.
        guest.prints("busybox ip route add 169.254.169.254 dev eth0");
        let start = Instant::now();
        assert_eq!(guest.prints(&with_token("GET /long")), format!("200 {long}"));
        println!("mmds: {} KiB in {:?}", long.len() >> 10, start.elapsed());
        many_at_once(&guest, &token);
        traffic_passes(&guest);

        let template = guest.vm.freeze().expect("freeze");
        drop(guest);
        a_copy_has_its_own(&template, &token);
    });
}

/// Opens more connections than may exist at a time. Each is tried again until it is answered.
fn many_at_once(guest: &Guest, token: &str) {
    let code = format!(
        r#"
import http.client, concurrent.futures
def one(i):
    for attempt in range(20):
        try:
            c = http.client.HTTPConnection("169.254.169.254", 80, timeout=30)
            c.request("GET", "/latest/c", headers={{"X-metadata-token": "{token}"}})
            return c.getresponse().read() == b"d"
        except OSError:
            pass
with concurrent.futures.ThreadPoolExecutor(35) as pool:
    print(sum(map(bool, pool.map(one, range(50)))))
"#
    );
    assert_eq!(guest.prints(&format!("python3 -c '{code}'")), "50");
}

fn traffic_passes(guest: &Guest) {
    assert_eq!(guest.prints("busybox ping -c 2 -W 20 10.9.0.1 | grep -c seq="), "2");
    let listener = TcpListener::bind("10.9.0.1:5001").unwrap();
    let echo = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut all = vec![0; 1 << 20];
        stream.read_exact(&mut all).unwrap();
        stream.write_all(&all).unwrap();
    });
    let code = r#"
import socket
s = socket.create_connection(("10.9.0.1", 5001), 60)
data = bytes(range(256)) * 4096
s.sendall(data)
got = b""
while len(got) < len(data):
    got += s.recv(1 << 16)
print(got == data)
"#;
    assert_eq!(guest.prints(&format!("python3 -c '{code}'")), "True");
    echo.join().unwrap();
}

/// Checks that a template keeps the metadata service, but neither its content nor its tokens.
fn a_copy_has_its_own(template: &pvmm::Template, token: &str) {
    let get = ask(&format!("GET /id X-metadata-token={token}"));
    let same = Net::new(TapSource::Name("tap-copy".into()));
    let copy = Child::with(template, |overrides| overrides.nets = vec![(0, same)]);
    assert!(copy.prints(&get).starts_with("401 "));
    drop(copy);

    let other = net("tap-copy", MmdsVersion::V1);
    let copy = Child::with(template, |overrides| overrides.nets = vec![(0, other)]);
    assert!(copy.prints(&ask("GET /id")).starts_with("404 "));
    assert_eq!(copy.vm.set_metadata(&Arc::new(json!({ "id": "copy" }))).unwrap(), 1);
    assert_eq!(copy.prints(&get), "200 copy");
}

/// The guest reads what a client of the API puts, also after a load.
#[test]
fn guest_gets_what_a_client_of_the_api_puts() {
    network::isolated(|| {
        let vm = Firecracker::new();
        vm.describe();
        let card = json!({"iface_id": "1", "host_dev_name": TAP, "guest_mac": "02:00:00:00:00:07"});
        vm.put("/network-interfaces/1", card);
        vm.put("/mmds/config", json!({"version": "V1", "network_interfaces": ["1"]}));
        vm.put("/mmds", json!({"identity": {"hostname": "one"}}));
        vm.start();
        vm.prints(
            "busybox ip addr add 10.9.0.2/24 dev eth0; busybox ip link set eth0 up; \
             busybox ip route add 169.254.169.254 dev eth0",
        );
        assert_eq!(vm.prints(&ask("GET /identity/hostname")), "200 one");
        vm.patch("/mmds", json!({"identity": {"hostname": "two"}}));
        assert_eq!(vm.prints(&ask("GET /identity/hostname")), "200 two");
        vm.patch("/vm", json!({"state": "Paused"}));
        let [state, memory] = ["vm.state", "vm.mem"].map(|name| vm.dir().join(name));
        vm.put("/snapshot/create", json!({"snapshot_path": state, "mem_file_path": memory}));

        let copy = Firecracker::new();
        let load = json!({"snapshot_path": state, "mem_file_path": memory,
                          "network_overrides": [{"iface_id": "1", "host_dev_name": "tap-copy"}],
                          "vsock_override": {"uds_path": copy.vsock()}});
        copy.put("/snapshot/load", load);
        copy.put("/mmds", json!({"identity": {"hostname": "copy"}}));
        copy.patch("/vm", json!({"state": "Resumed"}));
        assert_eq!(copy.prints(&ask("GET /identity/hostname")), "200 copy");
    });
}
