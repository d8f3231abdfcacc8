//! Tests of kernel files that are made up here, so that they need no network; `tests/build.rs` uses
//! Debian's real kernel.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::modules::Offer;
use super::*;

/// Builds an x86-64 ELF file with one named section.
fn elf_with(section: &str, content: &[u8]) -> Vec<u8> {
    let names = format!("\0{section}\0.names\0");
    let mut file = vec![0; 64];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[18] = 62;
    let content_at = file.len();
    file.extend_from_slice(content);
    let names_at = file.len();
    file.extend_from_slice(names.as_bytes());
    let table_at = file.len();
    let headers =
        [(0, 0, 0), (1, content_at, content.len()), (section.len() + 2, names_at, names.len())];
    for (name, at, len) in headers {
        let mut header = [0; 64];
        header[..4].copy_from_slice(&(name as u32).to_le_bytes());
        header[24..32].copy_from_slice(&(at as u64).to_le_bytes());
        header[32..40].copy_from_slice(&(len as u64).to_le_bytes());
        file.extend_from_slice(&header);
    }
    file[40..48].copy_from_slice(&(table_at as u64).to_le_bytes());
    file[58] = 64;
    file[60] = 3;
    file[62] = 2;
    file
}

fn vmlinux() -> Vec<u8> {
    elf_with(".rodata", b"junk\0Linux version 6.12.1-test (me@here) #1\0")
}

fn bzimage(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 1024];
    image[0x1f1] = 1;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x20e..0x210].copy_from_slice(&(0x300_u16 - 0x200).to_le_bytes());
    image[0x300..0x30b].copy_from_slice(b"6.12.2-bz (");
    image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    image.resize(1024 + 16, 0);
    image.extend_from_slice(payload);
    image
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn module(depends: &str) -> Vec<u8> {
    elf_with(".modinfo", format!("license=GPL\0depends={depends}\0name=x\0").as_bytes())
}

fn from_bytes(bytes: &[u8]) -> Result<Kernel, KernelError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kernel");
    fs::write(&path, bytes).unwrap();
    Kernel::from_path(&path)
}

#[test]
fn kernel_from_elf_knows_its_release() {
    let kernel = from_bytes(&vmlinux()).unwrap();
    assert_eq!((kernel.format, kernel.release.as_str()), (Format::Elf, "6.12.1-test"));
    assert_eq!(kernel.origin, Origin::User);
}

#[test]
fn kernel_from_bzimage_knows_its_release() {
    let kernel = from_bytes(&bzimage(b"")).unwrap();
    assert_eq!((kernel.format, kernel.release.as_str()), (Format::BzImage, "6.12.2-bz"));
}

#[test]
fn kernel_from_what_is_none_is_refused_by_name() {
    let mut arm = vmlinux();
    arm[18] = 183;
    for bytes in [&b"#!/bin/sh\n"[..], &[0; 8192], b"\x7fELF", &arm] {
        let err = from_bytes(bytes).unwrap_err();
        assert!(matches!(err, KernelError::NotAKernel { .. }), "{err}");
    }
    assert!(matches!(from_bytes(b""), Err(KernelError::Empty { .. })));
}

#[test]
fn kernel_from_a_path_without_file_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| Kernel::from_path(&dir.path().join(name)).unwrap_err();
    assert!(matches!(at("missing"), KernelError::NotFound { .. }));
    assert!(matches!(at(""), KernelError::NotAFile { .. }));
    assert!(matches!(at("a\0b"), KernelError::Nul { .. }));
    let fifo = Kernel::from_path(Path::new("/dev/null")).unwrap_err();
    assert!(fifo.to_string().starts_with("--kernel: /dev/null is not a regular file"), "{fifo}");
}

