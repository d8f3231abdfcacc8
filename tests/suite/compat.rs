//! Published clients of Firecracker, unmodified, against a real guest.
//!
//! `cargo xtask compat` builds the clients and sets `PVMM_COMPAT` to their folder. The driver of a
//! client (`tests/compat`) prints when the guest is to be checked, and the check runs here.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use pvmm::agent::Agent;
use pvmm_agent_image::AGENT;
use pvmm_tests::child::{SOON, prints};
use pvmm_tests::guest::{MARK_LINE, base, default_kernel, other_rootfs};
use pvmm_tests::{cli, network};
use tempfile::TempDir;

const TAP: &str = "tap-compat";
const BOOT_ARGS: &str = "console=ttyS0 quiet reboot=k panic=-1 pvmm.root=/dev/vda \
                         pvmm.rootfstype=ext4 pvmm.hostname=guest \
                         ip=10.9.0.2::10.9.0.1:255.255.255.0::eth0:off";

/// Returns the folder into which `cargo xtask compat` has put the clients.
fn clients() -> PathBuf {
    std::env::var_os("PVMM_COMPAT").expect("run it by cargo xtask compat").into()
}

/// Runs a client to its end, and calls `look` whenever the client asks for a check of the guest.
fn drive(program: &mut Command, look: impl Fn(&str, &Agent)) {
    // The path has no capital letters: Python's client uses it as a host name, in lower case.
    let name = format!("pvmm-compat-{}", std::process::id());
    let dir: TempDir = tempfile::Builder::new().prefix(&name).rand_bytes(0).tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::os::unix::fs::symlink(cli::binary(), path("firecracker")).unwrap();
    let kernel = default_kernel();
    std::fs::write(path("initrd"), kernel.initramfs(AGENT).unwrap()).unwrap();
    other_rootfs(&path("other.ext4"));
    std::fs::write(path("data"), vec![7; 1 << 20]).unwrap();
    let mut client = Running(
        program
            .args([path("firecracker"), dir.path().to_owned(), kernel.vmlinux, path("initrd")])
            .args([base().rootfs, path("other.ext4"), path("data")])
            .args([BOOT_ARGS, TAP])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start the client"),
    );
    let said = BufReader::new(client.0.stdout.take().unwrap());
    for line in said.lines() {
        let line = line.unwrap();
        println!("client: {line}");
        if let Some(moment) = line.strip_prefix("look ") {
            look(moment, &agent(&path("v.sock")));
            client.0.stdin.as_mut().unwrap().write_all(b"good\n").unwrap();
        }
    }
    let status = client.0.wait().unwrap();
    assert!(status.success(), "the client ended with {status}");
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn agent(socket: &Path) -> Agent {
    let deadline = Instant::now() + SOON;
    loop {
        match Agent::connect(socket, deadline) {
            Ok(agent) => return agent,
            Err(error) if Instant::now() > deadline => panic!("no agent: {error}"),
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(100)),
        }
    }
}

/// Checks a drive and a network card, and a word in memory that later moments must find.
fn look(moment: &str, agent: &Agent) {
    assert_eq!(prints(agent, "cat /sys/class/net/eth0/address"), "02:00:00:00:00:07");
    assert_eq!(prints(agent, "head -c 3 /dev/vdb | od -An -tx1"), " 07 07 07");
    if moment == "booted" {
        prints(agent, "echo booted > /tmp/word");
        return;
    }
    assert_eq!(prints(agent, "cat /tmp/word"), "booted");
    // The other root image is there after the VM was loaded with it, and not before.
    let mark = if moment == "loaded" { "other" } else { "" };
    assert_eq!(prints(agent, MARK_LINE), mark, "{moment}");
    let read = "echo 3 > /proc/sys/vm/drop_caches; python3 -c 'print(6 * 7)'";
    assert_eq!(prints(agent, read), "42");
}

#[test]
#[ignore = "make compat"]
fn compat_rs_sdk_boots_snapshots_loads_elsewhere_and_patches() {
    network::isolated(|| drive(&mut Command::new(clients().join("rs-sdk")), look));
}

#[test]
#[ignore = "make compat"]
fn compat_firepilot_boots_pauses_resumes_and_its_machine_goes_on_elsewhere() {
    network::isolated(|| drive(&mut Command::new(clients().join("firepilot")), look));
}

#[test]
#[ignore = "make compat"]
fn compat_firecracker_python_boots_snapshots_loads_elsewhere_and_patches() {
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", clients().join("python")).arg(clients().join("python_api.py"));
    let metadata = |agent: &Agent| {
        let code = r#"
import http.client
c = http.client.HTTPConnection("169.254.169.254", timeout=30)
c.request("PUT", "/latest/api/token", headers={"X-metadata-token-ttl-seconds": "60"})
token = c.getresponse().read().decode()
c.request("GET", "/id", headers={"X-metadata-token": token})
print(c.getresponse().read().decode())
"#;
        prints(
            agent,
            &format!("busybox ip route add 169.254.169.254 dev eth0; python3 -c '{code}'"),
        )
    };
    network::isolated(|| {
        drive(&mut python, |moment, agent| {
            look(moment, agent);
            let expected = if moment == "booted" { "python" } else { "copy" };
            assert_eq!(metadata(agent), expected);
        });
    });
}
