//! Really fetches Debian's kernel and builds templates, into a cache of its own.
//! It is apart from the unit tests because it needs package mirrors and about half a minute.

#![allow(clippy::unwrap_used)] // Clippy does not see that helpers of tests are tests too.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use pvmm_agent_image::AGENT;
use pvmm_images::{Cache, Event, Kernel, Recipe, Silent, Template};

/// One cache for all tests here. What it downloaded is kept for the next run, where `cargo clean`
/// finds it; what it built is not, so that every run builds.
fn cache() -> &'static Cache {
    static CACHE: OnceLock<Cache> = OnceLock::new();
    CACHE.get_or_init(|| {
        let cache = Cache::at(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache")).unwrap();
        for built in ["kernels", "templates"] {
            let _ = std::fs::remove_dir_all(cache.root().join(built));
        }
        cache
    })
}

fn tool(program: &str, arguments: &[&str], image: &Path) -> (String, bool) {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap());
    let output = Command::new(program).env("PATH", path).args(arguments).arg(image).output();
    let output = output.unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
}

fn debugfs(image: &Path, request: &str) -> String {
    tool("debugfs", &["-R", request], image).0
}

fn assert_file(image: &Path, path: &str) {
    let stat = debugfs(image, &format!("stat {path}"));
    assert!(stat.contains("Inode:"), "{path} is missing: {stat}");
}

#[test]
fn debian_kernel_from_mirrors_has_the_modules_of_a_guest_in_their_order() {
    let kernel = Kernel::debian(cache(), &mut Silent).unwrap();
    assert!(kernel.release.ends_with("-cloud-amd64"), "{}", kernel.release);
    assert_eq!(std::fs::read(&kernel.vmlinux).unwrap()[..4], *b"\x7fELF");
    assert_eq!(Kernel::from_path(&kernel.vmlinux).unwrap().release, kernel.release);
    let names: Vec<_> = kernel.modules.iter().map(|module| module.name.as_str()).collect();
    let at = |name: &str| names.iter().position(|n| *n == name).unwrap_or_else(|| panic!("{name}"));
    assert!(at("vsock") < at("vmw_vsock_virtio_transport_common"));
    assert!(at("vmw_vsock_virtio_transport_common") < at("vmw_vsock_virtio_transport"));
    assert!(at("failover") < at("net_failover") && at("net_failover") < at("virtio_net"));
    for name in ["virtio_mmio", "virtio_blk", "virtio_rng", "virtio_balloon", "overlay"] {
        at(name);
    }
    let initramfs = kernel.initramfs(AGENT).unwrap();
    assert!(initramfs.len() < AGENT.len() + (4 << 20), "{} bytes", initramfs.len());
    // The second time it is there, and nobody is told anything.
    let mut progress = |event: Event<'_>| panic!("{event:?}");
    assert_eq!(Kernel::debian(cache(), &mut progress).unwrap(), kernel);
}

#[test]
fn base_template_from_mirrors_has_python_pip_and_a_clean_filesystem() {
    let template = Template::ensure(cache(), &Recipe::base(), &mut Silent).unwrap();
    let image = &template.rootfs;
    let (said, clean) = tool("e2fsck", &["-fn"], image);
    assert!(clean, "{said}");
    for path in [
        "/usr/bin/python3.11",
        "/usr/bin/python",
        "/usr/bin/bash",
        "/usr/bin/sh",
        "/usr/bin/awk",
        "/usr/bin/ps",
        "/usr/bin/pip3",
        "/usr/lib/python3/dist-packages/pip/__main__.py",
        "/usr/lib/python3.11/__pycache__/ssl.cpython-311.pyc",
        "/etc/ld.so.cache",
        "/etc/os-release",
    ] {
        assert_file(image, path);
    }
    assert!(debugfs(image, "cat /etc/passwd").contains("user:x:1000:1000:"));
    let bundle = debugfs(image, "cat /etc/ssl/certs/ca-certificates.crt");
    assert!(bundle.matches("BEGIN CERTIFICATE").count() > 100);
    assert!(debugfs(image, "stat /home/user").contains("User:  1000"));
    assert!(debugfs(image, "stat /usr/bin/bash").contains("User:     0"));
    assert!(debugfs(image, "stat /tmp").contains("Mode:  01777"));
    assert!(!debugfs(image, "ls /usr/lib/python3.11").contains("EXTERNALLY-MANAGED"));
    assert!(!debugfs(image, "ls /usr/share").contains(" man"));
    assert!(template.manifest.system.starts_with("Debian GNU/Linux"));
    assert!(template.manifest.packages.iter().any(|package| package.name == "python3.11"));
    assert!(std::fs::metadata(image).unwrap().len() < 128 << 20);
}

#[test]
fn template_with_more_packages_has_their_files() {
    let recipe = Recipe::new("trees", &["tree".to_owned()]).unwrap();
    let template = Template::build(cache(), &recipe, &mut Silent).unwrap();
    assert_file(&template.rootfs, "/usr/bin/tree");
    assert_file(&template.rootfs, "/usr/bin/python3.11");
}

#[test]
fn template_with_an_unknown_package_names_it_and_leaves_nothing() {
    let recipe = Recipe::new("broken", &["pvmm-no-such-package".to_owned()]).unwrap();
    let err = Template::build(cache(), &recipe, &mut Silent).unwrap_err().to_string();
    assert!(err.starts_with("--packages: no Debian package is called \"pvmm-no-such"), "{err}");
    let templates = std::fs::read_dir(cache().root().join("templates")).unwrap();
    let left = templates.flatten().any(|e| e.file_name().to_string_lossy().contains("broken"));
    assert!(!left);
}
