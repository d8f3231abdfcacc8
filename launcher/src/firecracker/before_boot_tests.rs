//! Tests of the configuration of a VM before boot: what is accepted, and what is refused.

use std::io::Write;

use tempfile::NamedTempFile;

use super::*;

fn image() -> NamedTempFile {
    let mut image = NamedTempFile::new().unwrap();
    image.write_all(&[0; 4096]).unwrap();
    image
}

fn drive(id: &str, root: bool, image: &NamedTempFile) -> Drive {
    let path = image.path().display();
    let text = format!(r#"{{"drive_id":"{id}","is_root_device":{root},"path_on_host":"{path}"}}"#);
    serde_json::from_str(&text).unwrap()
}

fn net(id: &str, tap: &str, mac: &str) -> NetworkInterface {
    let text = format!(r#"{{"iface_id":"{id}","host_dev_name":"{tap}","guest_mac":"{mac}"}}"#);
    serde_json::from_str(&text).unwrap()
}

fn machine(vcpu_count: u8, mem_size_mib: u64) -> MachineConfig {
    MachineConfig { vcpu_count, mem_size_mib, ..MachineConfig::default() }
}

fn bad(result: Result<(), Refusal>) -> String {
    let refusal = result.unwrap_err();
    assert_eq!(refusal.status, 400);
    refusal.message
}

#[test]
fn machine_of_which_only_a_kernel_and_a_drive_were_said_has_defaults() {
    let (kernel, root) = (image(), image());
    let mut before = BeforeBoot::default();
    before.put_drive(drive("rootfs", true, &root)).unwrap();
    let kernel_image_path = kernel.path().display().to_string();
    before.put_boot_source(BootSource { kernel_image_path, ..BootSource::default() }).unwrap();
    let machine = before.machine().unwrap();
    assert_eq!((machine.vcpus, machine.memory_mib), (1, 128));
    assert!(machine.cmdline.starts_with("reboot=k panic=1"), "{}", machine.cmdline);
    assert!(machine.cmdline.ends_with(" pci=off root=/dev/vda rw"), "{}", machine.cmdline);
    assert!(!machine.rng && !machine.awaits_agent);
}

#[test]
fn arguments_for_init_stay_the_last_ones() {
    let (kernel, root) = (image(), image());
    let mut before = BeforeBoot::default();
    before.put_drive(drive("rootfs", true, &root)).unwrap();
    let kernel_image_path = kernel.path().display().to_string();
    let boot_args = Some("quiet init=/bin/sh -- -c true".into());
    before
        .put_boot_source(BootSource { kernel_image_path, boot_args, ..BootSource::default() })
        .unwrap();
    let cmdline = before.machine().unwrap().cmdline;
    assert_eq!(cmdline, "quiet init=/bin/sh pci=off root=/dev/vda rw -- -c true");
}

#[test]
fn machine_without_a_kernel_is_refused() {
    let mut before = BeforeBoot::default();
    let message = before.machine().unwrap_err().message;
    assert!(message.contains("without kernel configuration"));
    let missing = BootSource { kernel_image_path: "/no/kernel".into(), ..BootSource::default() };
    assert!(bad(before.put_boot_source(missing)).contains("/no/kernel"));
    assert!(before.machine().is_err());
}

#[test]
fn i3_machine_of_an_impossible_size_is_refused_and_the_old_one_stays() {
    let mut before = BeforeBoot::default();
    for (vcpus, memory) in [(0, 128), (33, 128), (255, 128), (1, 0), (1, 31), (1, u64::MAX)] {
        bad(before.put_machine(machine(vcpus, memory)));
    }
    let odd = MachineConfig { huge_pages: HugePages::Hugetlbfs2M, ..machine(1, 129) };
    bad(before.put_machine(odd));
    bad(before.put_machine(MachineConfig { smt: true, ..machine(3, 128) }));
    let template = Some(CpuTemplate::V1N1);
    let refused =
        bad(before.put_machine(MachineConfig { cpu_template: template, ..machine(1, 128) }));
    assert!(refused.contains("V1N1 is for aarch64"));
    assert_eq!(before.config.machine_config, MachineConfig::default());
    before.put_machine(machine(2, 256)).unwrap();
    // A second request replaces the whole configuration.
    let huge = MachineConfig { huge_pages: HugePages::Hugetlbfs2M, ..machine(2, 512) };
    before.put_machine(huge.clone()).unwrap();
    assert_eq!(before.config.machine_config, huge);
}

#[test]
fn later_one_of_cpu_template_and_cpu_config_is_in_force_and_only_the_first_is_shown() {
    let mut before = BeforeBoot::default();
    let templated = |cpu_template| MachineConfig { cpu_template, ..machine(1, 128) };
    let shown = |before: &BeforeBoot| before.config.machine_config.cpu_template;
    let (_, c3) = cpu_templates::facts(CpuTemplate::C3).unwrap();
    let custom = CpuModifiers::from_json(br#"{"msr_modifiers":[{"addr":"0x10a","bitmap":"0b0"}]}"#);
    let custom = custom.unwrap();
    assert_eq!(before.cpu(), CpuBaseline::Host);
    before.put_machine(templated(Some(CpuTemplate::C3))).unwrap();
    // A request without a template changes nothing about it.
    before.put_machine(templated(None)).unwrap();
    assert_eq!((shown(&before), before.cpu()), (Some(CpuTemplate::C3), c3.into()));
    before.put_cpu_config(custom.clone());
    before.put_machine(templated(None)).unwrap();
    assert_eq!((shown(&before), before.cpu()), (None, custom.into()));
    before.put_machine(templated(Some(CpuTemplate::T2A))).unwrap();
    assert_eq!(shown(&before), Some(CpuTemplate::T2A));
    before.put_machine(templated(Some(CpuTemplate::None))).unwrap();
    assert_eq!((shown(&before), before.cpu()), (None, CpuBaseline::Host));
    assert!(before.is_described());
}

#[test]
fn cpu_template_of_another_vendor_is_refused_by_its_name() {
    let (intel, amd) = ("GenuineIntel", "AuthenticAMD");
    for (template, there, elsewhere) in [
        (CpuTemplate::T2, intel, amd),
        (CpuTemplate::T2S, intel, amd),
        (CpuTemplate::T2CL, intel, amd),
        (CpuTemplate::C3, intel, amd),
        (CpuTemplate::T2A, amd, intel),
    ] {
        let mut before = BeforeBoot::default();
        let named = MachineConfig { cpu_template: Some(template), ..machine(1, 128) };
        before.put_machine(named).unwrap();
        before.check_vendor(there).unwrap();
        let message = bad(before.check_vendor(elsewhere));
        assert!(message.contains(&format!("cpu_template {template:?} is for")), "{message}");
        assert!(message.starts_with("Start microvm error: ") && message.contains(there));
    }
    BeforeBoot::default().check_vendor(amd).unwrap();
}

#[test]
fn root_drive_is_the_first_whenever_it_came() {
    let image = image();
    let mut before = BeforeBoot::default();
    for (id, root) in [("a", false), ("b", false), ("rootfs", true), ("c", false)] {
        before.put_drive(drive(id, root, &image)).unwrap();
    }
    let ids = |before: &BeforeBoot| {
        before.config.drives.iter().map(|drive| drive.drive_id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(ids(&before), ["rootfs", "a", "b", "c"]);
    let second = bad(before.put_drive(drive("other", true, &image)));
    assert!(second.contains("A root block device already exists"));
    // A second request for an existing drive replaces it, at its position.
    before.put_drive(drive("b", false, &image)).unwrap();
    assert_eq!(ids(&before), ["rootfs", "a", "b", "c"]);
}

#[test]
fn i4_drive_that_is_no_image_is_refused() {
    let image = image();
    let mut before = BeforeBoot::default();
    for path in ["", "/no/such/file", "/", "/dev/null", "a\0b", &"x".repeat(5000)] {
        let mut wrong = drive("a", false, &image);
        wrong.path_on_host = Some(path.to_owned());
        bad(before.put_drive(wrong));
    }
    let mut remote = drive("a", false, &image);
    remote.socket = Some("/s".to_owned());
    assert!(bad(before.put_drive(remote)).contains("vhost-user"));
    for index in 0..MAX_DRIVES {
        before.put_drive(drive(&format!("d{index}"), false, &image)).unwrap();
    }
    bad(before.put_drive(drive("more", false, &image)));
}

#[test]
fn i4_path_of_a_kernel_console_or_socket_that_cannot_be_is_refused() {
    let image = image();
    let kernel = image.path().to_str().unwrap().to_owned();
    for path in ["", "a\0b", "/no/../such", "..", &"x".repeat(5000)] {
        let mut before = BeforeBoot::default();
        let source = |kernel_image_path: &str, initrd_path: Option<&str>| BootSource {
            kernel_image_path: kernel_image_path.to_owned(),
            initrd_path: initrd_path.map(str::to_owned),
            boot_args: None,
        };
        // A folder is refused no later than at the start.
        if path != ".." {
            bad(before.put_boot_source(source(path, None)));
            bad(before.put_boot_source(source(&kernel, Some(path))));
        }
        let serial = Serial { serial_out_path: Some(path.into()), rate_limiter: None };
        assert!(console(&serial).is_err(), "{path:?}");
    }
    let mut before = BeforeBoot::default();
    for path in ["", "a\0b", &"x".repeat(108)] {
        let vsock = Vsock { vsock_id: None, guest_cid: 3, uds_path: path.to_owned() };
        bad(before.put_vsock(vsock));
    }
}

#[test]
fn drive_behind_a_link_is_the_image_itself() {
    let dir = tempfile::TempDir::new().unwrap();
    let image = image();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(image.path(), &link).unwrap();
    assert_eq!(resolved(link.to_str().unwrap()), fs::canonicalize(image.path()).unwrap());
}

#[test]
fn network_card_with_another_ones_address_or_tap_or_an_odd_one_is_refused() {
    let mut before = BeforeBoot::default();
    before.put_net(net("1", "tap0", "06:00:AC:10:00:02")).unwrap();
    let same = bad(before.put_net(net("2", "tap1", "06:00:ac:10:00:02")));
    assert!(same.contains("The MAC address is already in use"));
    bad(before.put_net(net("2", "tap0", "06:00:ac:10:00:03")));
    for (tap, mac) in [
        ("", "06:00:00:00:00:03"),
        ("a/b", "06:00:00:00:00:03"),
        ("tap-of-sixteen-x", "06:00:00:00:00:03"),
        ("tap1", "06:00"),
        ("tap1", "01:00:00:00:00:00"),
    ] {
        bad(before.put_net(net("2", tap, mac)));
    }
    before.put_net(net("1", "tap7", "06:00:ac:10:00:02")).unwrap();
    assert_eq!(before.config.network_interfaces.len(), 1);
}

#[test]
fn serial_console_takes_a_file_and_a_limit() {
    let mut before = BeforeBoot::default();
    let serial = |body: &str| serde_json::from_str::<Serial>(body).unwrap();
    let slow = r#"{"rate_limiter":{"size":1,"refill_time":86400001}}"#;
    assert!(bad(before.put_serial(serial(slow))).contains("refill_time_ms"));
    let limited = r#"{"rate_limiter":{"size":1,"refill_time":1}}"#;
    before.put_serial(serial(limited)).unwrap();
    assert_eq!(console_limit(&before.serial).map(|bucket| bucket.size), Some(1));
    let unlimited = r#"{"serial_out_path":"/s","rate_limiter":{"size":0,"refill_time":0}}"#;
    before.put_serial(serial(unlimited)).unwrap();
    assert_eq!(before.serial.serial_out_path, Some("/s".into()));
    // The serial console is no part of a VM to boot, so a snapshot may still be loaded.
    assert!(!before.is_described());
}

#[test]
fn vsock_balloon_and_metadata_service_that_cannot_be_are_refused() {
    let mut before = BeforeBoot::default();
    let vsock =
        |guest_cid, uds_path: &str| Vsock { vsock_id: None, guest_cid, uds_path: uds_path.into() };
    for (cid, path) in [(0, "/v"), (2, "/v"), (u32::MAX, "/v"), (3, ""), (3, &"x".repeat(108))] {
        bad(before.put_vsock(vsock(cid, path)));
    }
    before.put_vsock(vsock(3, &"x".repeat(107))).unwrap();
    let balloon: Balloon =
        serde_json::from_str(r#"{"amount_mib":129,"deflate_on_oom":true}"#).unwrap();
    bad(before.put_balloon(balloon.clone()));
    before.put_balloon(Balloon { amount_mib: 128, ..balloon }).unwrap();
    bad(before.put_machine(machine(1, 64)));
    let service = |body: &str| serde_json::from_str::<MmdsConfig>(body).unwrap();
    bad(before.put_mmds_config(service(r#"{"network_interfaces":[]}"#)));
    bad(before.put_mmds_config(service(r#"{"network_interfaces":["1"]}"#)));
    before.put_net(net("1", "tap0", "06:00:00:00:00:01")).unwrap();
    for address in ["10.0.0.1", "169.254.0.1", "169.254.255.1"] {
        let body = format!(r#"{{"network_interfaces":["1"],"ipv4_address":"{address}"}}"#);
        bad(before.put_mmds_config(service(&body)));
    }
    before.put_mmds_config(service(r#"{"network_interfaces":["1"]}"#)).unwrap();
    let address = before.config.mmds_config.unwrap().ipv4_address;
    assert_eq!(address, Some(Ipv4Addr::new(169, 254, 169, 254)));
}

#[test]
fn boot_source_that_is_a_pipe_is_refused_and_waits_for_nobody() {
    let (dir, kernel) = (tempfile::tempdir().unwrap(), image());
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut before = BeforeBoot::default();
    let text = |kernel: &Path, initrd: &Path| {
        format!(r#"{{"kernel_image_path":{kernel:?},"initrd_path":{initrd:?}}}"#)
    };
    for (text, name) in [
        (text(&pipe, kernel.path()), "kernel_image_path"),
        (text(kernel.path(), &pipe), "initrd_path"),
    ] {
        let message = bad(before.put_boot_source(serde_json::from_str(&text).unwrap()));
        assert!(message.contains(name) && message.contains("regular file"), "{message}");
    }
}
