//! firepilot: boots without ever saying how large the machine is, pauses, resumes. It knows neither
//! vsock nor snapshots, so they are asked for beside it, and its machine goes on in a process that
//! it does not know.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firepilot::builder::drive::DriveBuilder;
use firepilot::builder::executor::FirecrackerExecutorBuilder;
use firepilot::builder::kernel::KernelBuilder;
use firepilot::builder::network_interface::NetworkInterfaceBuilder;
use firepilot::builder::{Builder, Configuration};
use firepilot::machine::Machine;
use pvmm_compat::{Words, ask, look};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let words = Words::from_arguments();
    let text = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let kernel = KernelBuilder::new()
        .with_kernel_image_path(text(&words.kernel))
        .with_initrd_path(text(&words.initrd))
        .with_boot_args(words.boot_args.clone());
    let root = DriveBuilder::new()
        .with_drive_id("rootfs".to_owned())
        .with_path_on_host(words.rootfs.clone())
        .as_read_only()
        .as_root_device();
    let data =
        DriveBuilder::new().with_drive_id("data".to_owned()).with_path_on_host(words.data.clone());
    let card = NetworkInterfaceBuilder::new()
        .with_iface_id("eth0".to_owned())
        .with_guest_mac("02:00:00:00:00:07".to_owned())
        .with_host_dev_name(words.tap.clone());
    let executor = FirecrackerExecutorBuilder::new()
        .with_chroot(text(&words.dir))
        .with_exec_binary(words.firecracker.clone());
    let configuration = Configuration::new("vm".to_owned())
        .with_kernel(kernel.try_build().expect("kernel"))
        .with_drive(root.try_build().expect("drive"))
        .with_drive(data.try_build().expect("drive"))
        .with_interface(card.try_build().expect("card"))
        .with_executor(executor.try_build().expect("executor"));
    let mut machine = Machine::new();
    machine.create(configuration).await.expect("create");
    let socket = words.dir.join("vm").join("firecracker.socket");
    let vsock = format!(r#"{{"guest_cid": 3, "uds_path": {:?}}}"#, words.vsock());
    ask(&socket, "PUT /vsock", &vsock);
    machine.start().await.expect("start");
    look("booted");
    machine.pause().await.expect("pause");
    machine.resume().await.expect("resume");
    look("resumed");
    machine.pause().await.expect("pause");
    let files = format!(
        r#"{{"snapshot_path": {:?}, "mem_file_path": {:?}}}"#,
        words.snapshot(),
        words.memory()
    );
    ask(&socket, "PUT /snapshot/create", &files);
    machine.kill().await.expect("kill");
    std::fs::remove_file(words.vsock()).expect("the socket of the first");
    go_on(&words);
}

/// The machine from its snapshot, with another tap and another image behind its root drive.
fn go_on(words: &Words) {
    let socket = words.dir.join("two.sock");
    let mut process = Command::new(&words.firecracker);
    process.arg("--api-sock").arg(&socket).stdin(Stdio::null()).stdout(Stdio::null());
    let mut process = process.spawn().expect("a second process");
    let deadline = Instant::now() + Duration::from_secs(10);
    while !socket.exists() {
        assert!(Instant::now() < deadline, "no socket");
        std::thread::sleep(Duration::from_millis(10));
    }
    ask(&socket, "PUT /snapshot/load", &words.load_elsewhere());
    let root = format!(r#"{{"drive_id": "rootfs", "path_on_host": {:?}}}"#, words.other_rootfs);
    ask(&socket, "PATCH /drives/rootfs", &root);
    ask(&socket, "PATCH /vm", r#"{"state": "Resumed"}"#);
    look("loaded");
    process.kill().expect("kill");
    process.wait().expect("its end");
}
