//! Forks and restores of one VM have their own process, tap, addresses, drives and vsock.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::Read;
use std::net::UdpSocket;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;
use std::time::Duration;

use pvmm_tests::cli::User;
use pvmm_tests::network;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

/// Returns what `ps --json` prints about a VM.
fn facts(user: &User, vm: &str) -> serde_json::Value {
    let all: serde_json::Value = serde_json::from_str(&user.ok(&["ps", "--json"])).unwrap();
    let found = all.as_array().unwrap().iter().find(|it| it["id"] == vm || it["name"] == vm);
    found.unwrap_or_else(|| panic!("{vm} in {all}")).clone()
}

fn tap(user: &User, vm: &str) -> String {
    facts(user, vm)["taps"][0].as_str().expect("a tap").to_owned()
}

/// Returns the addresses of a process's program, heap and stack, and the bytes from which its stack
/// canary is made.
fn layout(pid: u64) -> [String; 4] {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let start = |what: &str| {
        let line = maps.lines().find(|line| line.ends_with(what)).expect(what);
        line.split('-').next().unwrap().to_owned()
    };
    const AT_RANDOM: u64 = 25;
    let auxiliary = fs::read(format!("/proc/{pid}/auxv")).unwrap();
    let words: Vec<u64> =
        auxiliary.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    let at = words.chunks(2).find(|pair| pair[0] == AT_RANDOM).unwrap()[1];
    let mut canary = [0; 16];
    File::open(format!("/proc/{pid}/mem")).unwrap().read_exact_at(&mut canary, at).unwrap();
    [start("/pvmm"), start("[heap]"), start("[stack]"), format!("{canary:x?}")]
}

#[test]
fn processes_of_one_fork_share_neither_layout_nor_canary() {
    let user = User::new();
    let vm = user.detached(&[]);
    user.ok(&["fork", &vm, "-n", "3", "--name", "c"]);
    let names = [vm.as_str(), "c-1", "c-2", "c-3"];
    let pids = names.map(|name| facts(&user, name)["pid"].as_u64().unwrap());
    let layouts = pids.map(layout);
    for part in 0..4 {
        let seen: BTreeSet<_> = layouts.iter().map(|layout| &layout[part]).collect();
        assert_eq!(seen.len(), 4, "{layouts:?}");
    }
    user.ok(&["kill", "--signal", "KILL", names[0], names[1], names[2], names[3]]);
}

/// Sends a word from the guest to an address of the host's end of a tap, and the word back.
fn carries(user: &User, vm: &str, tap: &str, host: &str) {
    let socket = UdpSocket::bind(format!("{host}:5002")).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    network::bind_to_device(&socket, tap);
    let echo = thread::spawn(move || {
        let mut packet = [0; 64];
        let (len, from) = socket.recv_from(&mut packet).unwrap();
        socket.send_to(&packet[..len], from).unwrap();
        from.ip().to_string()
    });
    let code = format!(
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)\n\
         for i in range(10):\n\
         \x20try:\n  s.sendto(b'{vm}', ('{host}', 5002)); print(s.recv(64).decode()); break\n\
         \x20except OSError: pass"
    );
    assert_eq!(user.ok(&["exec", vm, "--", "python3", "-c", &code]), vm);
    echo.join().unwrap();
}

#[test]
fn running_vm_with_a_card_is_forked_and_every_copy_has_a_tap_of_its_own() {
    network::isolated(|| {
        let user = User::new();
        user.detached(&["--name", "web", "--cpus", "2", "--net", "tap=t0,ip=10.9.0.2/24"]);
        assert_eq!(tap(&user, "web"), "t0");
        network::host(&["addr", "add", "10.9.0.1/24", "dev", "t0"]);
        carries(&user, "web", "t0", "10.9.0.1");

        // The taps are new. The guests keep their address, each behind its own tap.
        user.ok(&["fork", "web", "-n", "2", "--name", "made"]);
        let taps = ["made-1", "made-2"].map(|vm| tap(&user, vm));
        assert!(taps[0] != taps[1] && !taps.contains(&"t0".to_owned()), "{taps:?}");
        for (vm, tap, host) in
            [("made-1", &taps[0], "10.9.0.11"), ("made-2", &taps[1], "10.9.0.12")]
        {
            network::host(&["addr", "add", &format!("{host}/24"), "dev", tap]);
            carries(&user, vm, tap, host);
        }
        let mac = "cat /sys/class/net/eth0/address";
        assert_eq!(user.shell("made-1", mac), user.shell("web", mac));

        // The tap is given, with another IP address and another hardware address.
        let card = "tap=given,ip=10.9.1.2/24,gw=10.9.1.1,mac=02:00:00:00:00:42";
        user.ok(&["fork", "web", "--name", "given", "--net", card]);
        network::host(&["addr", "add", "10.9.1.1/24", "dev", "given"]);
        carries(&user, "given", "given", "10.9.1.1");
        assert_eq!(user.shell("given", mac), "02:00:00:00:00:42");
        // With only another hardware address, the guest keeps its IP addresses.
        user.ok(&["fork", "given", "--name", "other", "--net", "mac=random"]);
        let addresses = "busybox ip -o addr show dev eth0 | grep -c 'inet 10.9.1.2/24'; \
                         busybox ip route | grep -c 'default via 10.9.1.1'";
        assert_eq!(user.shell("other", addresses), "1\n1");
        assert_ne!(user.shell("other", mac), "02:00:00:00:00:42");
        network::host(&["addr", "add", "10.9.1.7/24", "dev", &tap(&user, "other")]);
        carries(&user, "other", &tap(&user, "other"), "10.9.1.7");
        carries(&user, "web", "t0", "10.9.0.1");
        user.ok(&["kill", "--signal", "KILL", "web", "made-1", "made-2", "given", "other"]);
    });
}

