//! Snapshots through the API: writes a VM to two files, and loads a VM from them.
//!
//! The note in the state file is the VM's whole configuration, with the ids that requests use. A
//! load reads it, applies the client's overrides, and gives every device a new backend.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use pvmm::snapshot::{Roots, is_allowed};
use pvmm::{DriveSource, HostOptions, Kvm, Overrides, SaveKind, Template, ThreadFilters, open};
use serde_json::Value;

use super::before_boot::{
    VCPU_THREADS, check_image, check_vsock_path, console, console_limit, drive_config, net_config,
    resolved, vsock_config,
};
use super::bodies::{
    BackendType, BootSource, Config, Drive, DriveOverride, HugePages, LoadHugePages,
    LoadWithDrives, NetworkOverride, Serial, SnapshotCreate, SnapshotType, VsockOverride,
    limits_of,
};
use super::http::Refusal;
use super::learner::Learner;
use super::running::{Running, refuse};
use pvmm_sandbox::sys::process::effective_uid;

/// The format version of the state files that are written, as `--snapshot-version` prints it.
pub const VERSION: u32 = 1;

/// Writes a snapshot of the VM, which must be paused.
pub fn create(running: &mut Running, wish: &SnapshotCreate) -> Result<(), Refusal> {
    if !running.is_paused() {
        return Err(Refusal::bad("Create snapshot error: the machine is running; pause it first."));
    }
    let note = note(&running.config)?;
    let kind = match wish.snapshot_type {
        SnapshotType::Full => SaveKind::Full,
        SnapshotType::Diff => SaveKind::Diff,
    };
    // Pages that are touched from now on are not those of a first use of the loaded snapshot.
    running.learner = None;
    let saved = running.vm.save_files(&wish.snapshot_path, &wish.mem_file_path, kind, &note);
    saved.map_err(refuse("Create snapshot error"))
}

/// Serializes the configuration for a later load, without the log and metrics settings of this
/// process.
pub fn note(config: &Config) -> Result<Vec<u8>, Refusal> {
    let config = Config { logger: None, metrics: None, unknown: <_>::default(), ..config.clone() };
    serde_json::to_vec(&config).map_err(|error| Refusal {
        status: 500,
        message: format!("Create snapshot error: {error}"),
    })
}

/// The client's overrides of the configuration of a loaded VM.
pub struct Changes<'a> {
    pub nets: &'a [NetworkOverride],
    pub vsock: Option<&'a VsockOverride>,
    pub drives: &'a [DriveOverride],
}

/// Loads a VM from two files, paused.
///
/// The state file names the drives by paths that may come from another client. A drive that this
/// request overrides is trusted; the others are opened only below `roots`, and not through a
/// symbolic link of another user.
pub fn load(
    with: &LoadWithDrives,
    serial: &Serial,
    roots: &Roots,
    filters: Option<Arc<ThreadFilters>>,
) -> Result<Running, Refusal> {
    let load = &with.load;
    let memory =
        load.memory().map_err(|error| Refusal::bad(format!("Load snapshot error: {error}")))?;
    let (file, page_server) = match memory.backend_type {
        BackendType::File => (Some(memory.backend_path), None),
        BackendType::Uffd => (None, Some(memory.backend_path)),
    };
    let mut template = Kvm::open()
        .and_then(|kvm| Template::load_files(&kvm, &load.snapshot_path, file.as_deref()))
        .map_err(refuse("Load snapshot error"))?;
    let mut config = read_note(template.note())?;
    let changes = Changes {
        nets: &load.network_overrides,
        vsock: load.vsock_override.as_ref(),
        drives: &with.drive_overrides,
    };
    apply(&mut config, &changes)?;
    let named = |id: &str| with.drive_overrides.iter().any(|change| change.drive_id == id);
    for drive in config.drives.iter().filter(|drive| !named(&drive.drive_id)) {
        check_saved_drive(drive, roots)?;
    }
    let machine = &mut config.machine_config;
    machine.track_dirty_pages = load.track_dirty_pages || load.enable_diff_snapshots;
    machine.huge_pages = match load.huge_pages {
        LoadHugePages::Snapshot => machine.huge_pages,
        LoadHugePages::None => HugePages::None,
        LoadHugePages::Transparent => HugePages::Transparent,
        LoadHugePages::Hugetlbfs2M => HugePages::Hugetlbfs2M,
    };
    // Images are opened when the VM first runs: until then the client may name another one.
    let drives = config.drives.iter().map(|drive| drive_config(drive, DriveSource::Later));
    let drives = drives.collect::<Result<Vec<_>, _>>()?;
    // A page that is prefaulted would count as dirty, and a page server wants to be asked.
    let learner = if file.is_some() && !config.machine_config.track_dirty_pages {
        Learner::of(&mut template, &load.snapshot_path)
    } else {
        None
    };
    let overrides = Overrides {
        drives: drives.into_iter().enumerate().collect(),
        page_server,
        catch_up: load.clock_realtime,
        ..overrides(&config, serial, filters)?
    };
    let forked = template.fork(overrides).map_err(refuse("Load snapshot error"))?;
    // As in Firecracker, a refresh after a load is up to the client.
    Ok(Running::new(forked.without_refresh(), config).learning(learner))
}

