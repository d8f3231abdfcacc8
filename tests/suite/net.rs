//! A guest with a network card, in a network namespace that the test makes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use pvmm::exec::ExecRequest;
use pvmm::{Kvm, Mac, Net, TapSource};
use pvmm_tests::guest::Guest;
use pvmm_tests::network;

const TAP: &str = "tap-suite";
const ADDRESSES: &str = " ip=10.9.0.2::10.9.0.1:255.255.255.0::eth0:off";
const PATIENCE: Duration = Duration::from_secs(120);

/// Boots a guest on a tap that pvmm makes, with addresses at both ends.
fn guest_on_tap() -> Guest {
    let guest = Guest::boot_with(|config| {
        config.cmdline += ADDRESSES;
        let mac = Some(Mac([2, 0, 0, 0, 0, 7]));
        config.nets.push(Net { mac, mtu: Some(1400), ..Net::new(TapSource::Name(TAP.into())) });
    });
    assert_eq!(guest.vm.taps(), [TAP]);
    network::host(&["addr", "add", "10.9.0.1/24", "dev", TAP]);
    guest
}

/// The data in each direction: what an emulated host can do in seconds, and what is promised.
const SOME_MIB: usize = 32;
const MUCH_MIB: usize = 200;

fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[test]
fn card_carries_pings_streams_and_small_packets_and_outlives_its_tap() {
    network::isolated(|| {
        let guest = guest_on_tap();
        assert_eq!(guest.prints("cat /sys/class/net/eth0/address"), "02:00:00:00:00:07");
        assert_eq!(guest.prints("cat /sys/class/net/eth0/mtu"), "1400");
        let pings = "busybox ping -c 3 -W 20 10.9.0.1 | grep -c 'seq='";
        assert_eq!(guest.prints(pings), "3");
        streams_both_ways(&guest, SOME_MIB);
        small_packets_are_answered(&guest);
        survives_the_end_of_its_tap(&guest);
    });
}

#[test]
#[ignore = "make soak"]
fn soak_card_carries_200_mb_each_way() {
    network::isolated(|| streams_both_ways(&guest_on_tap(), MUCH_MIB));
}

/// The longest Ethernet frame of a card without segmentation offload.
const LONGEST_PACKET: u64 = 1514;

/// A program that sends and receives a stream and prints its checksums and longest frames. No two
/// blocks of the stream are equal, so that loss or reordering changes the checksum.
const STREAM: &str = "
import socket, sys, threading, zlib
longest = {False: 0, True: 0}
def look():
    # A card shows a frame before it is cut into packets; how long it is comes with MSG_TRUNC.
    card, head = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)), bytearray(64)
    while True:
        length, (_, _, kind, *_) = card.recvfrom_into(head, 64, socket.MSG_TRUNC)
        is_sent = kind == socket.PACKET_OUTGOING
        longest[is_sent] = max(longest[is_sent], length)
threading.Thread(target=look, daemon=True).start()
mb, block = int(sys.argv[1]), bytes(i * 7 + (i >> 8) & 255 for i in range(65536))
s = socket.create_connection(('10.9.0.1', 5001), 100)
sent = 0
for i in range(mb * 16):
    data = i.to_bytes(8, 'little') + block[8:]
    sent = zlib.crc32(data, sent)
    s.sendall(data)
got, received = 0, 0
while received < mb << 20:
    data = s.recv(1 << 18)
    assert data, received
    got, received = zlib.crc32(data, got), received + len(data)
s.sendall(b'.')
print(sent, got, longest[True], longest[False])
";

fn streams_both_ways(guest: &Guest, mib: usize) {
    let bytes = mib << 20;
    let listener = TcpListener::bind("10.9.0.1:5001").unwrap();
    let echo = thread::spawn(move || {
        let mut stream = patient(listener.accept().unwrap().0);
        let mut all = vec![0; bytes];
        stream.read_exact(&mut all).unwrap();
        stream.write_all(&all).unwrap();
        stream.read_exact(&mut [0]).unwrap();
    });
    let start = Instant::now();
    let stream = ExecRequest::argv(["python3", "-c", STREAM, &mib.to_string()]);
    let output = guest.agent.exec(&stream.timeout(5 * PATIENCE)).unwrap();
    assert!(output.status.success(), "{output:?}");
    let sums = String::from_utf8(output.stdout.bytes).unwrap();
    let sums = sums.trim_end();
    echo.join().unwrap();
    println!("net: {mib} MiB there and back in {:?}", start.elapsed());
    let numbers: Vec<u64> = sums.split(' ').map(|number| number.parse().unwrap()).collect();
    let [sent, got, longest_tx, longest_rx] = numbers[..] else { panic!("{sums}") };
    assert_eq!(sent, got);
    // The host does the segmentation in both directions: frames are as long as several packets. The
    // sender's kernel chooses how many packets are in a frame, and takes two at a low rate. The
    // average must therefore only be longer than any single packet.
    for (way, longest) in [("tx", longest_tx), ("rx", longest_rx)] {
        let count = |what| {
            let file = format!("cat /sys/class/net/eth0/statistics/{way}_{what}");
            guest.prints(&file).parse::<u64>().unwrap()
        };
        let average = count("bytes") / count("packets");
        println!("net: {way} frames have {average} bytes on average, {longest} at most");
        assert!(longest > 2 * 1414, "{way}: {longest}");
        assert!(average > LONGEST_PACKET, "{way}: {average}");
    }
}

