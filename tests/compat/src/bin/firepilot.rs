//! firepilot: boots without ever saying how large the machine is, pauses, resumes. It knows neither vsock nor
//! snapshots, so the socket to look through is asked for beside it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use firepilot::builder::drive::DriveBuilder;
use firepilot::builder::executor::FirecrackerExecutorBuilder;
use firepilot::builder::kernel::KernelBuilder;
use firepilot::builder::network_interface::NetworkInterfaceBuilder;
use firepilot::builder::{Builder, Configuration};
use firepilot::machine::Machine;
use pvmm_compat::{Words, look};

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
    put_vsock(&words);
    machine.start().await.expect("start");
    look("booted");
    machine.pause().await.expect("pause");
    machine.resume().await.expect("resume");
    look("resumed");
    machine.kill().await.expect("kill");
}

fn put_vsock(words: &Words) {
    let body = format!(r#"{{"guest_cid": 3, "uds_path": {:?}}}"#, words.vsock());
    let socket = words.dir.join("vm").join("firecracker.socket");
    let mut stream = UnixStream::connect(socket).expect("connect");
    let len = body.len();
    write!(stream, "PUT /vsock HTTP/1.1\r\nContent-Length: {len}\r\n\r\n{body}").expect("send");
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 204");
}