/// Refuses a drive that a state file must not name. A missing image is allowed, because a later
/// request may name another one.
fn check_saved_drive(drive: &Drive, roots: &Roots) -> Result<(), Refusal> {
    let path = drive.path_on_host.as_deref().unwrap_or_default();
    let refuse = |why: &str| {
        let id = &drive.drive_id;
        Refusal::bad(format!("Load snapshot error: drive {id:?}: path_on_host {path:?} {why}."))
    };
    match fs::symlink_metadata(path) {
        Ok(facts) if facts.is_symlink() && ![0, effective_uid()].contains(&facts.uid()) => {
            return Err(refuse("is a link of another user's; name the drive in drive_overrides"));
        }
        Ok(_) => check_image(path, drive.read_only())?,
        Err(_) => {}
    }
    if roots.is_none() || is_allowed(&resolved(path), roots) {
        Ok(())
    } else {
        Err(refuse("is not below --drive-root; name the drive in drive_overrides"))
    }
}

/// Builds the parts of a loaded VM that are new: network backends, vsock, console, thread names.
pub fn overrides(
    config: &Config,
    serial: &Serial,
    thread_filters: Option<Arc<ThreadFilters>>,
) -> Result<Overrides, Refusal> {
    let nets = config.network_interfaces.iter().map(net_config).collect::<Result<Vec<_>, _>>()?;
    Ok(Overrides {
        nets: nets.into_iter().enumerate().collect(),
        vsock: config.vsock.as_ref().map(vsock_config),
        host: HostOptions {
            rng_limits: limits_of(config.entropy.as_ref().and_then(|entropy| entropy.rate_limiter)),
            console: console(serial)?,
            console_limit: console_limit(serial),
            track_changes: config.machine_config.track_dirty_pages,
            huge_pages: config.machine_config.huge_pages != HugePages::None,
            vcpu_thread_prefix: VCPU_THREADS.into(),
            thread_filters,
            ..HostOptions::default()
        },
        ..Overrides::default()
    })
}

/// Reads the configuration from a state file. The file is not trusted: each part is validated where
/// it is used.
pub fn read_note(note: &[u8]) -> Result<Config, Refusal> {
    let config: Config = serde_json::from_slice(note).map_err(|_| {
        Refusal::bad(
            "Load snapshot error: the state file was not written by this API; load it with the \
             library that wrote it.",
        )
    })?;
    let boot_source = BootSource::default();
    Ok(Config { boot_source, logger: None, metrics: None, ..config })
}

/// Applies the client's overrides to the configuration; fails if one names a device that is absent.
pub fn apply(config: &mut Config, changes: &Changes<'_>) -> Result<(), Refusal> {
    let none = |what: &str, id: &str| {
        Refusal::bad(format!("Load snapshot error: the snapshot has no {what} {id:?}."))
    };
    for change in changes.nets {
        let mut nets = config.network_interfaces.iter_mut();
        let net = nets.find(|net| net.iface_id == change.iface_id);
        let net = net.ok_or_else(|| none("network interface", &change.iface_id))?;
        net.host_dev_name.clone_from(&change.host_dev_name);
    }
    for change in changes.drives {
        let drive = config.drives.iter_mut().find(|drive| drive.drive_id == change.drive_id);
        let drive = drive.ok_or_else(|| none("drive", &change.drive_id))?;
        check_image(&change.path_on_host, drive.read_only())?;
        drive.path_on_host = Some(change.path_on_host.clone());
    }
    if let Some(change) = changes.vsock {
        let vsock = config.vsock.as_mut().ok_or_else(|| none("vsock for", &change.uds_path))?;
        check_vsock_path(&change.uds_path)?;
        vsock.uds_path.clone_from(&change.uds_path);
    }
    Ok(())
}

