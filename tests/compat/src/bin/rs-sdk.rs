//! firecracker-rs-sdk: boots, snapshots, loads in a second process, puts another image behind the
//! root drive of the paused machine, resumes; then once more with another tap, which it has no word
//! for.

use std::path::PathBuf;

use firecracker_rs_sdk::Result;
use firecracker_rs_sdk::firecracker::FirecrackerOption;
use firecracker_rs_sdk::instance::Instance;
use firecracker_rs_sdk::models::*;
use pvmm_compat::{Words, ask, look};

fn main() -> Result<()> {
    let words = Words::from_arguments();
    let (snapshot, memory) = (words.snapshot(), words.memory());

    let mut vm = process(&words, "one")?;
    vm.put_machine_configuration(&MachineConfiguration {
        cpu_template: None,
        smt: None,
        mem_size_mib: 256,
        track_dirty_pages: None,
        vcpu_count: 1,
        huge_pages: None,
    })?;
    vm.put_guest_boot_source(&BootSource {
        boot_args: Some(words.boot_args.clone()),
        initrd_path: Some(words.initrd.clone()),
        kernel_image_path: words.kernel.clone(),
    })?;
    for (drive_id, path, is_root) in [("rootfs", &words.rootfs, true), ("data", &words.data, false)]
    {
        vm.put_guest_drive_by_id(&Drive {
            drive_id: drive_id.into(),
            partuuid: None,
            is_root_device: is_root,
            cache_type: None,
            is_read_only: is_root,
            path_on_host: path.clone(),
            rate_limiter: None,
            io_engine: None,
            socket: None,
        })?;
    }
    vm.put_guest_network_interface_by_id(&NetworkInterface {
        guest_mac: Some("02:00:00:00:00:07".into()),
        host_dev_name: words.tap.clone().into(),
        iface_id: "eth0".into(),
        rx_rate_limiter: None,
        tx_rate_limiter: None,
    })?;
    vm.put_guest_vsock(&Vsock {
        guest_cid: 3,
        uds_path: words.vsock(),
        vsock_id: Some("v".into()),
    })?;
    vm.start()?;
    look("booted");

    vm.pause()?;
    vm.create_snapshot(&SnapshotCreateParams {
        mem_file_path: memory.clone(),
        snapshot_path: snapshot.clone(),
        snapshot_type: Some(SnapshotType::Full),
        version: None,
    })?;
    // It kills its process when it goes.
    drop(vm);
    std::fs::remove_file(words.vsock())?;

    let mut vm = process(&words, "two")?;
    vm.load_snapshot(&SnapshotLoadParams {
        enable_diff_snapshots: None,
        mem_file_path: Some(memory),
        mem_backend: None,
        resume_vm: Some(false),
        snapshot_path: snapshot,
    })?;
    go_on(&mut vm, &words)?;
    vm.stop()?;
    drop(vm);
    std::fs::remove_file(words.vsock())?;

    let mut vm = process(&words, "three")?;
    ask(&socket(&words, "three"), "PUT /snapshot/load", &words.load_elsewhere());
    go_on(&mut vm, &words)?;
    vm.stop()
}

/// Another image behind the root drive of the loaded machine, and on.
fn go_on(vm: &mut Instance, words: &Words) -> Result<()> {
    vm.patch_guest_drive_by_id(&PartialDrive {
        drive_id: "rootfs".into(),
        path_on_host: Some(words.other_rootfs.clone()),
        rate_limiter: None,
    })?;
    vm.resume()?;
    look("loaded");
    Ok(())
}

fn socket(words: &Words, name: &str) -> PathBuf {
    words.dir.join(format!("{name}.sock"))
}

fn process(words: &Words, name: &str) -> Result<Instance> {
    let null = "/dev/null";
    let mut vm = FirecrackerOption::new(&words.firecracker)
        .api_sock(socket(words, name))
        .id(name)
        .stdin(null)
        .stdout(null)
        .stderr(null)
        .build()?;
    vm.start_vmm()?;
    println!("{:?}", vm.get_firecracker_version()?);
    Ok(vm)
}