#[test]
fn vm_with_a_card_is_restored_on_its_tap_or_on_another() {
    network::isolated(|| {
        let user = User::new();
        user.detached(&["--name", "web", "--cpus", "2", "--net", "tap=t0,ip=10.9.0.2/24"]);
        let place = TempDir::new().unwrap();
        let path = place.path().join("snap");
        let path = path.to_str().unwrap();
        user.ok(&["snapshot", "web", path]);
        // The tap is in use, and the error says what to do.
        let busy = user.pvmm(["restore", path]);
        assert_eq!(busy.code, Some(2), "{busy:?}");
        assert!(busy.stderr.contains("t0") && busy.stderr.contains("--net tap=auto"), "{busy:?}");
        user.ok(&["restore", path, "--name", "beside", "--net", "tap=auto"]);
        network::host(&["addr", "add", "10.9.0.3/24", "dev", &tap(&user, "beside")]);
        carries(&user, "beside", &tap(&user, "beside"), "10.9.0.3");
        user.ok(&["kill", "--signal", "KILL", "web"]);
        user.ok(&["restore", path, "--name", "back"]);
        assert_eq!(tap(&user, "back"), "t0");
        network::host(&["addr", "add", "10.9.0.1/24", "dev", "t0"]);
        carries(&user, "back", "t0", "10.9.0.1");
        let many = user.pvmm(["restore", path, "--net", "tap=auto", "--net", "tap=auto"]);
        assert_eq!(many.code, Some(2), "{many:?}");
        user.ok(&["kill", "--signal", "KILL", "back", "beside"]);
    });
}

#[test]
fn copy_gets_the_drive_the_socket_and_the_cid_that_it_is_given() {
    let user = User::new();
    let place = TempDir::new().unwrap();
    let file = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    for name in ["one", "two"] {
        let mut image = name.as_bytes().to_vec();
        image.resize(1 << 20, 0);
        fs::write(file(name), image).unwrap();
    }
    user.detached(&["--name", "web", "--drive", &format!("{},ro", file("one"))]);
    let word = "dd if=/dev/vdc iflag=direct bs=4096 count=1 2>/dev/null | head -c 3";
    assert_eq!(user.shell("web", word), "one");
    let (socket, drive) = (file("v"), format!("vdc={},ro", file("two")));
    let own = ["--drive", &drive, "--vsock", &socket, "--cid", "77"];
    user.ok(&[&["fork", "web", "--name", "c"], &own[..]].concat());
    assert_eq!(user.shell("c", word), "two");
    // The guest knows its CID, and its connections arrive at the sockets `<path>_<port>`.
    let listener = UnixListener::bind(format!("{socket}_5000")).unwrap();
    // The VM has a user of its own, which must be able to reach them.
    for (path, mode) in [(place.path(), 0o711), (Path::new(&format!("{socket}_5000")), 0o777)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }
    let code = "import socket, fcntl, struct; f = open('/dev/vsock'); \
                cid = struct.unpack('I', fcntl.ioctl(f, 0x7b9, bytes(4)))[0]; \
                s = socket.socket(socket.AF_VSOCK); s.connect((2, 5000)); \
                s.sendall(str(cid).encode())";
    user.ok(&["exec", "c", "--", "python3", "-c", code]);
    let mut word = String::new();
    let mut stream = listener.accept().unwrap().0;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_to_string(&mut word).unwrap();
    assert_eq!(word, "77");
    // One image for several forks is refused, unless it is read-only.
    let drive = format!("vdc={}", file("two"));
    let refused = user.pvmm(["fork", "web", "-n", "2", "--drive", &drive]);
    assert_eq!((refused.code, refused.stderr.lines().count()), (Some(2), 2), "{refused:?}");
    user.ok(&["kill", "c"]);
    assert!(!fs::exists(&socket).unwrap());
    user.ok(&["kill", "--signal", "KILL", "web"]);
}