/// Returns the format version of a state file, without loading it.
pub fn describe(path: &Path) -> Result<u64, String> {
    let mut head = Vec::new();
    let opened = open::file(path, open::Access::Read);
    let read = opened.and_then(|file| file.take(1 << 20).read_to_end(&mut head));
    read.map_err(|error| format!("{}: {error}", path.display()))?;
    let manifest = head.strip_prefix(b"pvmm-vm\n").and_then(|rest| {
        let (len, rest) = rest.split_at_checked(4)?;
        let len = u32::from_le_bytes(len.try_into().ok()?) as usize;
        serde_json::from_slice::<Value>(rest.get(..len)?).ok()
    });
    let version = manifest.and_then(|manifest| manifest["version"].as_u64());
    version.ok_or_else(|| {
        format!("{}: not a state file of pvmm; bake it again with pvmm", path.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        serde_json::from_str(
            r#"{"drives":[{"drive_id":"rootfs","is_root_device":true,"path_on_host":"/r"}],
                "network-interfaces":[{"iface_id":"1","host_dev_name":"tap9"}],
                "vsock":{"guest_cid":3,"uds_path":"/v"},"logger":{"log_path":"/l"},
                "boot-source":{"kernel_image_path":"/k"}}"#,
        )
        .unwrap()
    }

    fn changed(nets: &[(&str, &str)], vsock: Option<&str>) -> Result<Config, Refusal> {
        let net = |(id, tap): &(&str, &str)| NetworkOverride {
            iface_id: (*id).to_owned(),
            host_dev_name: (*tap).to_owned(),
        };
        let nets: Vec<_> = nets.iter().map(net).collect();
        let vsock = vsock.map(|path| VsockOverride { uds_path: path.to_owned() });
        let mut config = config();
        apply(&mut config, &Changes { nets: &nets, vsock: vsock.as_ref(), drives: &[] })?;
        Ok(config)
    }

    #[test]
    fn note_goes_back_into_the_machine_without_what_is_a_process_own() {
        let back = read_note(&note(&config()).unwrap()).unwrap();
        assert_eq!(back.drives, config().drives);
        assert_eq!((back.logger, back.boot_source), (None, BootSource::default()));
        for other in [&b""[..], b"a note", b"[]", b"{\"drives\":1}"] {
            assert_eq!(read_note(other).unwrap_err().status, 400);
        }
    }

    #[test]
    fn changes_of_what_is_there_are_made_and_others_refused() {
        let config = changed(&[("1", "tap0")], Some("/w")).unwrap();
        assert_eq!(config.network_interfaces[0].host_dev_name, "tap0");
        assert_eq!(config.vsock.unwrap().uds_path, "/w");
        assert!(changed(&[("2", "tap0")], None).unwrap_err().message.contains("\"2\""));
        assert!(changed(&[], Some("")).is_err());
        let mut bare = Config::default();
        let vsock = VsockOverride { uds_path: "/w".to_owned() };
        let changes = Changes { nets: &[], vsock: Some(&vsock), drives: &[] };
        assert!(apply(&mut bare, &changes).is_err());
    }

    #[test]
    fn drive_that_only_a_state_file_names_is_checked_and_kept_below_its_root() {
        let place = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(place.path()).unwrap();
        let (image, link) = (root.join("image"), root.join("link"));
        fs::write(&image, [0; 512]).unwrap();
        let drive = |path: &Path| {
            let mut drive = config().drives.remove(0);
            drive.path_on_host = Some(path.display().to_string());
            drive
        };
        let below = Some(vec![root.clone()]);
        check_saved_drive(&drive(&image), &None).unwrap();
        check_saved_drive(&drive(&image), &below).unwrap();
        let elsewhere = Some(vec![root.join("other")]);
        let refused = check_saved_drive(&drive(&image), &elsewhere).unwrap_err().message;
        assert!(refused.contains("not below --drive-root"), "{refused}");
        // A link out of the root is refused, and so is a file that is no image.
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        check_saved_drive(&drive(&link), &below).unwrap_err();
        check_saved_drive(&drive(Path::new("/dev/null")), &None).unwrap_err();
        check_saved_drive(&drive(&root), &None).unwrap_err();
        // A missing image is allowed, but only at an allowed path.
        check_saved_drive(&drive(&root.join("later")), &below).unwrap();
        check_saved_drive(&drive(Path::new("/later")), &below).unwrap_err();
        check_saved_drive(&drive(&root.join("../later")), &below).unwrap_err();
    }

    #[test]
    fn i4_drive_override_that_is_no_image_or_no_drive_is_refused() {
        for (id, path) in
            [("rootfs", "/no/such"), ("rootfs", "/dev/null"), ("other", "/etc/passwd")]
        {
            let drives = [DriveOverride { drive_id: id.into(), path_on_host: path.into() }];
            let changes = Changes { nets: &[], vsock: None, drives: &drives };
            assert!(apply(&mut config(), &changes).is_err(), "{id} {path}");
        }
    }

    #[test]
    fn state_file_of_another_program_is_not_described() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), 0x0710_1984_8664_0000_u64.to_le_bytes()).unwrap();
        assert!(describe(file.path()).unwrap_err().contains("bake it again"));
        std::fs::write(file.path(), b"pvmm-vm\n\x0d\0\0\0{\"version\":1}").unwrap();
        assert_eq!(describe(file.path()), Ok(1));
    }
}