fn small_packets_are_answered(guest: &Guest) {
    let socket = UdpSocket::bind("10.9.0.1:5002").unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let server = thread::spawn(move || {
        let mut packet = [0; 64];
        for _ in 0..200 {
            let (len, from) = socket.recv_from(&mut packet).unwrap();
            socket.send_to(&packet[..len], from).unwrap();
        }
    });
    let code = "
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(60)
start = time.time()
for i in range(200):
    s.sendto(i.to_bytes(8, 'big'), ('10.9.0.1', 5002))
    assert s.recv(64) == i.to_bytes(8, 'big')
print('%.2f' % ((time.time() - start) * 5))
";
    println!(
        "net: a small packet there and back takes {} ms",
        guest.prints(&format!("python3 -c \"{code}\""))
    );
    server.join().unwrap();
}

/// D12: the interface of a running guest is deleted.
fn survives_the_end_of_its_tap(guest: &Guest) {
    network::host(&["link", "del", TAP]);
    let lost = "busybox ping -c 2 -W 1 10.9.0.1 >/dev/null; echo $?";
    assert_eq!(guest.prints(lost), "1");
    let before = device_thread_ticks();
    thread::sleep(Duration::from_secs(1));
    let spent = device_thread_ticks() - before;
    assert!(spent < 20, "the device thread used {spent} of 100 ticks on a dead tap");
    assert_eq!(guest.prints("echo $((6*7))"), "42");
}

/// Returns how long the device threads of this process have run, in hundredths of a second.
fn device_thread_ticks() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats
        .filter(|stat| stat.contains("(pvmm-devices)"))
        .map(|stat| {
            let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
            fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
        })
        .sum()
}

#[test]
fn d11_tap_in_use_or_of_another_kind_is_refused() {
    network::isolated(|| {
        let refused = |name: &str| {
            let mut config = pvmm::VmConfig::new("/nowhere/vmlinux");
            config.nets.push(Net::new(TapSource::Name(name.into())));
            format!("{:#}", pvmm::Vm::boot(&Kvm::open().unwrap(), config).err().unwrap())
        };
        assert!(refused("lo").contains("tap lo: cannot be had"), "{}", refused("lo"));
        let held = machine_with(TAP);
        assert!(refused(TAP).contains("Device or resource busy"), "{}", refused(TAP));
        drop(held);
    });
}

#[test]
fn tap_passed_open_is_used_as_it_is() {
    network::isolated(|| {
        let vm = machine_on(TapSource::File(network::tap("tap-passed")));
        assert_eq!(vm.taps(), ["tap-passed"]);
    });
}

/// Makes a VM without a guest that holds the tap.
fn machine_with(name: &str) -> pvmm::Vm {
    machine_on(TapSource::Name(name.into()))
}

fn machine_on(tap: TapSource) -> pvmm::Vm {
    let kernel = pvmm_tests::tiny::kernel(&[0xf4]);
    let mut config = pvmm::VmConfig::new(kernel.path());
    config.boot_protocol = pvmm::BootProtocol::Linux64;
    config.memory_mib = 32;
    config.nets.push(Net::new(tap));
    pvmm::Vm::boot(&Kvm::open().unwrap(), config).unwrap()
}

#[test]
fn card_of_a_run_has_addresses_route_resolver_and_a_rate() {
    network::isolated(|| {
        let user = pvmm_tests::cli::User::new();
        let card = format!(
            "tap={TAP},ip=10.9.0.2/24,ip=fd09::2/64,gw=10.9.0.1,dns=10.9.0.53,pps=20,mtu=1400"
        );
        let vm = user.detached(&["--net", &card]);
        network::host(&["addr", "add", "10.9.0.1/24", "dev", TAP]);
        let exec = |line: &str| user.pvmm(["exec", &vm, "--", "sh", "-c", line]);
        let look = "ip -o addr show dev eth0 | grep -oE '10.9.0.2/24|fd09::2/64'; \
                    ip route | head -n 1 | cut -d' ' -f1-3; cat /etc/resolv.conf; \
                    ping -c 1 -W 20 10.9.0.1 >/dev/null && echo pong";
        let look = look.replace("ping", "busybox ping").replace("ip -o", "busybox ip -o");
        let look = look.replace("ip route", "busybox ip route");
        let said = exec(&look);
        let expected = "10.9.0.2/24\nfd09::2/64\ndefault via 10.9.0.1\nnameserver 10.9.0.53\npong";
        assert_eq!(said.text(), expected, "{said:?}");
        // The limit is twenty packets a second, with a burst of one second: forty more packets take
        // two seconds.
        let flood = "busybox ping -c 60 -i 0.01 -W 20 10.9.0.1 >/dev/null";
        let flood = exec(flood);
        assert_eq!(flood.code, Some(0), "{flood:?}");
        assert!(flood.took > Duration::from_millis(1500), "{:?}", flood.took);
        assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));
    });
}