#[test]
fn own_kernel_is_taken_only_when_it_is_there_and_whole() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path()).unwrap();
    assert_eq!(Kernel::own(&cache).unwrap(), None);
    let entry = cache.path("kernels", "abc");
    fs::create_dir_all(&entry).unwrap();
    fs::write(entry.join("vmlinux"), vmlinux()).unwrap();
    std::os::unix::fs::symlink("abc", cache.path("kernels", "current")).unwrap();
    let kernel = Kernel::default_in(&cache, &mut crate::Silent).unwrap();
    assert_eq!(kernel.label, "pvmm kernel 6.12.1-test");
    assert!(kernel.vmlinux.ends_with("kernels/abc/vmlinux"));
    fs::write(entry.join("vmlinux"), "").unwrap();
    assert!(matches!(Kernel::own(&cache), Err(KernelError::Own { .. })));
}

#[test]
fn kernel_of_debian_is_found_by_its_file_with_its_modules_and_any_other_without() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vmlinux");
    fs::write(&file, vmlinux()).unwrap();
    assert!(Kernel::found(&file).unwrap().modules.is_empty());
    let package = r#"{"name": "linux", "version": "1", "architecture": "amd64"}"#;
    let text = format!(
        r#"{{"layout": 1, "package": {package}, "release": "6.1", "modules": ["virtio_blk"]}}"#
    );
    fs::write(dir.path().join("kernel.json"), text).unwrap();
    let kernel = Kernel::found(&file).unwrap();
    assert_eq!((kernel.origin, kernel.modules[0].name.as_str()), (Origin::Debian, "virtio_blk"));
    let other = dir.path().join("other");
    fs::copy(&file, &other).unwrap();
    assert_eq!(Kernel::found(&other).unwrap().vmlinux, other);
}

#[test]
fn bzimage_with_gzip_payload_gives_the_elf_inside() {
    let image = bzimage(&gzip(&vmlinux()));
    assert_eq!(bzimage::unpack(&image).unwrap(), vmlinux());
}

#[test]
fn bzimage_that_is_broken_says_how() {
    let whole = bzimage(&gzip(&vmlinux()));
    let cut = bzimage::unpack(&whole[..whole.len() - 1]);
    assert!(matches!(cut, Err(BzImageError::Truncated)));
    let text = bzimage::unpack(&bzimage(&gzip(b"not an ELF file")));
    assert!(matches!(text, Err(BzImageError::NotElf)));
    let lz4 = bzimage::unpack(&bzimage(&[0x02, 0x21, 0x4c, 0x18, 0]));
    assert!(matches!(lz4, Err(BzImageError::UnknownCompression { method: "lz4" })));
    let mut old = whole;
    old[0x206] = 7;
    old[0x207] = 2;
    assert!(matches!(bzimage::unpack(&old), Err(BzImageError::TooOld { version: 0x207 })));
}

#[test]
fn modules_with_dependencies_come_after_them() {
    let mut offer = Offer::default();
    offer.add("virtio-net.ko.gz", gzip(&module("net_failover,failover")));
    offer.add("net_failover.ko", module("failover"));
    offer.add("failover.ko", module(""));
    offer.add("unrelated.ko", module(""));
    offer.add_built_in("kernel/fs/ext4/ext4.ko\n");
    let order = offer.in_order(&["virtio_net", "ext4", "failover"]).unwrap();
    let names: Vec<_> = order.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["failover", "net_failover", "virtio_net"]);
    assert_eq!(order[2].1, module("net_failover,failover"));
}

#[test]
fn modules_that_cannot_be_ordered_are_refused() {
    let mut offer = Offer::default();
    offer.add("a.ko", module("b"));
    offer.add("b.ko", module("a"));
    offer.add("text.ko", b"text".to_vec());
    assert!(matches!(offer.in_order(&["a"]), Err(ModulesError::Circle { .. })));
    assert!(matches!(offer.in_order(&["none"]), Err(ModulesError::Missing { .. })));
    assert!(matches!(offer.in_order(&["text"]), Err(ModulesError::NotAModule { .. })));
}
